"""The W4A8 GEMM on one GPU against bfloat16 in the same run; memory and decoding with it.

    python -m benchmarks.quant gpu
    python -m benchmarks.quant_gpu [linear|experts|decode|layers|recipe|tiles ...]

`decode` and `layers` are in benchmarks.quant_served. `recipe` times the whole quantization recipe
on the small preset by part. `tiles` times other tile sizes than those in the tables of `fused`.
In the other sections every arm is a CUDA graph that alternates between many weights; a row that
fails is reported, and the next one runs.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from benchmarks.quant_served import decode_claims, layer_claims
from benchmarks.table import Claim, print_claims, speedup
from paddock.checkpoint import save_pretrained
from paddock.kernels.w4a8_gemm import (
    PackedWeight,
    QuantizedActivations,
    fused,
    int_grouped_gemm,
    int_linear,
    pack_halves,
    quantize_per_token,
    reference,
)
from paddock.kernels.w4a8_gemm.fused import GemmTile
from paddock.model import Transformer, preset
from paddock.quant import CalibrationText, quantize_folder
from paddock.quant.calibration_data import TextPurpose
from paddock.quant.run import QuantizationProgress

SHAPES = {"gate and up": (4096, 6144), "down": (6144, 2048)}
ROWS = (1, 4, 16, 64, 256, 1024)
TOKENS = (1, 8, 64)  # with 8 of 256 experts each
EXPERTS, ACTIVE = 256, 8
TEXT: dict[TextPurpose, int] = {
    "calibration": 65_536,
    "validation": 32_768,
}  # as `paddock quantize`
VOCAB, LENGTHS = 4096, (2048, 700, 300, 1500)
MAX_SECONDS = 60
COPIES_BYTES = 1 << 30  # of different weights, so that no cache holds them

# Outputs, rows, columns, slices, warps, stages: candidates by max number of rows. Tiles in use are
# timed too.
CANDIDATES = {
    16: [
        GemmTile(16, 8, 128, 8, 8, 3),
        GemmTile(16, 16, 128, 4, 4, 4),
        GemmTile(32, 16, 128, 1, 4, 6),
        GemmTile(32, 16, 128, 1, 2, 8),
        GemmTile(32, 8, 128, 1, 2, 8),
        GemmTile(64, 16, 128, 1, 4, 6),
        GemmTile(64, 8, 128, 1, 4, 6),
    ],
    64: [
        GemmTile(32, 32, 128, 1, 4, 6),
        GemmTile(32, 64, 128, 1, 4, 6),
        GemmTile(64, 32, 128, 1, 4, 6),
        GemmTile(64, 64, 128, 1, 4, 4),
        GemmTile(64, 64, 128, 1, 8, 4),
    ],
    256: [
        GemmTile(64, 128, 128, 1, 4, 3),
        GemmTile(64, 64, 128, 1, 4, 4),
        GemmTile(64, 128, 128, 1, 8, 3),
    ],
    1024: [GemmTile(128, 128, 64, 1, 4, 3)],
}
EXPERT_CANDIDATES = [GemmTile(64, 16, 128, 1, 4, 6), GemmTile(64, 8, 128, 1, 4, 4)]


def gpu_claims() -> list[Claim]:
    if not torch.cuda.is_available():
        return [Claim(name="W4A8 GEMM", target=">= 2.3x up to 64 rows", measured="needs a GPU")]
    return [
        *linear_claims(),
        *expert_claims(),
        *decode_claims(),
        *layer_claims(),
        *recipe_claims(),
    ]


def linear_claims() -> list[Claim]:
    return [_claim_or_error(partial(_linear_claim, name, rows)) for name in SHAPES for rows in ROWS]


def expert_claims() -> list[Claim]:
    return [_claim_or_error(partial(_expert_claim, tokens)) for tokens in TOKENS]


def _claim_or_error(call: partial[Claim]) -> Claim:
    """A row, or its error: one failure must not lose the other rows."""
    try:
        claim = call()
    except Exception as error:
        claim = Claim(name=f"W4A8 {call.args}", measured=f"failed: {error!r:.200}", holds=False)
    print(claim.name, claim.measured, claim.verdict, sep=" | ", flush=True)
    torch.cuda.empty_cache()
    return claim


def _min_ratio(rows: int) -> float | None:
    if rows <= 64:
        return 2.3
    return 0.8 if rows == 1024 else None


def _timed(arms: Sequence[Callable[[int], object]], turns: int) -> list[float]:
    """Median microseconds of one call of each arm in a CUDA graph, as in decoding."""
    from benchmarks.kernels import medians

    graphs = []
    for arm in arms:
        for turn in range(min(turns, 3)):
            arm(turn)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for turn in range(turns):
                arm(turn)
        graphs.append(graph)
    found = medians([graph.replay for graph in graphs], repeats=11)
    return [1e3 * ms / turns for ms in found]


def _weights(outputs: int, inputs: int, count: int) -> list[PackedWeight]:
    found = []
    for _ in range(count):
        integer = torch.randint(-7, 8, (outputs, inputs), device="cuda", dtype=torch.int8)
        scale = torch.rand(outputs, 1, device="cuda") * 1e-2
        found.append(PackedWeight(pack_halves(integer), scale, packed=True))
    return found


def _activations(rows: int, inputs: int) -> Tensor:
    return torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)


def _linear_claim(name: str, rows: int) -> Claim:
    F, D = SHAPES[name]
    turns = max(2, COPIES_BYTES // (2 * F * D))
    x = _activations(rows, D)
    wide = [torch.randn(F, D, device="cuda", dtype=torch.bfloat16) for _ in range(turns)]
    narrow, rounded = _weights(F, D, turns), quantize_per_token(x)
    arms = (
        lambda turn: int_linear(quantize_per_token(x), narrow[turn], torch.bfloat16),
        lambda turn: torch.nn.functional.linear(x, wide[turn]),
        lambda turn: int_linear(rounded, narrow[turn], torch.bfloat16),
    )
    ours, theirs, alone = _timed(arms, turns)
    what = f"W4A8 {name} {F} x {D}, {rows} rows, quantizing included, against bfloat16"
    claim = speedup(what, ours, theirs, min_ratio=_min_ratio(rows), unit="us")
    return replace(claim, measured=f"{claim.measured}; GEMM alone {alone:.1f}")


def _routing(tokens: int) -> Tensor:
    """[tokens, ACTIVE] random experts."""
    generator = torch.Generator().manual_seed(0)
    experts = [torch.randperm(EXPERTS, generator=generator)[:ACTIVE] for _ in range(tokens)]
    return torch.stack(experts).cuda()


def _expert_counts(tokens: int) -> Tensor:
    """Rows of each expert."""
    return torch.bincount(_routing(tokens).flatten(), minlength=EXPERTS)


def _stack(outputs: int, inputs: int) -> PackedWeight:
    parts = [weight.integer for weight in _weights(outputs, inputs, EXPERTS)]
    scale = torch.rand(EXPERTS, outputs, 1, device="cuda") * 1e-2
    return PackedWeight(torch.stack(parts), scale, packed=True)


def _expert_claim(tokens: int) -> Claim:
    """All routed experts of a layer when decoding so many tokens, against the faster of the two
    bfloat16 kernels."""
    from paddock.kernels.fused_experts import triton as fused_experts
    from paddock.kernels.fused_experts.fused import MAX_ROWS
    from paddock.kernels.grouped_gemm import grouped_gemm

    F, D = SHAPES["gate and up"]
    counts, x = _expert_counts(tokens), _activations(tokens * ACTIVE, D)
    narrow, rounded = _stack(F, D), quantize_per_token(x)
    wide = torch.randn(EXPERTS, F, D, device="cuda", dtype=torch.bfloat16)
    x_TD, expert_R = _activations(tokens, D), _routing(tokens).flatten()
    inner_RF = x.new_empty(len(x), F // 2)

    def by_fused(_: int) -> None:
        fused_experts.gate_and_up(
            x_TD, wide, fused_experts.plan(expert_R, EXPERTS), inner_RF, ACTIVE
        )

    arms = [
        lambda _: int_grouped_gemm(quantize_per_token(x), narrow, counts, torch.bfloat16),
        lambda _: int_grouped_gemm(rounded, narrow, counts, torch.bfloat16),
        lambda _: grouped_gemm(x, wide, counts),
        *([by_fused] if len(x) <= MAX_ROWS else []),
    ]
    ours, alone, *bfloat16 = _timed(arms, 4)
    what = f"W4A8 gate and up of 256 experts, {tokens} tokens of 8, against the faster bfloat16"
    claim = speedup(what, ours, min(bfloat16), min_ratio=2.3, unit="us")
    others = " / ".join(f"{us:.1f}" for us in bfloat16)
    measured = f"{claim.measured}; GEMM alone {alone:.1f}; bfloat16 grouped / fused {others}"
    return replace(claim, measured=measured)


def recipe_claims(device: str = "cuda") -> list[Claim]:
    """Seconds to quantize the small preset with random weights, the vocabulary of recipes/small and
    random text."""
    spent: defaultdict[str, float] = defaultdict(float)
    part, since = "opening", 0.0

    def on_progress(progress: QuantizationProgress) -> None:
        nonlocal part, since
        spent[part] += time.perf_counter() - since
        part, since = progress.what.split(": ")[-1], time.perf_counter()

    with TemporaryDirectory() as home:
        source, small = Path(home) / "small", preset("small").model_copy(update={"vocab": VOCAB})
        save_pretrained(Transformer.from_config(small, 0), source, dtype="bfloat16")
        since = time.perf_counter()
        quantize_folder(
            source, Path(home) / "q", passages=_text(), device=device, on_progress=on_progress
        )
        on_progress(QuantizationProgress(1, 1, "done"))
    seconds = sum(spent.values())
    parts = ", ".join(f"{name} {took:.1f}" for name, took in spent.items())
    return [
        Claim(
            name=f"seconds to quantize small on {device}",
            target=f"<= {MAX_SECONDS}",
            measured=f"{seconds:.0f} ({parts})",
            holds=seconds <= MAX_SECONDS,
        )
    ]


def _text() -> list[CalibrationText]:
    generator, lengths = torch.Generator().manual_seed(0), cycle(LENGTHS)
    made: list[CalibrationText] = []
    for purpose, tokens in TEXT.items():
        while sum(len(p.ids) for p in made if p.purpose == purpose) < tokens:
            ids = torch.randint(0, VOCAB, (next(lengths),), generator=generator)
            made.append(CalibrationText(ids=tuple(ids.tolist()), purpose=purpose))
    return made


def tile_lines() -> Iterator[str]:
    """A line per tile of each GEMM: microseconds with quantizing and alone, and the rate at which
    weights are read."""
    for name, (F, D) in SHAPES.items():
        stacks = [weight.as_stack() for weight in _weights(F, D, 24)]
        for rows in ROWS:
            yield f"{name} {F} x {D}, {rows} rows: us with quantizing, alone; TB/s of weights; tile"
            benchmark = TileBenchmark(stacks, _activations(rows, D), (rows,))
            tiles = next(tiles for max_rows, tiles in CANDIDATES.items() if rows <= max_rows)
            yield from benchmark.lines(tiles)
    stack = _stack(*SHAPES["gate and up"])
    for tokens in TOKENS:
        yield f"256 experts, {tokens} tokens of 8: us with quantizing, alone; TB/s of weights; tile"
        x = _activations(tokens * ACTIVE, stack.inputs)
        yield from TileBenchmark([stack] * 4, x, _expert_counts(tokens)).lines(EXPERT_CANDIDATES)


class TileBenchmark:
    """One GEMM, timed with many tiles."""

    def __init__(
        self, stacks: Sequence[PackedWeight], x_RD: Tensor, counts_E: tuple[int] | Tensor
    ) -> None:
        self.stacks, self.x_RD, self.counts_E = stacks, x_RD, counts_E
        self.rows = reference.quantize_per_token(x_RD)
        self.exact_RF = reference.int_grouped_gemm(self.rows, stacks[0], counts_E, torch.bfloat16)
        active = 1 if isinstance(counts_E, tuple) else int((counts_E > 0).sum())
        self.weight_bytes = active * stacks[0].integer[0].numel()

    def lines(self, tiles: Sequence[GemmTile]) -> Iterator[str]:
        """Lines of the tile in use and of these."""
        used = fused.tile_for(len(self.x_RD), self.stacks[0])
        for tile in dict.fromkeys([used, *(tile.fitted(self.stacks[0]) for tile in tiles)]):
            try:
                yield self._line(tile)
            except Exception as error:
                yield f"  failed: {error!r:.80} {astuple(tile)}"

    def _line(self, tile: GemmTile) -> str:
        def gemm(rows: QuantizedActivations, turn: int) -> Tensor:
            return fused.multiply(rows, self.stacks[turn], self.counts_E, torch.bfloat16, tile)

        verdict = "" if torch.equal(gemm(self.rows, 0), self.exact_RF) else ", WRONG"
        arms = (
            lambda turn: gemm(quantize_per_token(self.x_RD), turn),
            lambda turn: gemm(self.rows, turn),
        )
        both, alone = _timed(arms, len(self.stacks))
        rate = self.weight_bytes / alone / 1e6
        return f"{both:8.1f} {alone:8.1f} {rate:6.2f}  {astuple(tile)}{verdict}"


SECTIONS: dict[str, Callable[[], list[Claim]]] = {
    "linear": linear_claims,
    "experts": expert_claims,
    "decode": decode_claims,
    "layers": layer_claims,
    "recipe": recipe_claims,
}


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    for name in sys.argv[1:] or [*SECTIONS, "tiles"]:
        if name == "tiles":
            for line in tile_lines():
                print(line, flush=True)
        else:
            print_claims(SECTIONS[name]())


if __name__ == "__main__":
    main()
