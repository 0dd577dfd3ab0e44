"""Tensors that say something else than their memory, at every entrance of foci.torch: resolved
whole, or refused in one line that names the argument."""

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from torch.nn import functional as F  # noqa: E402
from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402
from torch_formulas import near  # noqa: E402

import foci  # noqa: E402
from foci.torch import (MultiheadAttention, attention, entmax,  # noqa: E402
                        scaled_dot_product_attention as sdpa, softmax, sparsemax, topk)

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")
N, M = 5, 7


def drawn():
    torch.manual_seed(0)
    return torch.randn(2, 4, N, 8), torch.randn(2, 2, M, 8), torch.randn(2, 2, M, 6)


# ---- causal biases of torch.nn.attention.bias ----------------------------------------------------

BIASES = [("upper left", causal_upper_left), ("lower right", causal_lower_right)]
SIZES = [(5, 7), (6, 6), (7, 5), (1, 4)]


@pytest.mark.parametrize("kind, make", BIASES)
@pytest.mark.parametrize("n, m", SIZES)
def test_causal_biases_as_pytorch_means_them(kind, make, n, m):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, n, 8), torch.randn(2, 4, m, 8), torch.randn(2, 4, m, 6)
    bias = make(n, m)
    seen = torch.ones(n, m, dtype=torch.bool).tril(0 if kind == "upper left" else m - n)
    want = attention(q, k, v, keep=seen)
    if seen.any(-1).all():
        near(want, F.scaled_dot_product_attention(q, k, v, attn_mask=seen), 1e-5)
        near(want, F.scaled_dot_product_attention(q, k, v, attn_mask=bias), 1e-5)
    for y in (sdpa(q, k, v, attn_mask=bias), attention(q, k, v, bias=bias),
              attention(q, k, v, keep=bias), attention(q, k, v, bias=bias, keep=bias),
              attention(q, k, v, foci.Spec(bias=True), bias=bias),
              attention(q, k, v, foci.Spec(keep=True), keep=bias),
              attention(q, k, v, bias=bias, statistics="entropy").y,
              sdpa(q[0], k[0], v[0], attn_mask=bias)[None].expand(2, -1, -1, -1)[:1],
              sdpa(q[None], k[None], v[None], attn_mask=bias)[0]):
        assert type(y) is torch.Tensor
        near(y, want[:len(y)], 1e-6)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    got = torch.autograd.grad(sdpa(*leaves, attn_mask=bias).square().sum(), leaves)
    same = torch.autograd.grad(attention(*leaves, keep=seen).square().sum(), leaves)
    for a, b in zip(got, same):
        near(a, b, 1e-5)


@pytest.mark.parametrize("kind, make", BIASES)
@pytest.mark.parametrize("options", [
    {"causal": "top-left"}, {"causal": True}, {"window": (2, 1), "window_align": "top-left"},
    {"keep": torch.arange(M) % 3 > 0}, {"mask_mod": lambda b, h, i, j: j != 1},
    {"key_lengths": torch.tensor([4, 7])},
    {"q_segments": torch.tensor([[0, 0, 1, 1, 1]] * 2),
     "k_segments": torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 2)}], ids=str)
def test_causal_biases_beside_other_masks(kind, make, options):
    q, k, v = drawn()
    seen = torch.ones(N, M, dtype=torch.bool).tril(0 if kind == "upper left" else M - N)
    beside = {name: x for name, x in options.items() if name != "keep"}
    keep = seen & options["keep"] if "keep" in options else seen
    want = attention(q, k, v, keep=keep, **beside)
    near(attention(q, k, v, bias=make(N, M), **options), want, 1e-6)
    if "keep" not in options:
        near(attention(q, k, v, keep=make(N, M), **options), want, 1e-6)


