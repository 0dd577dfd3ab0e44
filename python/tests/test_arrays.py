"""What arrives as an array and is more than its memory, at every entrance of the NumPy package:
resolved whole, or refused in one line that names the argument."""

import numpy as np
import pytest

import foci

from formulas import attention as formula


def drawn():
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal(shape, np.float32)
                 for shape in ((2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 6)))


def masked(x, some=True):
    return np.ma.MaskedArray(x, mask=np.broadcast_to(np.arange(x.shape[-1]) == 0, x.shape)
                             if some else np.ma.nomask)


WAYS = {  # the same numbers, held otherwise
    "big endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "little endian": lambda x: x.astype(x.dtype.newbyteorder("<")),
    "strided rows": lambda x: np.repeat(x, 2, -1)[..., ::2],
    "backwards": lambda x: x[..., ::-1].copy()[..., ::-1],
    "Fortran": np.asfortranarray,
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
    "unaligned": lambda x: np.frombuffer(b"x" + x.tobytes(), np.uint8)[1:].view(
        x.dtype).reshape(x.shape),
    "masked nowhere": lambda x: masked(x, False),
    "subclass": lambda x: x.view(type("Own", (np.ndarray,), {})),
    "memoryview": lambda x: memoryview(np.ascontiguousarray(x)),
    "big endian memoryview": lambda x: memoryview(x.astype(x.dtype.newbyteorder(">"))),
    "big endian, backwards": lambda x: x[::-1].astype(x.dtype.newbyteorder(">"))[::-1],
}


@pytest.mark.parametrize("way", WAYS)
def test_the_same_numbers_held_otherwise(way):
    held = WAYS[way]
    q, k, v = drawn()
    bias = np.random.default_rng(1).standard_normal((4, 3, 5), np.float32)
    lengths = np.array([3, 5])
    keep = np.random.default_rng(2).random((3, 5)) < 0.7
    options = {"bias": bias, "key_lengths": lengths, "keep": keep}
    want = foci.attention(q, k, v, **options)
    got = foci.attention(held(q), held(k), held(v),
                         **{name: held(x) for name, x in options.items()})
    assert np.array_equal(got, want)
    dy = np.ones_like(want)
    grads = foci.attention_backward(held(dy), held(q), held(k), held(v), wanted=["dq", "dbias"],
                                    **{name: held(x) for name, x in options.items()})
    right = foci.attention_backward(dy, q, k, v, wanted=["dq", "dbias"], **options)
    assert all(np.array_equal(grads[name], right[name]) for name in right)
    assert np.array_equal(foci.entmax(held(q)), foci.entmax(q))
    assert np.array_equal(foci.normalize_backward(held(foci.softmax(q)), held(q)),
                          foci.normalize_backward(foci.softmax(q), q))
    cache, same = foci.Cache(kv_heads=2, head_size=8, value_size=6, sequences=2), foci.Cache(
        kv_heads=2, head_size=8, value_size=6, sequences=2)
    cache.append(held(k), held(v))
    same.append(k, v)
    assert np.array_equal(cache.attend(held(q)), same.attend(q))
    if "memoryview" not in way:
        assert np.array_equal(foci.weights(held(q), held(k)), foci.weights(q, k))
        assert np.array_equal(foci.entmax(held(q), axis=1), foci.entmax(q, axis=1))


@pytest.mark.parametrize("way", WAYS)
def test_saved_arrays_held_otherwise(way, tmp_path):
    x = drawn()[0]
    foci.save(tmp_path / "x.safetensors", {"x": WAYS[way](x)})
    assert np.array_equal(foci.load(tmp_path / "x.safetensors")["x"], x)


