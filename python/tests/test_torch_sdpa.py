"""foci.torch.scaled_dot_product_attention against PyTorch's own, in float64."""

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from torch.nn import functional as F  # noqa: E402

from foci.torch import scaled_dot_product_attention as sdpa  # noqa: E402

SHAPES = [  # of query, key, value
    ((5, 8), (7, 8), (7, 6)),
    ((3, 5, 8), (3, 7, 8), (3, 7, 6)),
    ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6)),
    ((2, 4, 3, 5, 8), (2, 4, 3, 7, 8), (2, 4, 3, 7, 8)),
]


def compare(shapes, **options):
    torch.manual_seed(0)
    mask = options.pop("attn_mask", None)
    leaves = [torch.randn(s, requires_grad=True) for s in shapes]
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    masks = [mask, mask]
    if mask is not None and mask.dtype != torch.bool:
        masks = [mask.clone().requires_grad_(), mask.double().requires_grad_()]
    y = sdpa(*leaves, attn_mask=masks[0], **options)
    want = F.scaled_dot_product_attention(*doubles, attn_mask=masks[1], **options)
    assert y.shape == want.shape
    torch.testing.assert_close(y.double(), want, rtol=2e-5, atol=2e-6)
    up = torch.randn(want.shape)
    y.backward(up)
    want.backward(up.double())
    for a, b in zip([*leaves, masks[0]], [*doubles, masks[1]]):
        if b is not None and b.is_floating_point():
            assert a.grad.shape == a.shape
            right = torch.zeros_like(b) if b.grad is None else b.grad
            torch.testing.assert_close(a.grad.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}])
def test_shapes_of_any_rank(shapes, options):
    compare(shapes, **options)


MASKS = [(5, 7), (1, 7), (5, 1), (3, 1, 7), (2, 3, 5, 7), (2, 1, 1, 7)]


@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_broadcast(shape, kind):
    torch.manual_seed(1)
    mask = torch.rand(shape) < 0.8 if kind == "bool" else torch.randn(shape)
    if kind == "bool":
        mask[..., 0] = True
    compare(SHAPES[2], attn_mask=mask)


@pytest.mark.parametrize("shape", [(5, 7), (3, 5, 7), (4, 3, 5, 7), (2, 1, 3, 1, 7)])
def test_masks_of_five_dimensions(shape):
    compare(SHAPES[3], attn_mask=torch.randn(shape))


def test_grouped_heads():
    compare([(2, 6, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)], enable_gqa=True)


def test_dropout_draws_from_pytorchs_generator():
    q = torch.randn(1, 2, 16, 8)
    torch.manual_seed(3)
    first = sdpa(q, q, q, dropout_p=0.5)
    assert not torch.equal(first, sdpa(q, q, q, dropout_p=0.5))
    torch.manual_seed(3)
    assert torch.equal(first, sdpa(q, q, q, dropout_p=0.5))
    assert torch.equal(sdpa(q, q, q), sdpa(q, q, q, dropout_p=0.0))


def test_a_query_that_sees_nothing_gets_nothing():
    q = torch.randn(1, 1, 2, 4)
    y = sdpa(q, q, q, attn_mask=torch.tensor([[True, False], [False, False]]))
    assert torch.equal(y[0, 0, 1], torch.zeros(4))
    assert torch.equal(y[0, 0, 0], q[0, 0, 0])


def test_compiled():
    q = torch.randn(2, 3, 5, 8)

    def f(q):
        return sdpa(q, q.sin(), q, is_causal=True)
    assert torch.equal(torch.compile(f, fullgraph=True, backend="aot_eager")(q), f(q))


