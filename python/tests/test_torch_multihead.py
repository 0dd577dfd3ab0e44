"""foci.torch.MultiheadAttention against torch.nn.MultiheadAttention."""

import itertools

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from torch_formulas import near  # noqa: E402

from foci.torch import MultiheadAttention, attention  # noqa: E402

torch.set_num_threads(1)
E, HEADS, N, M, B = 24, 3, 5, 7, 2


def pair(**options):
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(E, HEADS, **options)
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.3)
    mine = MultiheadAttention(E, HEADS, **options)
    mine.load_state_dict(theirs.state_dict())
    assert mine.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(mine.state_dict())
    return mine, theirs


def agree(mine, theirs, q, k, v, **call):
    tensors = [q, k, v]
    mine_in = [t.clone().requires_grad_() for t in tensors]
    theirs_in = [t.clone().requires_grad_() for t in tensors]
    if q is k and k is v:
        mine_in, theirs_in = [mine_in[0]] * 3, [theirs_in[0]] * 3
    elif k is v:
        mine_in[2], theirs_in[2] = mine_in[1], theirs_in[1]
    got, weights = mine(*mine_in, **call)
    want, want_weights = theirs(*theirs_in, **call)
    near(got, want, 1e-5)
    assert got.shape == want.shape
    if call.get("need_weights", True):
        near(weights, want_weights, 1e-5)
        (got.square().sum() + weights.square().sum()).backward()
        (want.square().sum() + want_weights.square().sum()).backward()
    else:
        assert weights is None and want_weights is None
        got.square().sum().backward()
        want.square().sum().backward()
    for a, b in zip(mine_in, theirs_in):
        near(a.grad, b.grad, 2e-5)
    for (name, a), b in zip(mine.named_parameters(), theirs.parameters()):
        near(a.grad, b.grad, 2e-5, name)


@pytest.mark.parametrize("batch_first, bias, add_bias_kv, add_zero_attn, separate", [
    (False, True, False, False, False), (True, True, False, False, False),
    (True, False, False, False, True), (False, True, True, False, False),
    (True, True, False, True, False), (False, True, True, True, True)])
@pytest.mark.parametrize("need_weights", [False, True])
def test_as_torch(batch_first, bias, add_bias_kv, add_zero_attn, separate, need_weights):
    sizes = {"kdim": 10, "vdim": 11} if separate else {}
    mine, theirs = pair(bias=bias, add_bias_kv=add_bias_kv, add_zero_attn=add_zero_attn,
                        batch_first=batch_first, **sizes)
    shape = lambda n, e: (B, n, e) if batch_first else (n, B, e)
    q = torch.randn(shape(N, E))
    k, v = torch.randn(shape(M, sizes.get("kdim", E))), torch.randn(shape(M, sizes.get("vdim", E)))
    agree(mine, theirs, q, k, v, need_weights=need_weights)
    padding = torch.zeros(B, M, dtype=torch.bool)
    padding[1, 4:] = True
    agree(mine, theirs, q, k, v, need_weights=need_weights, key_padding_mask=padding,
          attn_mask=torch.rand(N, M).cumsum(1) > 3)


@pytest.mark.parametrize("same", ["self", "key is value"])
def test_shared_inputs(same):
    mine, theirs = pair(batch_first=True)
    q = torch.randn(B, N, E)
    k = q if same == "self" else torch.randn(B, M, E)
    agree(mine, theirs, q, k, k, need_weights=False)


MASKS = list(itertools.product([None, "bool", "float"], [None, "2d", "2d float", "3d", "3d float"]))


