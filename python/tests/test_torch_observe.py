"""foci.torch.observe on models that call foci's functions themselves: timm's, torch.nn's, others.

Statistics are held to those of the weights, softmax(q k^T / sqrt(D)) in float64.
"""

from __future__ import annotations

import threading
from typing import Any, Tuple

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
F = torch.nn.functional

import foci.torch  # noqa: E402
from foci.torch import _watch  # noqa: E402

TOLERANCE = 2e-5


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def on_foci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", foci.torch.scaled_dot_product_attention)


def assert_near(got: torch.Tensor, want: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert got.shape == want.shape
    error = (got.double() - want.double()).abs().max().item()
    assert error <= tolerance * want.double().abs().max().clamp_min(1.0).item(), error


def weights_of(q: torch.Tensor, k: torch.Tensor, mask: Any = None) -> torch.Tensor:
    """[B, H, N, M] float64."""
    s = q.detach().double() @ k.detach().double().mT * q.shape[-1]**-0.5
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf)
    return torch.softmax(s, -1)


def assert_record(record: Any, p: torch.Tensor) -> None:
    assert_near(record.entropy, -torch.special.xlogy(p, p).sum(-1))
    assert_near(record.coverage, p.sum(-2))
    assert_near(record.max_weight, p.amax(-1))
    picked = torch.gather(p, -1, record.max_key[..., None])[..., 0]
    assert (picked >= p.amax(-1) - 1e-5).all()


class Attention(torch.nn.Module):
    """As timm's: a fused call of PyTorch's function by its place in torch.nn.functional."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = torch.nn.Linear(size, 3 * size), torch.nn.Linear(size, size)
        self.seen: Tuple[torch.Tensor, ...] = ()

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        B, N, E = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        self.seen = (q, k)
        y = F.scaled_dot_product_attention(q, k, v, **options)
        return self.proj(y.transpose(1, 2).reshape(B, N, E))


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = torch.nn.LayerNorm(32), Attention(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attn(self.norm(x))


@pytest.mark.usefixtures("on_foci")
def test_calls_of_pytorchs_function_are_recorded_by_module() -> None:
    model = torch.nn.Sequential(Block(), Block())
    x = torch.randn(3, 7, 32)
    plain = model(x)
    with foci.torch.observe(model, ("entropy", "coverage", "max_weight", "support"),
                            rows=[0, -1], heads=[1]) as o:
        watched = model(x)
    assert torch.equal(plain, watched)
    assert o.names == ["0.attn", "1.attn"] and o.entropy.shape == (2, 3, 4, 7)
    for block, record in zip(model, o.layers):
        p = weights_of(*block.attn.seen)
        assert_record(record, p)
        assert_near(record.weights, p[:, [1]][:, :, [0, -1]])
        assert (record.support == 7).all()
    with foci.torch.observe(model[1]) as part:
        model(x)
    assert part.names == ["attn"]
    model(x)  # nobody looks on
    assert len(o.layers) == 2 and not any(
        m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert _watch.listening == 0


@pytest.mark.usefixtures("on_foci")
@pytest.mark.parametrize("mask", ["causal", "keep", "bias"])
def test_masks_are_in_the_statistics(mask: str) -> None:
    model = torch.nn.ModuleDict({"attn": Attention(32, 4)})
    seen = torch.rand(7, 7) < 0.5
    seen |= torch.eye(7, dtype=torch.bool)
    options = {"causal": {"is_causal": True}, "keep": {"attn_mask": seen},
               "bias": {"attn_mask": torch.zeros(7, 7).masked_fill(~seen, -torch.inf)}}[mask]
    with torch.no_grad(), foci.torch.observe(model.attn) as o:
        model.attn(torch.randn(2, 7, 32), **options)
    assert o.names == [""]
    shown = torch.ones(7, 7, dtype=torch.bool).tril() if mask == "causal" else seen
    assert_record(o.layers[0], weights_of(*model.attn.seen, shown))


@pytest.mark.usefixtures("on_foci")
def test_torch_nn_attention_is_recorded() -> None:
    layer = torch.nn.TransformerEncoderLayer(32, 4, 48, batch_first=True).eval()
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(2, 5, 32)
    # Without gradients an operator of PyTorch's own computes the whole layer.
    want = model(x)
    with foci.torch.observe(model) as o:
        assert_near(model(x), want)
    assert o.names == [f"layers.{n}.self_attn" for n in range(2)]
    mha = model.layers[0].self_attn
    with torch.no_grad():
        _, p = mha(x, x, x, average_attn_weights=False)
    assert_record(o.layers[0], p.double())


class Own(torch.nn.Module):
    """Calls foci.torch.attention with statistics of its own, and no module for its attention."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return foci.torch.attention(q, k, v, **self.options)


