"""foci.torch.sparsemax and its kin, with gradients, against float64 formulas."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from formulas import near, normalised  # noqa: E402

import foci.torch  # noqa: E402


@pytest.mark.parametrize("name, options", [("softmax", {}), ("sparsemax", {}),
                                           ("entmax", {"alpha": 1.5}), ("topk", {"k": 3})])
def test_weights_and_gradients(name, options):
    rng = np.random.default_rng(0)
    s, up = rng.standard_normal((2, 3, 4, 9))
    x = torch.tensor(s, dtype=torch.float32, requires_grad=True)
    y = getattr(foci.torch, name)(x, dim=1, **options)
    of = lambda a: np.moveaxis(normalised(np.moveaxis(a, 1, -1), name, **options), -1, 1)
    near(y.detach().numpy(), of(s), 1e-5)
    y.backward(torch.tensor(up, dtype=torch.float32))
    want, step = np.zeros_like(s), 1e-6
    for i in np.ndindex(s.shape):
        e = np.zeros_like(s)
        e[i] = step
        want[i] = ((of(s + e) - of(s - e)) * up).sum() / (2 * step)
    near(x.grad.numpy(), want, 1e-4)


def test_bfloat16_and_refusals():
    x = torch.randn(5, 7, dtype=torch.bfloat16)
    near(foci.torch.entmax(x).float().numpy(),
         normalised(x.double().numpy(), "entmax", alpha=1.5), 2e-2)
    with pytest.raises(ValueError, match="scores: torch.float64 arrived"):
        foci.torch.softmax(x.double())
    with pytest.raises(TypeError, match="scores: list arrived"):
        foci.torch.softmax([1.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_graphs_have_them_whole(dtype):
    def f(x):
        return foci.torch.entmax(x, alpha=1.3, dim=0) + foci.torch.topk(x.sin(), 3, dim=1)

    x = torch.randn(7, 9).to(dtype).requires_grad_()
    up = torch.randn(7, 9).to(dtype)
    y = f(x)
    want, = torch.autograd.grad(y, x, up)
    z = torch.compile(f, fullgraph=True, backend="aot_eager")(x)
    got, = torch.autograd.grad(z, x, up)
    assert torch.equal(y, z) and torch.equal(want, got)


def test_operators_pass_pytorchs_own_checks():
    text = foci.Spec(normalizer="sparsemax").to_json()
    x = torch.randn(3, 4, 5, requires_grad=True)
    torch.library.opcheck(torch.ops.foci.normalize.default, (x, text))
    p = torch.ops.foci.normalize(x, text).detach()
    torch.library.opcheck(torch.ops.foci.normalize_backward.default,
                          (p, torch.randn(3, 4, 5), text))
    exported = torch.export.export(Sparse(), (torch.randn(2, 6),))
    s = torch.randn(2, 6)
    assert torch.equal(exported.module()(s), foci.torch.sparsemax(s))


class Sparse(torch.nn.Module):
    def forward(self, x):
        return foci.torch.sparsemax(x)
