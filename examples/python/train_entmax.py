"""Trains a small classifier of digits with entmax and a penalty on the entropy of attention.

A class token reads 16 patches of an 8 x 8 image. Softmax spreads its weight over all of them;
entmax may leave patches out, and the penalty, whose gradient goes through the attention, asks for
few. Prints accuracy on held-out digits beside entropy and the number of patches that are read.

    python examples/python/train_entmax.py
"""

import gzip
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import foci.torch

DATA = Path(__file__).resolve().parents[2] / "data" / "digits.csv.gz"


class Classifier(torch.nn.Module):
    """16 patches and a class token; one block that mixes them, and one where the class reads."""

    def __init__(self, normalizer: str, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.normalizer, self.heads = normalizer, heads
        self.embed = torch.nn.Linear(4, width)
        self.position = torch.nn.Parameter(0.3 * torch.randn(17, width))
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(width, 3 * width) for _ in range(2))
        self.norm = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.mlp = torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, 64),
                                       torch.nn.GELU(), torch.nn.Linear(64, width))
        self.head = torch.nn.Linear(width, 10)

    def forward(self, patches: torch.Tensor) -> tuple[torch.Tensor, "foci.torch.Outputs"]:
        x = F.pad(self.embed(patches), (0, 0, 1, 0)) + self.position  # [B, 17, width]
        B, N, width = x.shape
        for norm, linear in zip(self.norm, self.qkv):
            q, k, v = linear(norm(x)).view(B, N, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            out = foci.torch.attention(q, k, v, normalizer=self.normalizer,
                                       statistics=("entropy", "support"))
            x = x + out.y.transpose(1, 2).reshape(B, N, width)
            if linear is self.qkv[0]:
                x = x + self.mlp(x)
        return self.head(x[:, 0]), out


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Patches [1797, 16, 4] in [0, 1], and labels."""
    with gzip.open(DATA, "rt") as f:
        table = np.loadtxt(f, delimiter=",", dtype=np.float32)
    images = torch.from_numpy(table[:, :64].copy()).view(-1, 4, 2, 4, 2) / 16
    return images.transpose(2, 3).reshape(-1, 16, 4), torch.from_numpy(table[:, 64]).long()


def train(normalizer: str, penalty: float, epochs: int = 10) -> str:
    torch.manual_seed(0)
    x, y = load()
    held_out = 397  # the last ones
    x_train, y_train, x_test, y_test = (x[:-held_out], y[:-held_out], x[-held_out:], y[-held_out:])
    model = Classifier(normalizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    for _ in range(epochs):
        for batch in torch.randperm(len(x_train)).split(100):
            logits, out = model(x_train[batch])
            loss = F.cross_entropy(logits, y_train[batch])
            loss = loss + penalty * out.entropy[:, :, 0].mean()  # of the class token's row
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        logits, out = model(x_test)
    accuracy = (logits.argmax(-1) == y_test).float().mean()
    return (f"accuracy {accuracy:.3f}  entropy {out.entropy[:, :, 0].mean():.2f} nats  "
            f"reads {out.support[:, :, 0].mean():4.1f} of 17 tokens a head")


def main() -> None:
    torch.set_num_threads(1)
    for name, normalizer, penalty in (("softmax", "softmax", 0.0), ("entmax 1.5", "entmax", 0.0),
                                      ("entmax 1.5, penalty", "entmax", 0.05)):
        print(f"{name:20s} {train(normalizer, penalty)}")


if __name__ == "__main__":
    main()
