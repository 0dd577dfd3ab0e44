"""foci.torch.sparsemax and its kin, with gradients, against float64 formulas."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", minversion="2.6")

import entmax_table  # noqa: E402
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


def test_entmax_and_its_gradient_against_mpmath():
    for name, alpha, s, j, p, ds in entmax_table.cases():
        x = torch.tensor(s, requires_grad=True)
        y = foci.torch.entmax(x, alpha=alpha)
        assert np.abs(y.detach().numpy()[j] - p).max() < 1e-7, name
        y.backward(torch.tensor(entmax_table.upstream(s.size)))
        assert entmax_table.same_gradient(x.grad.numpy()[j], ds), name


def test_a_large_alpha_under_compilers_and_transforms():
    def f(x):
        return foci.torch.entmax(x, alpha=30.0)

    x = torch.randn(5, 40)
    up = torch.randn(5, 40)
    x.requires_grad_()
    want, = torch.autograd.grad(f(x), x, up)
    got, = torch.autograd.grad(torch.compile(f, fullgraph=True, backend="aot_eager")(x), x, up)
    assert torch.equal(want, got)
    _, pull = torch.func.vjp(f, x.detach())
    assert torch.equal(want, pull(up)[0])
    rows = torch.func.vmap(lambda r, u: torch.func.vjp(f, r)[1](u)[0])(x.detach(), up)
    assert torch.equal(want, rows)
    text = foci.Spec(normalizer="entmax", alpha=30.0).to_json()
    torch.library.opcheck(torch.ops.foci.normalize.default, (x, text))


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


@pytest.mark.parametrize("dim, shape", [(-1, ()), (1, ()), (-1, (1,)), (-1, (3, 1, 1)),
                                        (-1, (4, 1)), (1, (3, 1, 9)), (-1, (3, 4, 1))])
def test_alpha_is_learned(dim, shape):
    rng = np.random.default_rng(2)
    s, up = rng.standard_normal((2, 3, 4, 9))
    a = rng.uniform(1.05, 2.5, shape)
    x = torch.tensor(s, dtype=torch.float32, requires_grad=True)
    alpha = torch.tensor(a, dtype=torch.float64, requires_grad=True)
    y = foci.torch.entmax(x, alpha, dim=dim)

    def of(s, a):
        wide = np.moveaxis(np.broadcast_to(a, s.shape), dim, -1)[..., :1]
        return np.moveaxis(normalised(np.moveaxis(s, dim, -1), "entmax", alpha=wide), -1, dim)

    near(y.detach().numpy(), of(s, a), 1e-5)
    y.backward(torch.tensor(up, dtype=torch.float32))
    want, step = np.zeros(a.shape), 1e-6
    for i in np.ndindex(a.shape):
        e = np.zeros(a.shape)
        e[i] = step
        want[i] = ((of(s, a + e) - of(s, a - e)) * up).sum() / (2 * step)
    assert alpha.grad.shape == alpha.shape
    near(alpha.grad.numpy(), want, 1e-4)
    # The scores' gradients are those that a number gives.
    if a.size == 1:
        z = x.detach().clone().requires_grad_()
        foci.torch.entmax(z, a.item(), dim=dim).backward(torch.tensor(up, dtype=torch.float32))
        assert torch.equal(x.grad, z.grad)


def test_a_learned_alpha_in_compiled_graphs_and_transforms():
    def f(x, alpha):
        return foci.torch.entmax(x, alpha, dim=1)

    x = torch.randn(3, 7, 2)
    alpha = torch.tensor([1.25, 1.5, 2.0]).reshape(3, 1, 1)
    loss = lambda x, alpha: f(x, alpha).square().sum()
    want = torch.func.grad(loss, argnums=(0, 1))(x, alpha)
    number = torch.func.grad(lambda x: f(x, 1.5).square().sum())(x)
    assert torch.equal(number, torch.func.grad(loss)(x, torch.tensor(1.5)))
    x.requires_grad_(), alpha.requires_grad_()
    eager = torch.autograd.grad(loss(x, alpha), (x, alpha))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    graph = torch.autograd.grad(compiled(x, alpha), (x, alpha))
    for a, b, c in zip(want, eager, graph):
        assert torch.equal(a, b) and torch.equal(b, c)
    torch.library.opcheck(torch.ops.foci.entmax.default, (x, alpha.detach().reshape(3, 1, 1)))


def test_alphas_that_do_not_fit():
    x = torch.randn(3, 4, 9)
    with pytest.raises(ValueError, match=r"alpha: shape \[9\] arrived"):
        foci.torch.entmax(x, torch.full((9,), 1.5))
    with pytest.raises(ValueError, match=r"alpha: shape \[5, 1, 1\] arrived"):
        foci.torch.entmax(x, torch.full((5, 1, 1), 1.5))
    with pytest.raises(TypeError, match="alpha: torch.int64 arrived"):
        foci.torch.entmax(x, torch.tensor(2))
    with pytest.raises(ValueError, match="alpha: 1 given"):
        foci.torch.entmax(x, torch.tensor(1.0))
