"""Nested tensors of both layouts against their sequences one by one, with gradients."""

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from torch_formulas import near  # noqa: E402

import foci  # noqa: E402
from foci.torch import (MultiheadAttention, attention,  # noqa: E402
                        scaled_dot_product_attention as sdpa)

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")
LAYOUTS = [torch.strided, torch.jagged]
LENGTHS = [((3, 5), (3, 5)), ((3, 5), (6, 2)), ((1, 4, 0), (2, 2, 3)), ((4,), (5,))]


def nested(layout, parts, offsets=None):
    """[B, H, lengths, D] of parts [H, n, D], a leaf."""
    if layout is torch.strided:
        return torch.nested.nested_tensor(parts).requires_grad_()
    flat = torch.cat([p.transpose(0, 1) for p in parts])
    if offsets is None:
        offsets = torch.tensor([0, *[p.shape[1] for p in parts]]).cumsum(0)
    made = torch.nested.nested_tensor_from_jagged(flat, offsets).transpose(1, 2)
    return made.detach().requires_grad_()


def drawn(layout, lengths, key_lengths, heads=2, key_heads=2):
    torch.manual_seed(0)
    parts = [[torch.randn(h, n, d) for n in ns] for h, ns, d in (
        (heads, lengths, 8), (key_heads, key_lengths, 8), (key_heads, key_lengths, 6))]
    q, k = nested(layout, parts[0]), nested(layout, parts[1])
    v = nested(layout, parts[2], k.offsets() if layout is torch.jagged else None)
    return parts, (q, k, v)


def agree(parts, leaves, y, one):
    """The nested result and its gradients against `one` of every sequence."""
    q = leaves[0]
    assert y.is_nested and y.layout == q.layout
    plain = [[p.clone().requires_grad_() for p in some] for some in parts]
    wants = [one(*some) for some in zip(*plain)]
    ups = [torch.randn_like(w) for w in wants]
    for got, want in zip(y.unbind(), wants):
        near(got, want, 1e-6)
    sum((a * b).sum() for a, b in zip(y.unbind(), ups)).backward()
    sum((a * b).sum() for a, b in zip(wants, ups)).backward()
    for leaf, some in zip(leaves, plain):
        for got, want in zip(leaf.grad.unbind(), some):
            near(got, want.grad, 1e-5)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("lengths, key_lengths", LENGTHS)
@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"causal": "top-left"}, {"window": (1, 1), "normalizer": "sparsemax"},
    {"slopes": torch.tensor([0.1, 0.7])}, {"spec": foci.Spec(normalizer="entmax", softcap=5.0)}],
    ids=str)
def test_attention(layout, lengths, key_lengths, options):
    parts, leaves = drawn(layout, lengths, key_lengths)
    y = attention(*leaves, **options)
    agree(parts, leaves, y, lambda q, k, v: attention(q[None], k[None], v[None], **options)[0])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("lengths, key_lengths", LENGTHS)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.2}, {"dropout_p": 1.0}],
                         ids=str)
def test_sdpa(layout, lengths, key_lengths, options):
    parts, leaves = drawn(layout, lengths, key_lengths)
    agree(parts, leaves, sdpa(*leaves, **options), lambda q, k, v: sdpa(q, k, v, **options))


def test_as_pytorch_does():
    _, leaves = drawn(torch.jagged, (3, 5), (3, 5))
    q = leaves[0]
    got = sdpa(q, q, q)
    want = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    near(got.values(), want.values(), 1e-5)
    (got + q).unbind()  # of q's own lengths: PyTorch adds only such


def test_grouped_heads_and_dropout():
    parts, leaves = drawn(torch.jagged, (3, 5), (6, 2), 4, 2)
    agree(parts, leaves, attention(*leaves),
          lambda q, k, v: attention(q[None], k[None], v[None])[0])
    torch.manual_seed(3)
    first = sdpa(*[leaves[1]] * 3, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(first.values(), sdpa(*[leaves[1]] * 3, dropout_p=0.5).values())


def test_compiled():
    _, (q, *_) = drawn(torch.jagged, (3, 5), (3, 5))
    q = q.detach()
    compiled = torch.compile(lambda x: sdpa(x, x, x, is_causal=True), fullgraph=True,
                             backend="aot_eager")
    near(compiled(q).values(), sdpa(q, q, q, is_causal=True).values(), 1e-6)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_multihead_attention(layout, is_causal):
    torch.manual_seed(0)
    mha = MultiheadAttention(16, 2, batch_first=True)
    parts = [torch.randn(n, 16) for n in (3, 5)]
    x = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
    y, weights = mha(x, x, x, is_causal=is_causal)
    assert y.is_nested and y.layout == layout and weights.shape == (2, 5, 5)
    plain = [p.clone().requires_grad_() for p in parts]
    wants = [mha(p, p, p, is_causal=is_causal) for p in plain]
    for got, (want, _) in zip(y.unbind(), wants):
        near(got, want, 1e-5)
    near(weights[0, :3, :3], wants[0][1], 1e-5)
    sum(p.square().sum() for p in y.unbind()).backward()
    sum(want.square().sum() for want, _ in wants).backward()
    for got, want in zip(x.grad.unbind(), plain):
        near(got, want.grad, 1e-5)
    assert mha(x, x, x, need_weights=False)[1] is None


def test_what_they_do_not_take_is_named():
    _, (q, k, v) = drawn(torch.jagged, (3, 5), (6, 2))
    plain = torch.randn(2, 2, 5, 8)
    keep = torch.ones(5, 6, dtype=torch.bool)
    mha = MultiheadAttention(8, 2, batch_first=True)
    x = torch.nested.nested_tensor([torch.randn(n, 8) for n in (3, 5)], layout=torch.jagged)
    for name, call in (
            ("keep", lambda: attention(q, k, v, keep=keep)),
            ("key_lengths", lambda: attention(q, k, v, key_lengths=torch.tensor([1, 1]))),
            ("keep", lambda: attention(q, k, v, foci.Spec(keep=True), keep=keep)),
            ("statistics", lambda: attention(q, k, v, statistics="entropy")),
            ("mask_mod", lambda: attention(q, k, v, mask_mod=lambda b, h, i, j: i > j)),
            ("k", lambda: attention(q, plain, plain)), ("k", lambda: attention(plain, k, v)),
            ("v", lambda: attention(plain, plain, v)), ("v", lambda: attention(q, k, q)),
            ("attn_mask", lambda: sdpa(q, k, v, attn_mask=keep)),
            ("key", lambda: sdpa(q, plain, plain)), ("query", lambda: sdpa(plain, k, v)),
            ("query", lambda: sdpa(q.transpose(1, 2), k, v)),
            ("query", lambda: sdpa(q.double(), k, v)),
            ("query", lambda: MultiheadAttention(8, 2)(x, x, x)),
            ("attn_mask", lambda: mha(x, x, x, attn_mask=keep)),
            ("key_padding_mask", lambda: mha(x, x, x, key_padding_mask=keep)),
            ("key", lambda: mha(x, plain[0], plain[0]))):
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        assert str(caught.value).startswith(name + ":") and "\n" not in str(caught.value)
