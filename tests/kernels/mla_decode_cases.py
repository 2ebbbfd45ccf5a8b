"""Cases of MLA decoding, and their results in Triton's interpreter in float32.

    TRITON_INTERPRET=1 python -m tests.kernels.mla_decode_cases FILE

B sequences, Q queries each, N = B * Q, H heads, C row width, V value columns, K selected keys.
"""

import sys
from dataclasses import dataclass

import torch

from paddock.kernels.block_table import BlockTable


@dataclass(frozen=True)
class Decode:
    """Sequences of different lengths, their latent KV entries scattered over pages."""

    visible_BQ: tuple[tuple[int, ...], ...]
    heads: int = 3
    width: int = 24
    value: int = 16
    size: int = 4
    kept: int | None = None  # number of selected keys; None: all keys are visible
    scale: float = 0.3

    def inputs(self, dtype: torch.dtype = torch.float32, device: str = "cpu"):
        """query_BQHC, row_SC, pages, and visible_BQ or index_NK. Unused pages are full
        of large numbers or, where only selected rows may be read, of NaN."""
        rng = torch.Generator().manual_seed(0)
        visible = torch.tensor(self.visible_BQ)
        B, Q = visible.shape
        P = -(-int(visible.max()) // self.size) + 1
        query = torch.randn(B, Q, self.heads, self.width, generator=rng)
        row = torch.randn((B * P + 1) * self.size, self.width, generator=rng)
        row[-self.size :] = 1e3 if self.kept is None else float("nan")
        page = torch.randperm(B * P, generator=rng).view(B, P)
        page[torch.arange(P) * self.size >= visible.amax(1, keepdim=True)] = B * P
        pages = BlockTable(page.to(device), self.size)
        shown = visible if self.kept is None else self.choices(visible, rng)
        return query.to(dtype).to(device), row.to(dtype).to(device), pages, shown.to(device)

    def choices(self, visible: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
        """Ascending, padded with -1; a query that sees only its first key selects none."""
        index = torch.full((visible.numel(), self.kept), -1, dtype=torch.int32)
        for n, seen in enumerate(visible.flatten().tolist()):
            count = min(self.kept, seen) if seen > 1 else 0
            index[n, :count] = torch.randperm(seen, generator=rng)[:count].sort().values.int()
        return index

    def attended(self, module, inputs) -> torch.Tensor:
        """[N, H, V] by the functions of one module: the reference's or the kernel's."""
        query, row, pages, shown = inputs
        how = {"scale": self.scale, "value": self.value}
        if self.kept is None:
            return module.mla_paged_decode(query, row, pages, shown, **how).flatten(0, 1)
        return module.mla_sparse_decode(query.flatten(0, 1), row, pages, shown, **how)


def exact(inputs):
    """The same numbers in float64 on the CPU."""
    query, row, pages, shown = inputs
    return (
        query.double().cpu(),
        row.double().cpu(),
        BlockTable(pages.page_BP.cpu(), pages.page_size),
        shown.cpu(),
    )


CASES = {
    "one query each": Decode(((600,), (3,), (130,), (1,), (257,))),
    "drafts": Decode(((20, 21, 22), (298, 299, 300))),
    "a query that sees more than the next": Decode(((300, 5), (1, 290))),
    "pages of one": Decode(((33,), (70,)), size=1),
    "wide rows, many heads": Decode(((40,), (9,)), heads=70, width=72, value=64, size=16),
    "no columns but values": Decode(((40,), (9,)), width=16, size=16),
    "selected": Decode(((600,), (3,), (130,), (1,)), kept=200),
    "selected by drafts": Decode(((20, 21, 22), (298, 299, 300)), kept=150, size=16),
    "selected by many heads": Decode(((40,), (9,)), heads=70, width=72, value=64, kept=7),
}


if __name__ == "__main__":
    from paddock.kernels.mla_decode import fused

    found = {name: case.attended(fused, case.inputs()) for name, case in CASES.items()}
    torch.save(found, sys.argv[1])