@pytest.mark.parametrize("kind, make", BIASES)
@pytest.mark.parametrize("extra", [{}, {"add_zero_attn": True}, {"add_bias_kv": True}], ids=str)
def test_causal_biases_in_multihead_attention(kind, make, extra):
    torch.manual_seed(0)
    mha = MultiheadAttention(16, 2, batch_first=True, **extra)
    x, y = torch.randn(2, N, 16), torch.randn(2, M, 16)
    seen = torch.ones(N, M, dtype=torch.bool).tril(0 if kind == "upper left" else M - N)
    for got, want in zip(mha(x, y, y, attn_mask=make(N, M)), mha(x, y, y, attn_mask=~seen)):
        near(got, want, 1e-6)


@pytest.mark.parametrize("kind, make", BIASES)
@pytest.mark.parametrize("entrance", ["sdpa", "bias", "keep", "multihead"])
def test_causal_biases_under_compile(kind, make, entrance):
    torch._dynamo.reset()
    q, k, v = drawn()
    mha = MultiheadAttention(8, 2, batch_first=True)
    calls = {"sdpa": lambda q, b: sdpa(q, k, v, attn_mask=b, enable_gqa=True),
             "bias": lambda q, b: attention(q, k, v, bias=b),
             "keep": lambda q, b: attention(q, k, v, keep=b),
             "multihead": lambda q, b: mha(q[0], q[0, :, :1].expand(4, M, 8),
                                           q[0, :, :1].expand(4, M, 8), attn_mask=b)[0]}
    compiled = torch.compile(calls[entrance], fullgraph=True, backend="aot_eager")
    near(compiled(q, make(N, M)), calls[entrance](q, make(N, M)), 1e-6)


def test_causal_biases_that_do_not_fit():
    q, k, v = drawn()
    says = "a causal bias of 6 queries and 6 keys arrived, one of 5 and 7 is right"
    for name, call in (("bias", lambda b: attention(q, k, v, bias=b)),
                       ("keep", lambda b: attention(q, k, v, keep=b)),
                       ("attn_mask", lambda b: sdpa(q, k, v, attn_mask=b, enable_gqa=True))):
        with pytest.raises(ValueError, match=f"^{name}: {says}"):
            call(causal_upper_left(6, 6))
    with pytest.raises(ValueError, match="attn_mask: given beside is_causal"):
        sdpa(q, q, q, attn_mask=causal_upper_left(5, 5), is_causal=True)
    for name, call in (("slopes", lambda b: attention(q, k, v, slopes=b)),
                       ("key_lengths", lambda b: attention(q, k, v, key_lengths=b)),
                       ("scores", softmax)):
        with pytest.raises(TypeError, match=f"^{name}: a causal bias"):
            call(causal_upper_left(2, 4))


# ---- signs that are put off ----------------------------------------------------------------------


def put_off(t):
    """The same values, negated lazily."""
    return torch._neg_view(-t)


def conjugate(t):
    return torch.complex(t * 0, -t).conj().imag


@pytest.mark.parametrize("lazy", [put_off, conjugate])
def test_lazy_signs(lazy):
    q, k, v = drawn()
    bias, slopes, scale = torch.randn(N, M), torch.rand(4), torch.tensor(0.3)
    table = torch.randn(4, 9)
    assert lazy(q).is_neg()
    options = {"bias": bias, "slopes": slopes, "table1d": table, "scale": scale}
    held = {name: lazy(x) for name, x in options.items()}
    want = attention(q, k, v, statistics=["entropy", "coverage"], **options)
    got = attention(lazy(q), lazy(k), lazy(v), statistics=["entropy", "coverage"], **held)
    for name in ("y", "row_stat", "entropy", "coverage"):
        assert torch.equal(getattr(got, name), getattr(want, name))
    assert torch.equal(got.weights(), want.weights())
    assert torch.equal(attention(lazy(q), lazy(k), lazy(v), **held), want.y)
    assert torch.equal(sdpa(lazy(q), lazy(q), lazy(q)), sdpa(q, q, q))
    for f in (softmax, sparsemax, entmax, lambda s: topk(s, 2)):
        assert torch.equal(f(lazy(q)), f(q))
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, *options.values())]

    def loss(wrap, up):
        a = [wrap(x) for x in leaves]
        y = attention(*a[:3], **dict(zip(options, a[3:])))
        return torch.autograd.grad(y, leaves, up)

    up = torch.randn_like(want.y)
    for a, b in zip(loss(lazy, lazy(up)), loss(lambda x: x, up)):
        near(a, b, 1e-6)
    compiled = torch.compile(lambda q: attention(q, k, v), backend="aot_eager")
    assert torch.equal(compiled(lazy(q)), attention(q, k, v))
    s = q.clone().requires_grad_()
    a, = torch.autograd.grad(entmax(s), s, lazy(torch.ones_like(q) * q))
    b, = torch.autograd.grad(entmax(s), s, torch.ones_like(q) * q)
    assert torch.equal(a, b)


