"""Cases of W4A8 matrix products, and their results in Triton's interpreter.

TRITON_INTERPRET=1 python -m tests.kernels.w4a8_cases FILE
"""

import sys
from dataclasses import dataclass

import torch

from paddock.kernels.w4a8_gemm import PackedWeight, QuantizedActivations, fused, pack_halves
from paddock.kernels.w4a8_gemm.fused import GemmTile


@dataclass(frozen=True)
class Product:
    counts: tuple[int, ...]  # rows of each expert
    inputs: int
    outputs: int
    bits: int = 4
    group: int | None = None  # columns that share a scale; None: all of them

    def inputs_of(self, device: str = "cpu") -> tuple[QuantizedActivations, PackedWeight]:
        rng = torch.Generator().manual_seed(0)
        R, E, limit = sum(self.counts), len(self.counts), 7 if self.bits == 4 else 127
        row = torch.randint(-127, 128, (R, self.inputs), generator=rng).to(torch.int8)
        rows = QuantizedActivations(row.to(device), (torch.rand(R, generator=rng) + 0.1).to(device))
        shape = (E, self.outputs, self.inputs)
        integer = torch.randint(-limit - 1, limit + 1, shape, generator=rng).to(torch.int8)
        groups = self.inputs // (self.group or self.inputs)
        scale = torch.rand(E, self.outputs, groups, generator=rng) + 0.1
        stored = pack_halves(integer) if self.bits == 4 else integer
        return rows, PackedWeight(stored.to(device), scale.to(device), packed=self.bits == 4)

    def exact(self) -> torch.Tensor:
        """The product of the dequantized matrices in float64."""
        rows, weight = self.inputs_of()
        scale = weight.scale_XFG.double().repeat_interleave(weight.group, -1)
        matrix = weight.integer_XFD.double() * scale
        x = rows.integer_RD.double() * rows.scale_R.double().unsqueeze(-1)
        parts = x.split(self.counts)
        return torch.cat([part @ one.T for part, one in zip(parts, matrix, strict=True)])


CASES = {
    "one matrix, int4": Product((5,), 64, 40),
    "one matrix, int8": Product((19,), 96, 33, bits=8),
    "one row": Product((1,), 128, 16),
    "experts, some idle": Product((3, 0, 20, 1, 0), 64, 24),
    "experts with many rows": Product((70, 150), 64, 130),
    "columns shared by warps": Product((5, 0, 9), 1024, 24, bits=8),
    "packed columns shared by warps": Product((3,), 2048, 24),
    "groups shared by warps": Product((3, 2), 1024, 24, group=64),
    "groups of 32": Product((4, 9), 128, 24, group=32),
    "groups of int8": Product((4, 9), 128, 24, bits=8, group=64),
    "a group over the middle": Product((6,), 192, 16, group=64),
}

# Tiles that the table may not select at sizes as small as these.
CUTS = {
    "the same columns": GemmTile(64, 16, 64, slices=1, warps=4, stages=3),
    "columns of their own": GemmTile(16, 8, 32, slices=4, warps=4, stages=3),
    "two slices of many rows": GemmTile(32, 64, 32, slices=2, warps=4, stages=2),
}

ROWS = {
    "halves and zeros": torch.cat(
        (
            torch.randn(5, 37, generator=torch.Generator().manual_seed(1)),
            torch.zeros(1, 37),
            torch.linspace(-127, 127, 37).mul(2).round().div(2).unsqueeze(0),
        )
    ),
    "rows that programs share": torch.randn(3, 2500, generator=torch.Generator().manual_seed(2)),
    "many rows": torch.randn(70, 1100, generator=torch.Generator().manual_seed(3)),
}

GATED = {
    "gates of few rows": torch.randn(3, 5000, generator=torch.Generator().manual_seed(4)),
    "gates of many rows": torch.randn(70, 74, generator=torch.Generator().manual_seed(5)),
}
# Rows gathered by index.
SCATTERED = {
    name: CASES[name] for name in ("one matrix, int8", "experts, some idle", "groups of 32")
}


def scattered_rows(rows: int) -> torch.Tensor:
    return torch.randperm(rows, generator=torch.Generator().manual_seed(6))


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)  # entries not written are NaN
    found = {}
    for name, case in CASES.items():
        rows, weight = case.inputs_of()
        found[name] = fused.int_grouped_gemm(rows, weight, case.counts, torch.float32)
        for cut, tile in CUTS.items():
            fitted = tile.fitted(weight)
            how = (rows, weight, case.counts, torch.float32, fitted)
            found[f"{name}, {cut}"] = fused.multiply(*how)
    for name, case in SCATTERED.items():
        rows, weight = case.inputs_of()
        source = scattered_rows(rows.count)
        how = (rows[source.argsort()], weight, case.counts, torch.float32, source)
        found[f"{name}, scattered"] = fused.int_grouped_gemm(*how)
    for name, x in GATED.items():
        rounded = fused.silu_and_mul_quantize(x)
        found[f"{name}, rounded"], found[f"{name}, scales"] = rounded.integer_RD, rounded.scale_R
    for name, x in ROWS.items():
        rounded = fused.quantize_per_token(x)
        found[f"{name}, rounded"], found[f"{name}, scales"] = rounded.integer_RD, rounded.scale_R
    torch.save(found, sys.argv[1])
