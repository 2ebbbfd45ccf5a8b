"""The W4A8 product on one GPU against bfloat16 in the same run; memory and decoding with it.

    python -m benchmarks.quant gpu
    python -m benchmarks.quant_gpu [product|experts|decode|layers|whole|tiles ...]

`decode` and `layers` are in benchmarks.quant_served. `whole` times the whole recipe on the small
preset, part by part. `tiles` times other ways of cutting the product than those that `fused` has in
its tables. Of the others every arm is a graph in which many weights take turns; a row that fails
says so, and the next one runs.
"""

import sys
import time
from collections import Counter
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
TOKENS = (1, 8, 64)  # of 256 experts, 8 of them each
EXPERTS, CHOSEN = 256, 8
TEXT: dict[TextPurpose, int] = {"calibration": 65_536, "validation": 32_768}  # as the command
VOCAB, LENGTHS = 4096, (2048, 700, 300, 1500)
MOST_SECONDS = 60
COPIES_BYTES = 1 << 30  # so many different weights take turns that no cache holds them

# Outputs, rows, columns, slices, warps, stages: what to choose from for at most so many rows. Tiles
# in use are timed too.
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
        return [Claim(name="W4A8 product", target=">= 2.3x up to 64 rows", measured="needs a GPU")]
    return [
        *product_claims(),
        *expert_claims(),
        *decode_claims(),
        *layer_claims(),
        *whole_claims(),
    ]


def product_claims() -> list[Claim]:
    return [_kept(partial(_product_claim, name, rows)) for name in SHAPES for rows in ROWS]


def expert_claims() -> list[Claim]:
    return [_kept(partial(_expert_claim, tokens)) for tokens in TOKENS]


def _kept(call: partial[Claim]) -> Claim:
    """A row, or why there is none: one failure must not lose the others."""
    try:
        claim = call()
    except Exception as error:
        claim = Claim(name=f"W4A8 {call.args}", measured=f"broke off: {error!r:.200}", holds=False)
    print(claim.name, claim.measured, claim.verdict, sep=" | ", flush=True)
    torch.cuda.empty_cache()
    return claim


def _least(rows: int) -> float | None:
    if rows <= 64:
        return 2.3
    return 0.8 if rows == 1024 else None


def _timed(arms: Sequence[Callable[[int], object]], turns: int) -> list[float]:
    """Median microseconds of one call of each arm, captured in a graph: what decoding pays."""
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


def _product_claim(name: str, rows: int) -> Claim:
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
    what = f"W4A8 {name} {F} x {D}, {rows} rows, rounding included, against bfloat16"
    claim = speedup(what, ours, theirs, min_ratio=_least(rows), unit="us")
    return replace(claim, measured=f"{claim.measured}; product alone {alone:.1f}")


def _chosen(tokens: int) -> Tensor:
    """[tokens, CHOSEN] experts, as chance would have it."""
    chance = torch.Generator().manual_seed(0)
    chosen = [torch.randperm(EXPERTS, generator=chance)[:CHOSEN] for _ in range(tokens)]
    return torch.stack(chosen).cuda()


def _routed(tokens: int) -> Tensor:
    """Rows of each expert."""
    return torch.bincount(_chosen(tokens).flatten(), minlength=EXPERTS)


def _stack(outputs: int, inputs: int) -> PackedWeight:
    parts = [weight.integer for weight in _weights(outputs, inputs, EXPERTS)]
    scale = torch.rand(EXPERTS, outputs, 1, device="cuda") * 1e-2
    return PackedWeight(torch.stack(parts), scale, packed=True)