def test_zeros_without_memory():
    q, k, v = drawn()
    zero = torch._efficientzerotensor(q.shape)
    want = attention(torch.zeros_like(q), k, v)
    assert torch.equal(attention(zero, k, v), want)
    assert torch.equal(attention(zero, k.clone().requires_grad_(), v), want)
    x = q.clone().requires_grad_()
    y = attention(x, k, v)
    y.backward(torch._efficientzerotensor(y.shape))
    assert torch.equal(x.grad, torch.zeros_like(q))
    assert torch.equal(softmax(torch._efficientzerotensor((2, 4))), torch.full((2, 4), 0.25))


def test_expanded_views():
    q, k, v = drawn()
    for x in (q[:1, :1].expand(2, 4, N, 8), q[..., :1].expand(2, 4, N, 8),
              q[:, :, :1].expand_as(q)):
        leaf = x.detach().requires_grad_()
        same = x.detach().clone().requires_grad_()
        y, want = attention(leaf, k, v), attention(same, k, v)
        assert torch.equal(y, want)
        a, = torch.autograd.grad(y.square().sum(), leaf)
        b, = torch.autograd.grad(want.square().sum(), same)
        near(a, b, 1e-6)


# ---- what is refused -----------------------------------------------------------------------------


def quantised(t):
    return torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8)


class NoRule(torch.Tensor):
    """A class that knows its own operators alone."""

    @staticmethod
    def __new__(cls, t):
        return torch.Tensor._make_wrapper_subclass(cls, t.shape, dtype=t.dtype)

    @classmethod
    def __torch_dispatch__(cls, f, types, args=(), kwargs=None):
        raise NotImplementedError(f"no rule\nfor {f}")


class NoFunction(torch.Tensor):
    @classmethod
    def __torch_function__(cls, f, types, args=(), kwargs=None):
        return NotImplemented


