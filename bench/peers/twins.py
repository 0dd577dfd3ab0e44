"""PyTorch twins of the training workloads (foci/measure/training.h): the same maths and parameters,
written as one would for PyTorch: query, key and value in one product, SDPA, fused AdamW.

A twin of pictures of mixed sizes has two layouts: "padded" (the usual one: every tensor as long as
the longest picture, with a mask in attention) and "packed" (only attention is padded, all else runs
over the tokens there are).
"""
import ctypes
import math

import torch
from torch import nn
from torch.nn import functional as F


def view(address, shape, dtype):
    """A tensor over foci's memory."""
    kind = {"float32": ctypes.c_float, "int64": ctypes.c_int64}[dtype]
    array = (kind * math.prod(shape)).from_address(address)
    return torch.frombuffer(array, dtype=getattr(torch, dtype)).reshape(shape)


class Layout:
    """Where the tokens of a batch lie: [batch, longest] with holes, or one after the other."""

    def __init__(self, lengths, packed):
        self.batch, self.longest, self.packed = len(lengths), max(lengths), packed
        self.even = min(lengths) == self.longest
        places = [b * self.longest + i for b, n in enumerate(lengths) for i in range(n)]
        self.places = torch.tensor(places)  # of every token among the padded ones
        self.mask = None
        if not self.even:
            seen = torch.arange(self.longest)[None] < torch.tensor(lengths)[:, None]
            self.mask = torch.zeros(seen.shape).masked_fill(~seen, -math.inf)[:, None, None]
            # Where each padded place reads from; holes read a row of zeros behind the tokens.
            self.source = torch.full((self.batch * self.longest,), len(places))
            self.source[self.places] = torch.arange(len(places))
        self.weights = (torch.arange(self.longest)[None] < torch.tensor(lengths)[:, None]).float()
        self.first = torch.tensor([0] + lengths[:-1]).cumsum(0)

    def rows(self, tokens):
        """[tokens, C], one after the other, as the model's layers run over them."""
        if self.even:
            return tokens.reshape(self.batch, self.longest, -1)
        return tokens if self.packed else self.pad(tokens)

    def pad(self, tokens):
        tokens = torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])])
        return tokens.index_select(0, self.source).reshape(self.batch, self.longest, -1)

    def padded(self, x):
        return self.pad(x) if self.packed and not self.even else x

    def unpadded(self, x):
        if self.packed and not self.even:
            return x.reshape(self.batch * self.longest, -1).index_select(0, self.places)
        return x

    def pooled(self, x, class_token):
        """Of each picture its first token, or the mean of all."""
        x = self.padded(x)
        if class_token:
            return x[:, 0]
        weights = self.weights / self.weights.sum(1, keepdim=True)
        return x.mean(1) if self.even else (x * weights[..., None]).sum(1)