@pytest.mark.parametrize("padding, mask", MASKS)
def test_masks(padding, mask):
    mine, theirs = pair(batch_first=True)
    q, k = torch.randn(B, N, E), torch.randn(B, M, E)
    call = {}
    if padding == "bool":
        call["key_padding_mask"] = torch.tensor([[False] * 7, [False] * 3 + [True] * 4])
    elif padding == "float":
        call["key_padding_mask"] = torch.randn(B, M)
    if mask is not None:
        shape = (N, M) if mask.startswith("2d") else (B * HEADS, N, M)
        drawn = torch.rand(shape)
        drawn[..., 0] = 1
        call["attn_mask"] = (torch.randn(shape) if "float" in mask else drawn < 0.3)
        if "float" in mask:
            call["attn_mask"] = call["attn_mask"].masked_fill(drawn < 0.2, -torch.inf)
    if padding and mask and ("float" in mask) != (padding == "float"):
        with pytest.warns(UserWarning, match="mismatched"):
            theirs(q, k, k, **call)
        import warnings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            agree(mine, theirs, q, k, k, average_attn_weights=False, **call)
        return
    agree(mine, theirs, q, k, k, average_attn_weights=False, **call)
    agree(mine, theirs, q, k, k, need_weights=False, **call)


@pytest.mark.parametrize("extra", [{}, {"add_zero_attn": True}])
def test_causal_and_unbatched(extra):
    mine, theirs = pair(**extra)
    x = torch.randn(N, B, E)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(N)
    agree(mine, theirs, x, x, x, attn_mask=mask, need_weights=True)
    got = mine(x, x, x, is_causal=True, need_weights=False)[0]
    near(got, mine(x, x, x, attn_mask=mask, need_weights=False)[0], 1e-6)
    one = torch.randn(N, E)
    agree(mine, theirs, one, one, one)
    agree(mine, theirs, one, one, one, average_attn_weights=False,
          key_padding_mask=torch.tensor([False] * 4 + [True]))


def test_options_of_foci():
    torch.manual_seed(1)
    slopes = torch.nn.Parameter(torch.rand(HEADS))
    mha = MultiheadAttention(E, HEADS, batch_first=True, normalizer="sparsemax", slopes=slopes)
    assert "slopes" in mha.state_dict()
    x = torch.randn(B, N, E)
    y, w = mha(x, x, x)
    assert (w == 0).any()
    near(w.sum(-1), torch.ones(B, N), 1e-5)
    y.sum().backward()
    assert slopes.grad is not None
    q, k, v = (t.unflatten(-1, (HEADS, 8)).transpose(1, 2) for t in torch.nn.functional.linear(
        x, mha.in_proj_weight, mha.in_proj_bias).chunk(3, -1))
    want = mha.out_proj(attention(q, k, v, normalizer="sparsemax", slopes=slopes).transpose(
        1, 2).flatten(2))
    near(y, want, 1e-6)
    for options, error in (({"normaliser": "softmax"}, TypeError), ({"causal": 3}, TypeError),
                           ({"keep": True}, TypeError), ({"softcap": -1.0}, ValueError)):
        with pytest.raises(error):
            MultiheadAttention(E, HEADS, **options)


def test_dropout_is_for_training():
    torch.manual_seed(2)
    mha = MultiheadAttention(E, HEADS, dropout=0.5, batch_first=True)
    x = torch.randn(B, N, E)
    assert not torch.equal(mha(x, x, x)[0], mha(x, x, x)[0])
    mha.eval()
    assert torch.equal(mha(x, x, x)[0], mha(x, x, x)[0])


def test_in_a_transformer_layer():
    torch.manual_seed(3)
    layer = torch.nn.TransformerEncoderLayer(E, HEADS, 32, batch_first=True, dropout=0.0)
    x = torch.randn(B, N, E)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(N)
    padding = torch.zeros(B, N)
    padding[0, 3:] = -torch.inf
    for mode in (True, False):
        layer.train(mode)
        want = layer(x, src_mask=mask, src_key_padding_mask=padding)
        mine = MultiheadAttention(E, HEADS, batch_first=True)
        mine.load_state_dict(layer.self_attn.state_dict())
        theirs, layer.self_attn = layer.self_attn, mine.train(mode)
        with torch.no_grad():
            near(layer(x, src_mask=mask, src_key_padding_mask=padding), want, 1e-5)
        layer.self_attn = MultiheadAttention(E, HEADS, batch_first=True,
                                             normalizer="sparsemax").train(mode)
        with torch.no_grad():
            assert not torch.allclose(layer(x), want)  # evaluation does not go around it
        layer.self_attn = theirs


