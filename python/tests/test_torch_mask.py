"""Masks written as functions against dense ones and against FlexAttention."""

import gc

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from torch_formulas import near  # noqa: E402

from foci.torch import attention, create_block_mask  # noqa: E402
from foci.torch import _mask  # noqa: E402

torch.set_num_threads(1)
DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2])


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def shifted(b, h, q_idx, kv_idx):
    return q_idx + 4 >= kv_idx


def sliding(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx <= 3) & (kv_idx - q_idx <= 1)


def documents(b, h, q_idx, kv_idx):
    return DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]


def by_head(b, h, q_idx, kv_idx):
    return (kv_idx + h) % 2 == q_idx % 2


def any_of(b, h, q_idx, kv_idx):  # a reduction of a scalar and a vector: right under vmap alone
    return (q_idx - kv_idx == torch.tensor([0, 2, 5])).any()


def prefix(b, h, q_idx, kv_idx):
    return kv_idx < torch.tensor([3, 8])[b]


def dense(mask_mod, B, H, N, M):
    return torch.tensor([[[[bool(mask_mod(torch.tensor(b), torch.tensor(h), torch.tensor(i),
                                          torch.tensor(j))) for j in range(M)] for i in range(N)]
                          for h in range(H)] for b in range(B)])


@pytest.mark.parametrize("mask_mod, kind", [
    (causal, "window"), (shifted, "window"), (sliding, "window"), (documents, "keep"),
    (by_head, "keep"), (any_of, "keep"), (prefix, "key_lengths")])
def test_masks_say_what_the_function_says(mask_mod, kind, monkeypatch):
    monkeypatch.setattr(_mask, "_BLOCK", 64)  # several blocks of rows
    mask = create_block_mask(mask_mod, 2, 2, 10, 10)
    want = dense(mask_mod, 2, 2, 10, 10)
    assert torch.equal(mask.to_dense().expand(2, 2, 10, 10), want)
    assert getattr(mask, kind) is not None, mask
    assert abs(mask.sparsity() - 100 * (1 - want.float().mean().item())) < 1e-3
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 10, 8, requires_grad=True) for _ in range(3))
    y = attention(q, k, v, mask_mod=mask)
    near(y, attention(q, k, v, keep=want), 1e-6)
    near(y, attention(q, k, v, mask_mod=mask_mod), 0)
    grads = torch.autograd.grad(y.square().sum(), (q, k, v))
    same = torch.autograd.grad(attention(q, k, v, keep=want).square().sum(), (q, k, v))
    for g, s in zip(grads, same):
        near(g, s, 1e-5)


@pytest.mark.parametrize("mask_mod", [causal, sliding, documents, by_head])
def test_as_flex_attention(mask_mod):
    from torch.nn.attention import flex_attention as flex
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 2, 10, 8) for _ in range(3))
    theirs = flex.create_block_mask(mask_mod, 2, 2, 10, 10, device="cpu")
    want = flex.flex_attention(q, k, v, block_mask=theirs)
    near(attention(q, k, v, mask_mod=mask_mod), want, 1e-5)
    near(attention(q, k, v, mask_mod=theirs), want, 1e-5)


def test_windows_are_found_only_where_they_are():
    def found(f, N, M):
        mask = create_block_mask(f, None, None, N, M)
        assert torch.equal(mask.to_dense()[0, 0], dense(f, 1, 1, N, M)[0, 0])
        return mask.window, mask.window_align

    assert found(causal, 6, 6) == ((None, 0), "bottom-right")
    assert found(causal, 4, 6)[1] == "top-left"
    assert found(lambda b, h, i, j: j <= i + 2, 4, 6) == ((None, 0), "bottom-right")
    assert found(lambda b, h, i, j: i - j < 3, 6, 6)[0] == (2, None)
    assert found(lambda b, h, i, j: (j <= i) & (j != 2), 6, 6)[0] is None
    assert found(lambda b, h, i, j: (j <= i) & (i < 4), 6, 6)[0] is None
    assert create_block_mask(lambda b, h, i, j: j >= 0, None, None, 4, 5).keep is None


def test_beside_other_masks():
    torch.manual_seed(2)
    q, k, v = (torch.randn(2, 2, 10, 8) for _ in range(3))
    keep = torch.rand(10, 10) < 0.7
    both = attention(q, k, v, keep=keep & dense(documents, 1, 1, 10, 10)[0, 0])
    near(attention(q, k, v, keep=keep, mask_mod=documents), both, 0)
    near(attention(q, k, v, window=(5, 5), mask_mod=sliding), attention(q, k, v, mask_mod=sliding),
         1e-6)
    near(attention(q, k, v, causal="top-left", mask_mod=documents),
         attention(q, k, v, mask_mod=lambda b, h, i, j: documents(b, h, i, j) & (i >= j)), 1e-6)