@pytest.mark.parametrize("statistics", [(), "entropy", ("support",), ["max_weight"]])
def test_a_call_gets_what_it_asked_for(statistics: Any) -> None:
    own = Own(statistics=statistics, normalizer="sparsemax")
    q, k, v = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 4)
    want = own(q, k, v)
    with foci.torch.observe(own, ("coverage", "max_weight")) as o:
        got = own(q, k, v)
    assert type(got) is type(want)
    if not statistics:
        assert torch.equal(got, want)
    else:
        for name in ("y", "row_stat", "entropy", "max_weight", "max_key", "support", "coverage"):
            a, b = getattr(got, name), getattr(want, name)
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), name
    p = foci.torch.attention(q, k, v, statistics="row_stat", normalizer="sparsemax").weights()
    assert o.names == [""] and o.layers[0].entropy is None
    assert_near(o.coverage[0], p.sum(-2))


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 3, 4, 5, 8)])
def test_any_leading_dimensions(shape: Tuple[int, ...]) -> None:
    class Call(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return foci.torch.scaled_dot_product_attention(q, q, q)

    q, model = torch.randn(shape), Call()
    with foci.torch.observe(model) as o:
        model(q)
    four = q.reshape(-1, shape[-3] if len(shape) > 2 else 1, *shape[-2:])
    assert_record(o.layers[0], weights_of(four, four))


def test_gradients_of_statistics_reach_the_model() -> None:
    model = torch.nn.Sequential(Attention(32, 4))
    model[0].forward = lambda x: foci_forward(model[0], x)  # type: ignore[method-assign]

    def foci_forward(attn: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = attn.qkv(x).reshape(2, 6, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        attn.seen = (q, k)
        return foci.torch.attention(q, k, v)

    x = torch.randn(2, 6, 32)
    with foci.torch.observe(model, "entropy") as o:
        model(x)
    got, = torch.autograd.grad(o.entropy.sum(), model[0].qkv.weight)
    q, k = model[0].qkv(x).reshape(2, 6, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)[:2]
    p = torch.softmax(q @ k.mT * 8**-0.5, -1)
    want, = torch.autograd.grad(-(p * p.log()).sum(), model[0].qkv.weight)
    assert_near(got, want)


def test_what_runs_outside_of_the_model_is_not_recorded() -> None:
    own, other = Own(), Own()
    q = torch.randn(1, 1, 4, 8)
    with foci.torch.observe(own) as o:
        foci.torch.attention(q, q, q)
        other(q, q, q)
        with pytest.raises(ValueError, match="k: "):
            own(q, q[..., :4], q)  # the module is left all the same
        foci.torch.attention(q, q, q)
        thread = threading.Thread(target=own, args=(q, q, q))
        thread.start()
        thread.join()
    assert not o.layers
    with pytest.raises(ValueError, match="entropy: no attention layer of the model has run"):
        o.entropy


def test_multihead_attention_is_recorded_once() -> None:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = [foci.torch.MultiheadAttention(16, 2, batch_first=True)]  # no child
            self.own = foci.torch.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, _ = self.own(x, x, x)
            return self.held[0](y, y, y)[0]

    model = Holder()
    with foci.torch.observe(model) as o:
        model(torch.randn(2, 5, 16))
    assert o.names == ["own", ""]


@pytest.mark.usefixtures("on_foci")
def test_a_timm_model_is_observed() -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed")
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, img_size=32, depth=2).eval()
    kept = {}
    for n in range(2):
        model.blocks[n].attn.qkv.register_forward_hook(
            lambda m, i, y, n=n: kept.__setitem__(n, y.detach()))
    with torch.no_grad(), foci.torch.observe(model, rows=[0]) as o:
        model(torch.randn(1, 3, 32, 32))
    assert o.names == ["blocks.0.attn", "blocks.1.attn"]
    for n, record in enumerate(o.layers):
        q, k, _ = kept[n].reshape(1, 5, 3, 3, 64).permute(2, 0, 3, 1, 4).unbind(0)
        assert_record(record, weights_of(q, k))
        assert_near(record.weights, weights_of(q, k)[:, :, [0]])