def calls(make):
    """Every entrance, with one of its arrays made by `make`, and the argument's name."""
    q, k, v = drawn()
    bias = np.zeros((3, 5), np.float32)
    cache = foci.Cache(kv_heads=2, head_size=8, value_size=6, sequences=2)
    cache.append(k, v)
    out = foci.attention(q, k, v, statistics="entropy")
    return [
        ("q", lambda: foci.attention(make(q), k, v)),
        ("k", lambda: foci.attention(q, make(k), v)),
        ("v", lambda: foci.attention(q, k, make(v))),
        ("bias", lambda: foci.attention(q, k, v, bias=make(bias))),
        ("keep", lambda: foci.attention(q, k, v, keep=make(bias == 0))),
        ("key_lengths", lambda: foci.attention(q, k, v, key_lengths=make(np.array([3, 5])))),
        ("slopes", lambda: foci.attention(q, k, v, slopes=make(np.ones(4, np.float32)))),
        ("dy", lambda: foci.attention_backward(make(out.y), q, k, v)),
        ("dentropy", lambda: out.backward(dentropy=make(out.entropy))),
        ("q", lambda: foci.weights(make(q), k)),
        ("k", lambda: foci.weights(q, make(k))),
        ("q", lambda: foci.explain(make(q), k, v)),
        ("scores", lambda: foci.softmax(make(q))),
        ("scores", lambda: foci.sparsemax(make(q), axis=1)),
        ("weights", lambda: foci.normalize_backward(make(q), q)),
        ("dweights", lambda: foci.normalize_backward(q, make(q))),
        ("k", lambda: cache.append(make(k), v)),
        ("v", lambda: cache.append(k, make(v))),
        ("q", lambda: cache.attend(make(q))),
        ("tensors['x']", lambda: foci.save("/nowhere/x", {"x": make(q)})),
    ]


def refused(make, says):
    for name, call in calls(make):
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        text = str(caught.value)
        assert text.startswith(name + ": ") and says in text and "\n" not in text, text
        assert "contiguous" not in text


@pytest.mark.parametrize("make, says", [
    (masked, "masked array arrived"),
    (lambda x: x.astype(object), "Python objects"),
    (lambda x: x.astype(complex), "complex128"),
    (lambda x: x.astype(np.longdouble), "longdouble" if np.dtype(np.longdouble).name == "longdouble"
     else np.dtype(np.longdouble).name),
    (lambda x: x.astype("m8[s]"), "timedelta64[s]"),
    (lambda x: np.zeros(x.shape, [("a", "f4"), ("b", "i4")]), "records (a, b)"),
    (lambda x: x.astype("U3"), "text"),
    (lambda x: x.astype("S3"), "bytes"),
], ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_no_array_of_numbers_is_refused(make, says):
    refused(make, says)


@pytest.mark.parametrize("says", ["float64"])
def test_doubles_are_not_rounded_quietly(says):
    q, k, v = drawn()
    for call in (lambda: foci.attention(q.astype(float), k, v),
                 lambda: foci.attention(q.astype(">f8"), k, v),
                 lambda: foci.softmax(q.astype(">f8"))):
        with pytest.raises(ValueError, match=says):
            call()


def test_axes():
    with pytest.raises(ValueError, match="axis: 9 arrived beside scores of 4 dimensions"):
        foci.softmax(drawn()[0], axis=9)


def test_no_heads_give_nothing():
    q, k, v = drawn()
    out = foci.attention(q[:, :0], k[:, :0], v[:, :0], causal=True,
                         statistics=["entropy", "coverage"])
    assert out.y.shape == (2, 0, 3, 6) and out.coverage.shape == (2, 0, 5)
    grads = out.backward(out.y)
    assert grads["dq"].shape == (2, 0, 3, 8) and grads["dv"].shape == (2, 0, 5, 6)
    bias = np.ones((3, 5), np.float32)
    grads = foci.attention_backward(out.y, q[:, :0], k[:, :0], v[:, :0], bias=bias,
                                    wanted=["dbias", "dscale", "dk"])
    assert np.array_equal(grads["dbias"], np.zeros((3, 5), np.float32))
    assert not np.any(grads["dscale"])
    for normalizer in ("sparsemax", "entmax", "topk"):
        y = foci.attention(q[:, :0], k[:, :0], v[:, :0], normalizer=normalizer)
        assert y.shape == (2, 0, 3, 6)
    assert foci.weights(q[:, :0], k[:, :0]).shape == (2, 0, 3, 5)


# ---- PyTorch's tensors through NumPy's entrances -------------------------------------------------

torch = pytest.importorskip("torch", minversion="2.6")


def tensors():
    return tuple(torch.from_numpy(x) for x in drawn())


TORCH_WAYS = {
    "plain": lambda x: torch.from_numpy(x),
    "negated lazily": lambda x: torch._neg_view(-torch.from_numpy(x)),
    "imaginary part": lambda x: torch.complex(torch.from_numpy(x) * 0, -torch.from_numpy(
        x)).conj().imag,
    "parameter": lambda x: torch.nn.Parameter(torch.from_numpy(x), requires_grad=False),
    "subclass": lambda x: torch.from_numpy(x).as_subclass(type("Own", (torch.Tensor,), {})),
    "strided rows": lambda x: torch.from_numpy(x).repeat_interleave(2, -1)[..., ::2],
}


@pytest.mark.parametrize("way", TORCH_WAYS)
def test_tensors_of_pytorch(way, tmp_path):
    held = TORCH_WAYS[way]
    q, k, v = drawn()
    bias = np.random.default_rng(1).standard_normal((4, 3, 5), np.float32)
    want = foci.attention(q, k, v, bias=bias)
    assert np.array_equal(foci.attention(held(q), held(k), held(v), bias=held(bias)), want)
    assert np.array_equal(foci.softmax(held(q)), foci.softmax(q))
    assert np.array_equal(foci.softmax(held(q), axis=1), foci.softmax(q, axis=1))
    assert np.array_equal(foci.weights(held(q), held(k)), foci.weights(q, k))
    grads = foci.attention_backward(held(want), held(q), held(k), held(v))
    right = foci.attention_backward(want, q, k, v)
    assert all(np.array_equal(grads[name], right[name]) for name in right)
    foci.save(tmp_path / "x", {"x": held(q)})
    assert np.array_equal(foci.load(tmp_path / "x")["x"], q)


def test_zeros_without_memory():
    q, k, v = tensors()
    want = foci.attention(torch.zeros_like(q), k, v)
    assert np.array_equal(foci.attention(torch._efficientzerotensor(q.shape), k, v), want)


def quantised(x):
    t = torch.from_numpy(x)
    return torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8)