STRANGE = {
    "sparse": lambda t: t.to_sparse(),
    "quantised": quantised,
    "masked": lambda t: torch.masked.masked_tensor(t.float(), t > 0),
    "complex": lambda t: torch.complex(t.float(), t.float()),
    "nested": lambda t: torch.nested.nested_tensor([t]),
    "jagged": lambda t: torch.nested.nested_tensor([t], layout=torch.jagged),
    "meta": lambda t: t.to("meta"),
    "no rule": NoRule,
    "no function": lambda t: t.as_subclass(NoFunction),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_one_line_names_the_argument(kind):
    strange = STRANGE[kind]
    q, k, v = drawn()
    x, mask = torch.randn(2, N, 8), torch.zeros(N, N)
    mha = MultiheadAttention(8, 2, batch_first=True)
    for name, call in (
            ("q", lambda: attention(strange(q), k, v)), ("k", lambda: attention(q, strange(k), v)),
            ("v", lambda: attention(q, k, strange(v))),
            ("v", lambda: attention(q, k, strange(v), statistics="entropy")),
            ("bias", lambda: attention(q, k, v, bias=strange(torch.zeros(N, M)))),
            ("keep", lambda: attention(q, k, v, keep=strange(torch.ones(N, M, dtype=torch.bool)))),
            ("slopes", lambda: attention(q, k, v, slopes=strange(torch.ones(4)))),
            ("query", lambda: sdpa(strange(q), q, q)), ("key", lambda: sdpa(q, strange(q), q)),
            ("value", lambda: sdpa(q, q, strange(q))),
            ("attn_mask", lambda: sdpa(q, q, q, attn_mask=strange(mask))),
            ("query", lambda: mha(strange(x), x, x)), ("key", lambda: mha(x, strange(x), x)),
            ("value", lambda: mha(x, x, strange(x))),
            ("attn_mask", lambda: mha(x, x, x, attn_mask=strange(mask))),
            ("key_padding_mask", lambda: mha(x, x, x, key_padding_mask=strange(torch.ones(2, N)))),
            ("scores", lambda: entmax(strange(q)))):
        if kind == "jagged" and name == "keep":
            continue  # PyTorch makes none of booleans
        if kind == "meta" and name == "scores":
            continue  # gives a tensor on meta
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        text = str(caught.value)
        named = ("key", "query", "value") if kind in ("nested", "jagged") else (name,)
        assert text.partition(":")[0] in {name, *named} and "\n" not in text, (name, text)


def test_shapes_alone():
    q, k, v = (t.to("meta") for t in drawn())
    y = attention(q, k, v, causal=True)
    assert y.is_meta and y.shape == (2, 4, N, 6)
    out = attention(q, k, v, statistics=["entropy", "coverage"])
    assert out.entropy.shape == (2, 4, N) and out.coverage.shape == (2, 4, M)
    assert softmax(q).is_meta and sdpa(q, q, q).is_meta
    a, b, c = drawn()
    one = torch.tensor(1.0, device="meta")
    for name, call in (("q", lambda: attention(q, b, c)), ("k", lambda: attention(a, k, c)),
                       ("scale", lambda: attention(a, b, c, scale=one))):
        with pytest.raises(ValueError, match=f"^{name}: a tensor on meta arrived"):
            call()


class Derived(torch.Tensor):
    seen = 0

    @classmethod
    def __torch_function__(cls, f, types, args=(), kwargs=None):
        cls.seen += 1
        return super().__torch_function__(f, types, args, kwargs or {})


def test_classes_that_pass_calls_on_have_their_say():
    q, k, v = drawn()
    want = attention(q, k, v)
    for y in (attention(q.as_subclass(Derived), k, v), attention(q, k, v.as_subclass(Derived))):
        assert type(y) is Derived and torch.equal(y.as_subclass(torch.Tensor), want)
    assert Derived.seen
    assert type(softmax(q.as_subclass(Derived))) is Derived
    two_tensor = pytest.importorskip("torch.testing._internal.two_tensor")
    y = attention(*[two_tensor.TwoTensor(t, t) for t in (q, k, v)])
    assert torch.equal(y.a, want)


def test_numbers_given_as_tensors_do_not_lose_gradients():
    q, k, v = drawn()
    learned = torch.tensor(2.0, requires_grad=True)
    for options in ({"softcap": learned}, {"score": "l2", "gamma": learned}, {"dropout": learned},
                    {"window": learned}, {"scale": [learned] * 4}):
        with pytest.raises(TypeError, match="Tensor arrived|wants a gradient"):
            attention(q, k, v, **options)
    with pytest.raises(TypeError, match="scale: a tensor that wants a gradient"):
        foci.Spec(scale=learned)
    with pytest.raises(ValueError, match="dropout_seed: given, but nothing reads it"):
        attention(q, k, v, dropout_seed=torch.tensor(1))
    with pytest.raises(ValueError, match="past_lengths: an array arrived, but nothing reads it"):
        attention(q, k, v, past_lengths=torch.tensor([1, 2]))
    for name in ("keep", "key_lengths"):
        with pytest.raises((TypeError, ValueError), match=f"{name}: float32 arrived"):
            attention(q, k, v, **{name: torch.ones(2, requires_grad=True)})


def test_dimensions_of_row_maps():
    with pytest.raises(ValueError, match="dim: 3 arrived beside scores of 2 dimensions"):
        softmax(torch.randn(2, 3), 3)
    with pytest.raises(TypeError, match="dim: str arrived"):
        softmax(torch.randn(2, 3), "rows")