def _expert_claim(tokens: int) -> Claim:
    """All of a layer's routed products, as decoding so many tokens at once meets them, against the
    faster of the two forms that bfloat16 has."""
    from paddock.kernels.fused_experts import triton as few
    from paddock.kernels.fused_experts.fused import MOST_ROWS
    from paddock.kernels.grouped_gemm import grouped_gemm

    F, D = SHAPES["gate and up"]
    counts, x = _routed(tokens), _activations(tokens * CHOSEN, D)
    narrow, rounded = _stack(F, D), quantize_per_token(x)
    wide = torch.randn(EXPERTS, F, D, device="cuda", dtype=torch.bfloat16)
    x_TD, expert_R = _activations(tokens, D), _chosen(tokens).flatten()
    inner_RF = x.new_empty(len(x), F // 2)

    def by_few(_: int) -> None:
        few.gate_and_up(x_TD, wide, few.plan(expert_R, EXPERTS), inner_RF, CHOSEN)

    arms = [
        lambda _: int_grouped_gemm(quantize_per_token(x), narrow, counts, torch.bfloat16),
        lambda _: int_grouped_gemm(rounded, narrow, counts, torch.bfloat16),
        lambda _: grouped_gemm(x, wide, counts),
        *([by_few] if len(x) <= MOST_ROWS else []),
    ]
    ours, alone, *bfloat16 = _timed(arms, 4)
    what = f"W4A8 gate and up of 256 experts, {tokens} tokens of 8, against the faster bfloat16"
    claim = speedup(what, ours, min(bfloat16), min_ratio=2.3, unit="us")
    others = " / ".join(f"{us:.1f}" for us in bfloat16)
    told = f"{claim.measured}; product alone {alone:.1f}; bfloat16 grouped / few {others}"
    return replace(claim, measured=told)


def whole_claims(device: str = "cuda") -> list[Claim]:
    """How long the small preset, newborn, takes to become integers, with the vocabulary of
    recipes/small and random text."""
    spent: Counter[str] = Counter()
    what, since = "opening", 0.0

    def say(moment: QuantizationProgress) -> None:
        nonlocal what, since
        spent[what] += time.perf_counter() - since
        what, since = moment.what.split(": ")[-1], time.perf_counter()

    with TemporaryDirectory() as home:
        source, small = Path(home) / "small", preset("small").model_copy(update={"vocab": VOCAB})
        save_pretrained(Transformer.from_config(small, 0), source, dtype="bfloat16")
        since = time.perf_counter()
        quantize_folder(source, Path(home) / "q", passages=_text(), device=device, on_progress=say)
        say(QuantizationProgress(1, 1, "done"))
    seconds = sum(spent.values())
    parts = ", ".join(f"{what} {took:.1f}" for what, took in spent.items())
    return [
        Claim(
            name=f"seconds to quantize small on {device}",
            target=f"<= {MOST_SECONDS}",
            measured=f"{seconds:.0f} ({parts})",
            holds=seconds <= MOST_SECONDS,
        )
    ]


def _text() -> list[CalibrationText]:
    chance, lengths, made = torch.Generator().manual_seed(0), cycle(LENGTHS), []
    for purpose, tokens in TEXT.items():
        while sum(len(p.ids) for p in made if p.purpose == purpose) < tokens:
            ids = torch.randint(0, VOCAB, (next(lengths),), generator=chance)
            made.append(CalibrationText(ids=tuple(ids.tolist()), purpose=purpose))
    return made


def tile_lines() -> Iterator[str]:
    """A line for each way of cutting each product: microseconds with rounding and alone, and how
    fast the weights came in."""
    for name, (F, D) in SHAPES.items():
        stacks = [weight.as_stack() for weight in _weights(F, D, 24)]
        for rows in ROWS:
            yield f"{name} {F} x {D}, {rows} rows: us with rounding, alone; TB/s of weights; tile"
            work = Cuts(stacks, _activations(rows, D), (rows,))
            tiles = next(tiles for most, tiles in CANDIDATES.items() if rows <= most)
            yield from work.lines(tiles)
    stack = _stack(*SHAPES["gate and up"])
    for tokens in TOKENS:
        yield f"256 experts, {tokens} tokens of 8: us with rounding, alone; TB/s of weights; tile"
        x = _activations(tokens * CHOSEN, stack.inputs)
        yield from Cuts([stack] * 4, x, _routed(tokens)).lines(EXPERT_CANDIDATES)


class Cuts:
    """One product, to be cut in many ways."""

    def __init__(
        self, stacks: Sequence[PackedWeight], x_RD: Tensor, counts_E: tuple[int] | Tensor
    ) -> None:
        self.stacks, self.x_RD, self.counts_E = stacks, x_RD, counts_E
        self.rows = reference.quantize_per_token(x_RD)
        self.exact_RF = reference.int_grouped_gemm(self.rows, stacks[0], counts_E, torch.bfloat16)
        met = 1 if isinstance(counts_E, tuple) else int((counts_E > 0).sum())
        self.weight_bytes = met * stacks[0].integer[0].numel()

    def lines(self, tiles: Sequence[GemmTile]) -> Iterator[str]:
        """Of the tile in use and of these."""
        used = fused.tile_for(len(self.x_RD), self.stacks[0])
        for tile in dict.fromkeys([used, *(tile.fitted(self.stacks[0]) for tile in tiles)]):
            try:
                yield self._line(tile)
            except Exception as error:
                yield f"  broke off: {error!r:.80} {astuple(tile)}"

    def _line(self, tile: GemmTile) -> str:
        def product(rows: QuantizedActivations, turn: int) -> Tensor:
            return fused.multiply(rows, self.stacks[turn], self.counts_E, torch.bfloat16, tile)

        verdict = "" if torch.equal(product(self.rows, 0), self.exact_RF) else ", WRONG"
        arms = (
            lambda turn: product(quantize_per_token(self.x_RD), turn),
            lambda turn: product(self.rows, turn),
        )
        both, alone = _timed(arms, len(self.stacks))
        rate = self.weight_bytes / alone / 1e6
        return f"{both:8.1f} {alone:8.1f} {rate:6.2f}  {astuple(tile)}{verdict}"


SECTIONS: dict[str, Callable[[], list[Claim]]] = {
    "product": product_claims,
    "experts": expert_claims,
    "decode": decode_claims,
    "layers": layer_claims,
    "whole": whole_claims,
}


def main() -> None:
    for name in sys.argv[1:] or [*SECTIONS, "tiles"]:
        if name == "tiles":
            for line in tile_lines():
                print(line, flush=True)
        else:
            print_claims(SECTIONS[name]())


if __name__ == "__main__":
    main()