def derived(x):
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, shape):
            return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

        @classmethod
        def __torch_dispatch__(cls, f, types, args=(), kwargs=None):
            raise NotImplementedError("no\nrule")

        __torch_function__ = torch._C._disabled_torch_function_impl
    return Wrapper(x.shape)


@pytest.mark.parametrize("make, says", [
    (lambda x: torch.from_numpy(x).to_sparse(), "layout torch.sparse_coo"),
    (lambda x: torch.from_numpy(x).to("meta"), "on meta"),
    (quantised, "quantised tensor"),
    (lambda x: torch.complex(torch.from_numpy(x).float(), torch.from_numpy(x).float()).conj(),
     "torch.complex64"),
    (lambda x: torch.masked.masked_tensor(torch.from_numpy(x).float(), torch.from_numpy(x) > 0),
     "MaskedTensor"),
    (lambda x: torch.nested.nested_tensor([torch.from_numpy(x)]), "nested tensor"),
    (lambda x: torch.nested.nested_tensor([torch.from_numpy(x)], layout=torch.jagged),
     "nested tensor"),
    (lambda x: torch.nn.attention.bias.causal_upper_left(3, 5), "rules of its own"),
    (derived, ""),
], ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_hold_no_numbers_are_refused(make, says):
    import torch.nn.attention.bias  # noqa: F401
    refused(make, says)


def test_gradients_are_not_lost_in_silence():
    q, k, v = tensors()
    wants = [lambda t: foci.attention(t, k, v),
             lambda t: foci.attention(q, k, v, bias=t[0, 0, :, :5]),
             lambda t: foci.softmax(t), lambda t: foci.softmax(t, axis=1),
             lambda t: foci.weights(t, k), lambda t: foci.normalize_backward(t, t),
             lambda t: foci.Cache(kv_heads=4, head_size=8).append(t[:1], t[:1])]
    for call in wants:
        leaf = q.clone().requires_grad_()
        with pytest.raises(ValueError, match="^[a-z]+: a tensor that wants a gradient arrived"):
            call(leaf)
        with torch.no_grad():
            call(leaf)
        with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match="gradient"):
            call(torch.autograd.forward_ad.make_dual(q, q))
    with pytest.raises(TypeError, match="scale: a tensor that wants a gradient"):
        foci.Spec(scale=torch.tensor(0.5, requires_grad=True))
    assert foci.Spec(scale=torch.tensor(0.5)) == foci.Spec(scale=0.5)


def test_inside_of_transforms():
    q, k, v = tensors()
    with pytest.raises(TypeError, match="q: a tensor inside of torch.func"):
        torch.vmap(lambda x: torch.from_numpy(foci.attention(x[None], k[:1], v[:1])))(q)


def test_formula_beside():
    q, k, v = drawn()
    got = foci.attention(q.astype(">f4"), np.repeat(k, 2, -1)[..., ::2], v[..., ::-1])
    want = formula(q, k.repeat(2, 1), v.repeat(2, 1))[..., ::-1]
    assert np.abs(got - want).max() < 1e-5
