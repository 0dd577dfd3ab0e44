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
            torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-5)


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
        sdpa(q, q, q[0])
    with pytest.raises(ValueError, match="key: 1 heads arrived beside 3 of query"):
        sdpa(q, q[:, :1], q[:, :1])
    with pytest.raises(ValueError, match=r"attn_mask: shape \[4, 5\] arrived"):
        sdpa(q, q, q, attn_mask=torch.ones(4, 5))
    with pytest.raises(ValueError, match="attn_mask: given beside is_causal"):
        sdpa(q, q, q, attn_mask=torch.ones(5, 5), is_causal=True)
    with pytest.raises(ValueError, match="q: float64 arrived"):
        sdpa(q.double(), q.double(), q.double())