def test_functions_are_evaluated_anew_where_what_they_read_changed():
    q, k, v = (torch.randn(1, 1, 10, 4) for _ in range(3))
    calls = []
    ids = torch.tensor([0] * 5 + [1] * 5)
    width = 2

    def counted(*sizes):
        calls.append(sizes)
        return original(*sizes)

    original = _mask.create_block_mask
    _mask.create_block_mask = counted
    try:
        def mask(b, h, q_idx, kv_idx):
            return (ids[q_idx] == ids[kv_idx]) & (q_idx - kv_idx < width)

        first = attention(q, k, v, mask_mod=mask)
        near(attention(q, k, v, mask_mod=mask), first, 0)
        assert len(calls) == 1
        ids[0] = 1
        second = attention(q, k, v, mask_mod=mask)
        assert len(calls) == 2 and not torch.equal(first, second)
        width = 5
        assert not torch.equal(second, attention(q, k, v, mask_mod=mask))
        assert len(calls) == 3
        box = [3]  # what is in a list cannot be told
        for _ in range(2):
            attention(q, k, v, mask_mod=lambda b, h, i, j: i - j < box[0])
        assert len(calls) == 5
    finally:
        _mask.create_block_mask = original
    gc.collect()


def test_compiled_with_a_mask():
    torch._dynamo.reset()
    masks = [create_block_mask(f, None, None, 10, 10) for f in (causal, documents)]
    q, k, v = (torch.randn(1, 2, 10, 4) for _ in range(3))
    for mask in masks:
        compiled = torch.compile(lambda q, k, v, mask=mask: attention(q, k, v, mask_mod=mask),
                                 fullgraph=True, backend="aot_eager")
        near(compiled(q, k, v), attention(q, k, v, mask_mod=mask), 0)


def test_wrong_masks():
    q, k, v = (torch.randn(1, 1, 4, 4) for _ in range(3))
    with pytest.raises(TypeError, match="mask_mod: gave torch.int64"):
        create_block_mask(lambda b, h, i, j: i + j, None, None, 4, 4)
    with pytest.raises(TypeError, match="mask_mod: int"):
        attention(q, k, v, mask_mod=3)
    with pytest.raises(ValueError, match="mask_mod: a mask of shape"):
        attention(q, k, v, mask_mod=create_block_mask(causal, None, None, 5, 4))
    with pytest.raises(ValueError, match="Q_LEN: -1"):
        create_block_mask(causal, None, None, -1, 4)
    with pytest.raises(ValueError, match="device"):
        create_block_mask(causal, None, None, 4, 4, device="meta")


def test_lengths_of_one_entry_serve_a_batch():
    q = torch.randn(2, 1, 6, 8)
    want = attention(q, q, q, key_lengths=torch.tensor([4, 4]))
    assert torch.equal(attention(q, q, q, mask_mod=lambda b, h, i, j: j < 4), want)


def test_indices_are_those_of_the_whole_sequence_beside_segments_too():
    q, k = torch.randn(2, 1, 1, 6, 8)
    segments = {"q_segments": torch.tensor([[0, 0, 1, 1, 1, 1]], dtype=torch.int32),
                "k_segments": torch.tensor([[0, 0, 0, 1, 1, 1]], dtype=torch.int32)}
    want = attention(q, k, k, keep=torch.ones(6, 6, dtype=torch.bool).tril(), **segments)
    assert torch.equal(attention(q, k, k, mask_mod=lambda b, h, i, j: i >= j, **segments), want)


# ---- FlexAttention's own BlockMask ---------------------------------------------------------------


