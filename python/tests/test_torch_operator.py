"""foci::attention under opcheck, torch.compile, torch.export and torch.func."""

import shutil

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from torch_formulas import near  # noqa: E402

import foci  # noqa: E402
from foci.torch import attention  # noqa: E402
from foci.torch import _op  # noqa: E402

torch.set_num_threads(1)
SPEC = foci.Spec(causal=True).to_json()


def qkv(requires_grad=True, strided=False):
    torch.manual_seed(0)
    if strided:
        x = torch.randn(2, 6, 3, 4, 8)
        q, k, v = (t.transpose(1, 2).detach() for t in x.unbind(2))
    else:
        q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 5)
    return [t.requires_grad_(requires_grad) for t in (q, k, v)]


def arguments(tensors, spec, statistics, **others):
    return (*tensors, *[others.get(name) for name in _op.NAMES], spec, statistics)


@pytest.mark.parametrize("strided", [False, True])
def test_opcheck(strided):
    tensors = qkv(strided=strided)
    torch.library.opcheck(torch.ops.foci.attention.default, arguments(tensors, SPEC, 0))
    spec = foci.Spec(bias=True, alibi=True, dropout=0.2).to_json()
    others = {"bias": torch.randn(6, 6, requires_grad=True),
              "slopes": torch.rand(4, requires_grad=True),
              "scale": torch.rand(4, requires_grad=True), "seed": torch.tensor(3)}
    torch.library.opcheck(torch.ops.foci.attention.default,
                          arguments(tensors, spec, 15, **others))
    row_stat = torch.ops.foci.attention(*arguments(tensors, SPEC, 0))[1].detach()
    torch.library.opcheck(
        torch.ops.foci.weights.default,
        (*tensors[:2], *[None] * len(_op.NAMES), row_stat, SPEC, [0, 5], [1, 3]))


def model(q, k, v, bias, scale):
    out = attention(q * 1.5, k, v, causal="top-left", bias=bias, scale=scale,
                    normalizer="entmax", statistics=["entropy", "coverage"])
    return out.y.sin() + attention(q, k, v).mean(-1, keepdim=True), out.entropy


def inputs():
    torch.manual_seed(1)
    return [*qkv(), torch.randn(4, 1, 6, requires_grad=True), torch.rand(4, requires_grad=True)]


BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.skipif(
    shutil.which("g++") is None, reason="inductor needs g++"))]


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile(backend):
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for _ in range(2):  # the second time it is there
        given, same = inputs(), inputs()
        with torch.no_grad():
            given[4].mul_(1.5), same[4].mul_(1.5)
        for got, want in zip(compiled(*given), model(*same)):
            near(got, want, 1e-6)
        sum(t.sum() for t in compiled(*given)).backward()
        sum(t.sum() for t in model(*same)).backward()
        for t, t2 in zip(given, same):
            near(t.grad, t2.grad, 1e-5)


def test_compile_with_a_spec_weights_and_dropout():
    torch._dynamo.reset()
    spec = foci.Spec(softcap=5.0)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q, k, v):
        out = attention(q, k, v, spec, statistics="entropy")
        return out.weights(rows=[0, 2]), attention(q, k, v, dropout=0.5)

    q, k, v = qkv(False)
    weights, first = call(q, k, v)
    _, second = call(q, k, v)
    assert not torch.equal(first, second)  # the seed is drawn in each call
    near(weights, attention(q, k, v, spec, statistics="entropy").weights(rows=[0, 2]), 0)


def test_compile_for_any_length():
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True), fullgraph=True,
                             backend="aot_eager", dynamic=True)
    for n in (5, 9, 16):
        q, k, v = (torch.randn(2, 4, n, 8, requires_grad=True) for _ in range(3))
        y = compiled(q, k, v)
        near(y, attention(q, k, v, causal=True), 0)
        y.sum().backward()


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)
        self.slopes = torch.nn.Parameter(torch.rand(4))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return attention(q, k, v, slopes=self.slopes, causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict, tmp_path):
    torch.manual_seed(2)
    block, x = Block(), torch.randn(2, 6, 32)
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(block, (x,), strict=strict, dynamic_shapes=({1: length},))
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert any("foci.attention" in name for name in names)
    torch.export.save(program, tmp_path / "block.pt2")
    module = torch.export.load(tmp_path / "block.pt2").module()
    for n in (6, 11):
        x = torch.randn(2, n, 32)
        near(module(x), block(x), 1e-6)


def test_fake_tensors():
    from torch._subclasses import FakeTensorMode
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in qkv(False)]
        out = attention(*fake, statistics=["entropy", "coverage"])
        assert out.y.shape == (2, 4, 6, 5) and out.coverage.shape == (2, 4, 6)


def test_numbers_that_change_compile_anew():
    q = torch.randn(1, 2, 8, 8)
    for name, values in (("softcap", (2.0, 3.0, 4.0)), ("window", (2, 3, 4)),
                         ("scale", (0.1, 0.2))):
        def f(q, x, name=name):
            return foci.torch.attention(q, q, q, **{name: x})
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
        for x in values:
            assert torch.equal(compiled(q, x), f(q, x))
    module = foci.torch.MultiheadAttention(16, 2, batch_first=True, window=3).eval()
    x = torch.randn(2, 5, 16)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, x, x)[0], module(x, x, x)[0])
