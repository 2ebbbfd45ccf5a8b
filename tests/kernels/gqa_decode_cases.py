"""Cases of grouped-query attention over a KV cache, and their results in Triton's interpreter in
float32.

    TRITON_INTERPRET=1 python -m tests.kernels.gqa_decode_cases FILE

B sequences, Q queries each, H heads, G key heads, D query/key dim, V value dim.
"""

import sys
from dataclasses import dataclass, replace

import torch

from paddock.kernels.block_table import BlockTable
from paddock.kernels.spans import Span


@dataclass(frozen=True)
class Heads:
    heads: int = 6
    groups: int = 2
    dim: int = 16
    value: int = 16
    window: int | None = None
    scale: float = 0.3

    @property
    def how(self):
        return {"scale": self.scale, "window": self.window}

    def tensors(self, queries, keys, dtype, device):
        """query, key, value; keys and values are columns of something wider."""
        rng = torch.Generator().manual_seed(0)

        def rows(*shape):
            return torch.randn(shape, generator=rng).to(dtype).to(device)

        key = rows(keys, self.groups, self.dim + 16)[..., 16:]
        value = rows(keys, self.groups, self.value + 16)[..., : self.value]
        return rows(queries, self.heads, self.dim), key, value


@dataclass(frozen=True)
class Decode(Heads):
    """Sequences of different lengths, their keys scattered over pages of a KV cache."""

    visible: tuple[tuple[int, ...], ...] = ()
    size: int = 4

    def inputs(self, dtype=torch.float32, device="cpu"):
        """Block table entries after a sequence's last page name a page full of large numbers."""
        visible = torch.tensor(self.visible)
        B, Q = visible.shape
        P = -(-int(visible.max()) // self.size) + 1
        query, key, value = self.tensors(B * Q, (B * P + 1) * self.size, dtype, device)
        key[-self.size :], value[-self.size :] = 1e3, 1e3
        page = torch.randperm(B * P, generator=torch.Generator().manual_seed(1)).view(B, P)
        page[torch.arange(P) * self.size >= visible.amax(1, keepdim=True)] = B * P
        pages = BlockTable(page.int().to(device), self.size)
        return query.unflatten(0, (B, Q)), key, value, pages, visible.to(device)

    def attended(self, module, inputs):
        return module.gqa_paged_decode(*inputs, **self.how)

    def exact(self, inputs):
        """A loop in float64."""
        query, key, value = (x.double().cpu() for x in inputs[:3])
        slot, group = inputs[3].slot_BM.cpu(), self.heads // self.groups
        out = torch.zeros(*query.shape[:3], self.value, dtype=torch.float64)
        for b, row in enumerate(self.visible):
            for q, seen in enumerate(row):
                here = slot[b, max(0, seen - (self.window or seen)) : seen].long()
                for h in range(self.heads):
                    score = key[here, h // group] @ query[b, q, h] * self.scale
                    out[b, q, h] = score.softmax(0) @ value[here, h // group]
        return out


@dataclass(frozen=True)
class Continued(Heads):
    """Spans by their queries and keys. Queries and keys are in the order of the spans, or in
    reverse order."""

    runs: tuple[tuple[int, int], ...] = ()
    backwards: bool = False

    @property
    def spans(self):
        made, query, key = [], 0, 3  # the first keys belong to no span
        for queries, keys in reversed(self.runs) if self.backwards else self.runs:
            made.append(Span(query, queries, key, keys))
            query, key = query + queries, key + keys
        return tuple(reversed(made)) if self.backwards else tuple(made)

    def inputs(self, dtype=torch.float32, device="cpu"):
        keys = sum(keys for _, keys in self.runs) + 3
        return *self.tensors(sum(q for q, _ in self.runs), keys, dtype, device), self.spans

    def attended(self, module, inputs):
        return module.gqa_chunked_prefill(*inputs, **self.how)

    def exact(self, inputs):
        query, key, value = (x.double().cpu() for x in inputs[:3])
        group, out = self.heads // self.groups, []
        for span in self.spans:
            for i in range(span.queries):
                seen = span.past + i + 1
                here = slice(span.key + max(0, seen - (self.window or seen)), span.key + seen)
                for h in range(self.heads):
                    score = key[here, h // group] @ query[span.query + i, h] * self.scale
                    out.append(score.softmax(0) @ value[here, h // group])
        return torch.stack(out).unflatten(0, (-1, self.heads))


ONE = ((600,), (3,), (130,), (1,), (64,), (65,))
TABLES = {
    "one query each": Decode(visible=ONE),
    "one part": Decode(visible=((100,), (1,), (64,))),
    "drafts": Decode(visible=((20, 21, 22), (298, 299, 300))),
    "four drafts of seven heads": Decode(
        heads=7, groups=1, visible=((1, 2, 3, 4), (60, 61, 62, 63), (512, 513, 514, 515))
    ),
    "tiles that end exactly": Decode(heads=16, groups=2, visible=((99, 100), (127, 128))),
    "one query over a tile": Decode(
        heads=16, groups=1, visible=(tuple(range(70, 75)), tuple(range(9, 14)))
    ),
    "a query that sees more than the next": Decode(visible=((300, 5), (1, 290))),
    "heads of their own": Decode(heads=3, groups=3, visible=((33,), (70,))),
    "a window": Decode(visible=ONE, window=37),
    "a window of one": Decode(visible=((5,), (200,)), window=1),
    "a window and drafts": Decode(
        heads=9, groups=3, visible=((1, 2), (30, 31), (700, 701)), window=150
    ),
    "odd widths": Decode(dim=80, value=96, visible=((70,), (2,)), size=16),
    "values of another width": Decode(dim=24, value=72, visible=((70,), (200,))),
    "wide heads": Decode(dim=256, value=256, visible=((300,), (33,)), size=16),
    "pages of one": Decode(visible=((33,), (70,)), size=1),
}
SPANS = {
    "few queries": Continued(runs=((2, 70), (1, 1), (5, 300), (1, 129))),
    "whole and continued": Continued(runs=((40, 40), (3, 90), (1, 1), (70, 200), (21, 64))),
    "backwards": Continued(runs=((40, 40), (3, 90), (1, 1), (70, 200)), backwards=True),
    "tiles that end exactly": Continued(heads=8, groups=2, runs=((16, 64), (32, 96), (17, 65))),
    "many parts": Continued(heads=3, groups=1, runs=((7, 2500), (2, 600), (1, 255))),
    "a window": Continued(runs=((40, 400), (30, 30), (3, 7), (1, 900)), window=20),
    "a window on whole documents": Continued(runs=((50, 50), (4, 4)), window=11),
    "seven heads": Continued(heads=7, groups=1, dim=64, value=64, runs=((10, 30), (9, 9), (2, 80))),
    "odd widths": Continued(heads=4, groups=4, dim=80, value=40, runs=((70, 90), (3, 66))),
}
# With long whole documents, which go to dense attention: see the test.
LONG = replace(
    SPANS["whole and continued"], runs=((40, 40), (3, 90), (65, 65), (70, 200), (64, 64))
)


if __name__ == "__main__":
    from paddock.kernels.gqa_decode import fused, tiles

    plain = torch.Tensor.new_empty, torch.empty, torch.empty_like

    def poisoned(make):
        def made(*given, **how):
            x = make(*given, **how)
            return x.fill_(float("nan") if x.is_floating_point() else 1 << 20)

        return made

    torch.Tensor.new_empty, torch.empty, torch.empty_like = map(poisoned, plain)
    found = {
        name: {key: case.attended(fused, case.inputs()) for key, case in cases.items()}
        for name, cases in {"tables": TABLES, "spans": SPANS}.items()
    }
    tiles.LONG = 64
    found["long"] = LONG.attended(fused, LONG.inputs())
    # Large tiles, and split keys while one document goes to dense attention: by default only
    # longer spans get them.
    tiles.plan.cache_clear()
    tiles.ENOUGH, tiles.LONG = 1, 1 << 30
    found["large tiles"] = LONG.attended(fused, LONG.inputs())
    tiles.plan.cache_clear()
    tiles.ENOUGH, tiles.LONG, tiles.LEAST = 1 << 20, 64, 16
    found["parts"] = LONG.attended(fused, LONG.inputs())
    torch.save(found, sys.argv[1])