def drawn_blocks(B, H, N, M, size, full, seed):
    """Lists of a BlockMask drawn at random, and its pairs: (partial, full), both [B, H, N, M]."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = -(-N // size[0]), -(-M // size[1])
    kind = torch.randint(0, 3, (B, H, rows, columns), generator=generator)

    def lists(chosen):
        order = torch.rand(chosen.shape, generator=generator) + chosen.logical_not() * 2
        index = order.argsort(-1)
        index = torch.where(torch.arange(columns) < chosen.sum(-1, keepdim=True), index, 99)
        return chosen.sum(-1).int(), index.int()  # what is after the count means nothing

    def pairs(chosen):
        return chosen.repeat_interleave(size[0], -2).repeat_interleave(size[1], -1)[..., :N, :M]

    partial, whole = kind == 1, (kind == 2) if full else torch.zeros_like(kind).bool()
    both = [*lists(partial), *(lists(whole) if full else (None, None))]
    return both, pairs(partial), pairs(whole)


def block_mask(lists, size, mask_mod, lengths):
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    return flex.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=size, mask_mod=mask_mod,
                                         seq_lengths=lengths, compute_q_blocks=False)


@pytest.mark.parametrize("mask_mod", [None, causal, by_head, any_of])
@pytest.mark.parametrize("B, H, N, M, size, full", [
    (1, 1, 96, 96, (32, 32), False), (2, 1, 70, 50, (16, 16), True), (1, 2, 40, 33, (16, 8), True),
    (2, 2, 30, 64, (7, 16), False), (1, 1, 5, 5, (128, 128), True)])
def test_lists_of_blocks_are_honoured(mask_mod, B, H, N, M, size, full):
    lists, partial, whole = drawn_blocks(B, H, N, M, size, full, seed=N)
    mask = block_mask(lists, size, mask_mod, (N, M))
    said = torch.ones(2, 2, N, M, dtype=torch.bool) if mask_mod is None else dense(
        mask_mod, 2, 2, N, M)
    want = ((partial & said) | whole).expand(2, 2, N, M)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 8, requires_grad=True) for n in (N, M, M))
    right = attention(q, k, v, keep=want)
    near(attention(q, k, v, mask_mod=mask), right, 1e-6)
    near(attention(q, k, v, mask_mod=mask), right, 1e-6)  # remembered
    made = create_block_mask(mask, 2, 2, N, M)
    assert torch.equal(made.to_dense().expand(2, 2, N, M), want)
    near(attention(q, k, v, mask_mod=made), right, 1e-6)
    grads = torch.autograd.grad(attention(q, k, v, mask_mod=mask).square().sum(), (q, k, v))
    for g, s in zip(grads, torch.autograd.grad(right.square().sum(), (q, k, v))):
        near(g, s, 1e-5)


def test_a_block_mask_that_lists_what_its_function_says_is_a_window_still():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    theirs = flex.create_block_mask(causal, 2, None, 200, 200, device="cpu")
    mask = create_block_mask(theirs, 2, 2, 200, 200)
    assert mask.window == (None, 0), mask
    # Lists that are changed are read anew.
    q = torch.randn(2, 2, 200, 8)
    before = attention(q, q, q, mask_mod=theirs)
    theirs.kv_num_blocks.zero_()
    assert not torch.equal(before[:, :, :128], attention(q, q, q, mask_mod=theirs)[:, :, :128])


def test_parts_of_block_masks():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    theirs = flex.create_block_mask(by_head, 2, 2, 40, 40, device="cpu", BLOCK_SIZE=16)
    q = torch.randn(1, 2, 40, 8)
    part = theirs[1:2]
    with pytest.raises(ValueError, match="mask_mod: a slice of a BlockMask arrived"):
        attention(q, q, q, mask_mod=part)
    part.mask_mod = theirs.mask_mod
    want = attention(q, q, q, keep=dense(by_head, 1, 2, 40, 40))
    near(attention(q, q, q, mask_mod=part), want, 1e-6)


def test_block_masks_of_everything_and_of_nothing():
    q = torch.randn(1, 2, 40, 8)
    none, index = torch.zeros(1, 1, 3, dtype=torch.int32), torch.zeros(1, 1, 3, 3).int()
    mask = block_mask([none, index, None, None], (16, 16), None, (40, 40))
    assert torch.equal(attention(q, q, q, mask_mod=mask), torch.zeros_like(q))
    all_of_them = [none + 3, torch.arange(3).int().expand(1, 1, 3, 3), None, None]
    mask = block_mask(all_of_them, (16, 16), None, (40, 40))
    assert create_block_mask(mask, 1, 1, 40, 40).keep is None
    assert torch.equal(attention(q, q, q, mask_mod=mask), attention(q, q, q))


@pytest.mark.parametrize("change, says", [
    (lambda lists: lists[1].fill_(3), "mask_mod: a BlockMask whose kv_indices name block 3"),
    (lambda lists: lists[1].fill_(-1), "mask_mod: a BlockMask whose kv_indices name block -1"),
    (lambda lists: lists[0].fill_(7), "mask_mod: a BlockMask whose kv_indices name block"),
    (lambda lists: lists.__setitem__(slice(2), [lists[0][:, :, :2], lists[1][:, :, :2]]),
     "mask_mod: a BlockMask whose kv_num_blocks is"),
    (lambda lists: lists.__setitem__(slice(2), [lists[0].expand(3, 1, 3),
                                                lists[1].expand(3, 1, 3, 3)]),
     "mask_mod: a BlockMask whose kv_num_blocks is"),
])
def test_block_masks_that_lie_are_refused(change, says):
    lists = [torch.ones(1, 1, 3, dtype=torch.int32), torch.zeros(1, 1, 3, 3).int(), None, None]
    q = torch.randn(2, 2, 40, 8)
    change(lists)
    with pytest.raises(ValueError, match=says):
        attention(q, q, q, mask_mod=block_mask(lists, (16, 16), None, (40, 40)))


def test_block_masks_of_other_lengths_are_refused():
    lists, *_ = drawn_blocks(1, 1, 48, 48, (16, 16), False, 0)
    q = torch.randn(2, 2, 40, 8)
    for lengths in ((48, 48), (40, 48), (32, 40)):
        with pytest.raises(ValueError, match="mask_mod: a BlockMask of .* one of 40 and 40 is"):
            attention(q, q, q, mask_mod=block_mask(lists, (16, 16), causal, lengths))


def test_a_block_mask_under_compile_is_made_outside():
    lists, *_ = drawn_blocks(1, 1, 40, 40, (16, 16), True, 0)
    theirs = block_mask(lists, (16, 16), causal, (40, 40))
    mask = create_block_mask(theirs, None, None, 40, 40)
    q = torch.randn(1, 1, 40, 8)
    compiled = torch.compile(lambda q: attention(q, q, q, mask_mod=mask), fullgraph=True,
                             backend="aot_eager")
    assert torch.equal(compiled(q), attention(q, q, q, mask_mod=theirs))