class Block(nn.Module):
    def __init__(self, w):
        super().__init__()
        width = w["width"]
        self.heads, self.causal = w["heads"], w["language"]
        self.norm1, self.norm2 = nn.LayerNorm(width, 1e-5), nn.LayerNorm(width, 1e-5)
        self.qkv, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up = nn.Linear(width, w["feed_forward"])
        self.down = nn.Linear(w["feed_forward"], width)

    def forward(self, x, layout):
        qkv = layout.padded(self.qkv(self.norm1(x)))
        batch, length, _ = qkv.shape
        q, k, v = qkv.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=layout.mask, is_causal=self.causal)
        y = layout.unpadded(y.transpose(1, 2).reshape(batch, length, -1))
        x = x + self.output(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def position_mix(w):
    """[patches, cells]: each patch's position as a mix of the table's rows, bilinearly."""
    rows, cols = w["position_rows"], w["position_cols"]

    def axis(n, native):
        x = ((torch.arange(n, dtype=torch.float64) + 0.5) * native / n - 0.5).clamp(0, native - 1)
        low = x.floor().long()
        mix = torch.zeros(n, native, dtype=torch.float64)
        mix[torch.arange(n), low] += 1 - (x - low)
        mix[torch.arange(n), (low + 1).clamp(max=native - 1)] += x - low
        return mix

    return torch.cat([torch.kron(axis(r, rows), axis(c, cols)) for r, c in w["grids"]]).float()


class Pictures(nn.Module):
    def __init__(self, w):
        super().__init__()
        width = w["width"]
        self.embedding = nn.Linear(w["patch_values"], width)
        self.positions = nn.Parameter(torch.zeros(w["position_rows"] * w["position_cols"], width))
        self.token = nn.Parameter(torch.zeros(1, width)) if w["class_token"] else None
        self.blocks = nn.ModuleList(Block(w) for _ in range(w["layers"]))
        self.norm = nn.LayerNorm(width, 1e-5)
        self.classifier = nn.Linear(width, w["classes"])
        native = [[w["position_rows"], w["position_cols"]]]
        # Pictures of the table's own size take its rows as they are.
        self.repeat = len(w["grids"]) if w["grids"] == native * len(w["grids"]) else None
        self.mix = None if self.repeat else position_mix(w)
        order, patch = [], 1
        for length in w["lengths"]:  # row 0 is the class token, the patches follow
            if w["class_token"]:
                order.append(0)
                length -= 1
            order += range(patch, patch + length)
            patch += length
        self.order = torch.tensor(order)

    def forward(self, patches, layout):
        x = self.embedding(patches)
        if self.repeat:
            x = (x.view(self.repeat, -1, x.shape[1]) + self.positions).view(x.shape)
        else:
            x = x + self.mix @ self.positions
        if self.token is not None and layout.even:
            tokens = self.token.expand(layout.batch, 1, -1)
            x = torch.cat([tokens, x.view(layout.batch, layout.longest - 1, -1)], 1)
        else:
            if self.token is not None:
                x = torch.cat([self.token, x]).index_select(0, self.order)
            x = layout.rows(x)
        for block in self.blocks:
            x = block(x, layout)
        return self.classifier(layout.pooled(self.norm(x), self.token is not None))


class Texts(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.tokens = nn.Embedding(w["vocabulary"], w["width"])
        self.positions = nn.Parameter(torch.zeros(w["length"], w["width"]))
        self.blocks = nn.ModuleList(Block(w) for _ in range(w["layers"]))
        self.norm = nn.LayerNorm(w["width"], 1e-5)

    def forward(self, ids, layout):
        x = self.tokens(ids.view(layout.batch, layout.longest)) + self.positions
        for block in self.blocks:
            x = block(x, layout)
        return F.linear(self.norm(x), self.tokens.weight).flatten(0, 1)


def names(model, w):
    """[(parameter, foci's names of its parts, decays)]."""
    found = []

    def linear(module, *paths):
        found.append((module.weight, [f"{p}.weight" for p in paths], True))
        found.append((module.bias, [f"{p}.bias" for p in paths], False))

    def norm(module, path):
        found.append((module.weight, [f"{path}.weight"], False))
        found.append((module.bias, [f"{path}.bias"], False))

    found.append((model.positions, ["embeddings.position_embeddings.weight"], False))
    if w["language"]:
        found.append((model.tokens.weight, ["embeddings.word_embeddings.weight"], False))
    else:
        linear(model.embedding, "embeddings.patch_embeddings")
        linear(model.classifier, "classifier")
        if model.token is not None:
            found.append((model.token, ["embeddings.cls_token"], False))
    for i, block in enumerate(model.blocks):
        layer = f"encoder.layer.{i}"
        norm(block.norm1, f"{layer}.layernorm_before")
        linear(block.qkv, *(f"{layer}.attention.{part}" for part in ("query", "key", "value")))
        linear(block.output, f"{layer}.attention.output")
        norm(block.norm2, f"{layer}.layernorm_after")
        linear(block.up, f"{layer}.intermediate")
        linear(block.down, f"{layer}.output")
    norm(model.norm, "encoder.layernorm")
    return found


class Twin:
    """A twin of `job` (foci_library.Training), from where that is now: values and moments."""

    def __init__(self, job, packed):
        w = job.about()
        self.workload = w
        self.model = Texts(w) if w["language"] else Pictures(w)
        self.layout = Layout(w["lengths"], packed)
        tensors = {t["name"]: t for t in w["tensors"]}

        def read(name, part="value"):
            t = tensors[name]
            return view(job.tensor(name, part), t["shape"], t["dtype"])

        self.input = read("ids" if w["language"] else "patches").clone()
        self.labels = read("labels").clone()
        found = names(self.model, w)
        used = [name for _, parts, _ in found for name in parts]
        trained = [t["name"] for t in w["tensors"] if t["trained"]]
        if sorted(used) != sorted(trained):
            raise ValueError(f"{w['name']}: the twin's parameters are not foci's: "
                             f"{sorted(set(used) ^ set(trained))}")
        for _, parts, decay in found:
            for name in parts:
                if tensors[name]["decay"] != decay:
                    raise ValueError(f"{w['name']}: weight decay of {name} differs")
        groups = [{"params": [p for p, _, d in found if d == decay],
                   "weight_decay": w["weight_decay"] if decay else 0.0}
                  for decay in (True, False)]
        self.optimiser = torch.optim.AdamW(groups, lr=w["learning_rate"], betas=tuple(w["betas"]),
                                           eps=w["adam_eps"], fused=True)
        with torch.no_grad():
            for parameter, parts, _ in found:
                def joined(part, parts=parts, parameter=parameter):
                    return torch.cat([read(name, part) for name in parts]).reshape(parameter.shape)
                parameter.copy_(joined("value"))
                self.optimiser.state[parameter] = {
                    "step": torch.tensor(float(w["steps"])), "exp_avg": joined("first").clone(),
                    "exp_avg_sq": joined("second").clone()}

    def parameters(self):
        return sum(p.numel() for p in self.model.parameters())

    def step(self):
        logits = self.model(self.input, self.layout)
        loss = F.cross_entropy(logits, self.labels,
                               label_smoothing=self.workload["label_smoothing"])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.workload["clip"], foreach=True)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return loss.item()