def test_refusals():
    q = torch.randn(2, 3, 5, 8)
    with pytest.raises(TypeError, match="key: list arrived"):
        sdpa(q, [1], q)
    with pytest.raises(ValueError, match="value: shape"):
        sdpa(q, q, q[..., :4, :])
    with pytest.raises(ValueError, match="key: 2 heads arrived beside 3"):
        sdpa(q, q[:, :2], q[:, :2])
    with pytest.raises(ValueError, match=r"value: shape \[3, 3, 5, 8\] .* do not broadcast"):
        sdpa(q, q, torch.randn(3, 3, 5, 8))
    with pytest.raises(ValueError, match="key: shape .* a last dimension of 8"):
        sdpa(q, q[..., :7], q)
    with pytest.raises(ValueError, match=r"query: shape \[8\] arrived"):
        sdpa(q[0, 0, 0], q, q)
    with pytest.raises(ValueError, match="key: torch.float16 arrived beside query of torch.float"):
        sdpa(q, q.half(), q)
    with pytest.raises(ValueError, match=r"attn_mask: shape \[4, 5\] arrived"):
        sdpa(q, q, q, attn_mask=torch.ones(4, 5))
    with pytest.raises(ValueError, match="attn_mask: given beside is_causal"):
        sdpa(q, q, q, attn_mask=torch.ones(5, 5), is_causal=True)
    with pytest.raises(TypeError, match="attn_mask: torch.int64 arrived, bool or a floating"):
        sdpa(q, q, q, attn_mask=torch.ones(5, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match="query: torch.float64 arrived"):
        sdpa(q.double(), q.double(), q.double())
    for p, kind in ((1.5, ValueError), (-0.1, ValueError), ("x", TypeError)):
        with pytest.raises(kind, match=f"dropout_p: {p if p != 'x' else 'str'} arrived"):
            sdpa(q, q, q, dropout_p=p)
    with pytest.raises(TypeError, match="scale: str arrived"):
        sdpa(q, q, q, scale="1")
    with pytest.raises(ValueError, match="scale: nan"):
        sdpa(q, q, q, scale=float("nan"))
    with pytest.raises(ValueError, match="query: 3 heads|key: 2 heads arrived beside 3 of query"):
        sdpa(q, q[:, :2], q[:, :2], enable_gqa=True)


BROADCAST = [  # of query, key, value
    ((1, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)),  # learned queries for a batch
    ((2, 4, 5, 8), (1, 4, 7, 8), (1, 4, 7, 6)),  # keys that a batch shares
    ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 6)),  # one key head
    ((2, 4, 5, 8), (2, 4, 7, 8), (2, 1, 7, 6)),
    ((2, 4, 5, 8), (2, 1, 7, 8), (2, 4, 7, 6)),
    ((2, 1, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)),  # one query head
    ((2, 1, 5, 8), (2, 1, 7, 8), (2, 4, 7, 6)),
    ((4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)),  # fewer dimensions
    ((5, 8), (2, 4, 7, 8), (2, 4, 7, 6)),
    ((2, 4, 5, 8), (7, 8), (4, 7, 6)),
    ((2, 1, 4, 5, 8), (1, 3, 4, 7, 8), (3, 1, 7, 6)),
    ((1, 1, 5, 8), (1, 1, 7, 8), (3, 2, 7, 6)),
]


@pytest.mark.parametrize("shapes", BROADCAST, ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 1.0}], ids=str)
def test_leading_dimensions_and_heads_broadcast(shapes, options):
    compare(shapes, **options)


@pytest.mark.parametrize("shapes, mask", [
    (BROADCAST[0], (2, 1, 5, 7)), (BROADCAST[2], (4, 5, 7)), (BROADCAST[2], (2, 4, 1, 7)),
    (BROADCAST[5], (1, 4, 5, 7)), (BROADCAST[7], (5, 7)), (BROADCAST[10], (3, 4, 5, 7)),
    (BROADCAST[10], (2, 3, 1, 5, 1))], ids=str)
def test_masks_beside_broadcast_heads(shapes, mask):
    torch.manual_seed(1)
    compare(shapes, attn_mask=torch.randn(mask))
    keep = torch.rand(mask) < 0.7
    keep[..., 0] = True
    compare(shapes, attn_mask=keep)


@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_dropping_everything_gives_zeros_with_zero_gradients(mask):
    attn_mask = {None: None, "bool": torch.ones(5, 7, dtype=torch.bool),
                 "float": torch.zeros(5, 7)}[mask]
    compare(SHAPES[2], attn_mask=attn_mask, dropout_p=1.0)
    compare([(2, 6, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)], enable_gqa=True, dropout_p=1)


def test_grouped_heads_of_value_that_differ_from_those_of_key():
    compare([(2, 6, 5, 8), (2, 2, 7, 8), (2, 3, 7, 8)], enable_gqa=True)
    compare([(2, 6, 5, 8), (1, 1, 7, 8), (2, 6, 7, 8)], enable_gqa=True)


@pytest.mark.parametrize("shapes", [
    [(0, 0, 0, 0)] * 3, [(2, 0, 10, 8)] * 3, [(2, 0, 10, 8), (2, 0, 7, 8), (2, 0, 7, 6)],
    [(0, 5, 8)] * 3, [(0, 2, 5, 8)] * 3, [(2, 2, 0, 8), (2, 2, 7, 8), (2, 2, 7, 6)],
    [(2, 0, 10, 8), (2, 1, 7, 8), (2, 1, 7, 6)]], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 1.0}], ids=str)
def test_of_nothing_comes_nothing(shapes, options):
    compare(shapes, **options)


def test_a_scale_that_learns():
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)
    scale = torch.tensor(0.4, requires_grad=True)
    sdpa(q, k, k, scale=scale).square().sum().backward()
    want = torch.tensor(0.4, requires_grad=True, dtype=torch.float64)
    weights = torch.softmax(want * (q @ k.mT).double(), -1)
    (weights @ k.double()).square().sum().backward()
    torch.testing.assert_close(scale.grad.double(), want.grad, rtol=1e-5, atol=1e-5)