@pytest.mark.parametrize("need_weights", [False, True])
def test_compiled(need_weights):
    torch._dynamo.reset()
    mine, _ = pair(batch_first=True)
    x = torch.randn(B, N, E)
    compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")
    got, want = (f(x, x, x, need_weights=need_weights) for f in (compiled, mine))
    near(got[0], want[0], 1e-6)
    if need_weights:
        near(got[1], want[1], 1e-6)


def test_wrong_calls():
    mha = MultiheadAttention(E, HEADS, batch_first=True)
    x = torch.randn(B, N, E)
    with pytest.raises(ValueError, match="attn_mask: shape"):
        mha(x, x, x, attn_mask=torch.zeros(N, N + 1))
    with pytest.raises(ValueError, match="key_padding_mask: shape"):
        mha(x, x, x, key_padding_mask=torch.zeros(B, N + 1))
    with pytest.raises(TypeError, match="attn_mask: torch.int64"):
        mha(x, x, x, attn_mask=torch.zeros(N, N, dtype=torch.int64))
    with pytest.raises(ValueError, match="query: shape"):
        mha(x[None], x, x)


def test_arguments_are_named_in_the_callers_layout():
    x = torch.randn(3, 2, 12)
    for call, says in (
            (lambda: MultiheadAttention(10, 1)(x, x, x),
             r"query: shape \[3, 2, 12\] arrived, \[queries, batch, 10\] is .*embed_dim = 10"),
            (lambda: MultiheadAttention(12, 1, vdim=4)(x, x, x),
             r"value: shape \[3, 2, 12\] arrived, \[keys, batch, 4\] is right, .*vdim = 4"),
            (lambda: MultiheadAttention(12, 1, kdim=4, batch_first=True)(x, x, x),
             r"key: shape \[3, 2, 12\] arrived, \[batch, keys, 4\] is right, .*kdim = 4"),
            (lambda: MultiheadAttention(12, 1)(x[:, :1], x, x),
             r"key: shape \[3, 2, 12\] arrived, a batch of 2 beside 1 of query \[3, 1, 12\]"),
            (lambda: MultiheadAttention(12, 1, batch_first=True)(x[:1], x[:1], x),
             r"value: shape \[3, 2, 12\] arrived, a batch of 3 beside 1 of query \[1, 2, 12\]"),
            (lambda: MultiheadAttention(12, 1)(x, x, x[:2]),
             "value: shape .* of 2 keys beside 3 of key"),
            (lambda: MultiheadAttention(12, 1)(x[0], x[0], x[0, :1]),
             "value: shape .* of 1 keys beside 2 of key"),
            (lambda: MultiheadAttention(12, 1)(x, x[0], x[0]), "key: shape .* 3 dimensions"),
            (lambda: MultiheadAttention(12, 1)(x.double(), x, x), "query: torch.float64 arrived"),
            (lambda: MultiheadAttention(12, 1).double()(*[x.double()] * 3),
             "query: torch.float64 arrived, float32"),
            (lambda: MultiheadAttention(12, 1)(x, x.half(), x), "key: torch.float16 arrived"),
            (lambda: MultiheadAttention(12, 1)([1], x, x), "query: list arrived"),
            (lambda: MultiheadAttention(12, 1)(x, x, x, attn_mask=[[True]]), "attn_mask: list"),
            (lambda: MultiheadAttention(12, 5), "num_heads: 5 arrived, which does not divide"),
            (lambda: MultiheadAttention(0, 1), "embed_dim: 0 arrived"),
            (lambda: MultiheadAttention(12, 2, dropout=1.5), "dropout: 1.5 arrived")):
        with pytest.raises((TypeError, ValueError), match="^" + says) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_attributes_that_users_of_torch_read():
    import copy
    import pickle

    for options in ({}, {"kdim": 8}, {"vdim": 8}, {"kdim": E, "vdim": E}, {"bias": False},
                    {"add_bias_kv": True, "batch_first": True, "dropout": 0.25}):
        mine, theirs = MultiheadAttention(E, HEADS, **options), torch.nn.MultiheadAttention(
            E, HEADS, **options)
        for name in ("embed_dim", "num_heads", "head_dim", "kdim", "vdim", "dropout", "batch_first",
                     "add_zero_attn", "_qkv_same_embed_dim"):
            assert getattr(mine, name) == getattr(theirs, name), name
        for name in ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight",
                     "v_proj_weight", "bias_k", "bias_v"):
            a, b = getattr(mine, name), getattr(theirs, name)
            assert (a is None) == (b is None) and (a is None or a.shape == b.shape), name
        assert type(mine.out_proj) is type(theirs.out_proj)
        torch.manual_seed(4)
        mine._reset_parameters()
        torch.manual_seed(4)
        theirs._reset_parameters()
        for (name, a), b in zip(mine.named_parameters(), theirs.parameters()):
            assert torch.equal(a, b) or name.startswith("out_proj"), name
        q = torch.randn(N, N, E)
        k, v = torch.randn(N, N, mine.kdim), torch.randn(N, N, mine.vdim)
        mine.eval()
        for made in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
            assert type(made) is MultiheadAttention
            assert made._qkv_same_embed_dim == theirs._qkv_same_embed_dim
            assert torch.equal(made(q, k, v)[0], mine(q, k, v)[0])


def test_a_module_pickled_by_an_earlier_release():
    mine, theirs = pair(batch_first=True)
    state = dict(mine.__dict__, _packed=True, _qkv_same_embed_dim=False)
    state["_forward_pre_hooks"] = type(mine._forward_pre_hooks)()
    made = MultiheadAttention.__new__(MultiheadAttention)
    made.__setstate__(state)
    assert made._qkv_same_embed_dim and not hasattr(made, "_packed")
    x = torch.randn(B, N, E)
    assert torch.equal(made(x, x, x)[0], mine(x, x, x)[0])


@pytest.mark.parametrize("need_weights", [False, True])
def test_dropping_everything(need_weights):
    mine, theirs = pair(dropout=1.0, batch_first=True)
    x = torch.randn(B, N, E)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, want = mine(a, a, a, need_weights=need_weights)[0], theirs(b, b, b)[0]
    near(got, want, 1e-6)
    got.square().sum().backward()
    want.square().sum().backward()
    near(a.grad, b.grad, 1e-6)
    for (name, p), other in zip(mine.named_parameters(), theirs.named_parameters()):
        near(p.grad, other[1].grad, 1e-5, name)
    mine.eval()
    theirs.eval()
    near(mine(x, x, x)[0], theirs(x, x, x)[0], 1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("masks", [(), ("padding",), ("causal",), ("padding", "causal")])
def test_in_a_transformer_encoder(before, masks):
    from foci.torch import observe

    torch.manual_seed(5)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    theirs = torch.nn.TransformerEncoder(layer, 2).eval()
    if before:
        layer.self_attn = MultiheadAttention(16, 2, batch_first=True)
        mine = torch.nn.TransformerEncoder(layer, 2).eval()
    else:
        mine = torch.nn.TransformerEncoder(layer, 2).eval()
        for one in mine.layers:
            one.self_attn = MultiheadAttention(16, 2, batch_first=True).eval()
    mine.load_state_dict(theirs.state_dict())
    x = torch.randn(B, N, 16)
    padding = torch.zeros(B, N, dtype=torch.bool)
    call = {}
    if "padding" in masks:
        padding[1, 3:] = True
        call["src_key_padding_mask"] = padding
    if "causal" in masks:
        call["mask"] = torch.ones(N, N, dtype=torch.bool).triu(1)
    for grad in (False, True):
        with torch.set_grad_enabled(grad), observe(mine) as seen:
            got = mine(x, **call)
        assert len(seen.layers) == 2  # nothing went around foci
        near(got[~padding], theirs(x, **call)[~padding], 1e-5)


def test_alpha_is_learned():
    torch.manual_seed(0)
    mha = MultiheadAttention(16, 4, batch_first=True, normalizer="entmax",
                             alpha=torch.nn.Parameter(torch.full((4,), 1.5)))
    assert "alpha" in dict(mha.named_parameters())
    y, _ = mha(*[torch.randn(2, 6, 16)] * 3, need_weights=False)
    y.square().sum().backward()
    assert mha.alpha.grad.shape == (4,) and mha.alpha.grad.abs().min() > 0
