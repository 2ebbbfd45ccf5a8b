"""The fast kernels on one GPU, each against its floor and against PyTorch in the same run.

    python -m benchmarks.kernels [SECTION ...] [--json FILE]

Prints a line as each figure is taken, a table at the end and, with --json, a JSON line per figure.
Needs torch, triton and paddock, `module` also transformers. Arms take turns, device events time
them, medians are reported; a section that fails says so and the next one runs.
"""

import argparse
import importlib
import json
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from benchmarks.table import Claim

# Each section is a module here with `figures() -> Iterator[Figure]`.
SECTIONS = {
    "scores": "benchmarks.kernels_scores",
    "topk": "benchmarks.kernels_topk",
    "attention": "benchmarks.kernels_attention",
    "module": "benchmarks.kernels_module",
    "decode": "benchmarks.kernels_decode",
    "grouped": "benchmarks.kernels_grouped",
    "prepare": "benchmarks.kernels_prepare",
    "moe": "benchmarks.kernels_moe",
    "muon": "benchmarks.kernels_muon",
    "kl": "benchmarks.kernels_index_kl",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One thing measured: how long it took, how much it did in that time, and beside what."""

    section: str
    name: str
    ms: float
    rate: float  # in `unit`
    unit: str  # TFLOP/s, TB/s
    floor_ms: float | None = None  # what the chip's measured ceiling would take
    peer: str = ""
    peer_ms: float | None = None
    target: str = ""
    holds: bool | None = None  # None: reported, not claimed

    @property
    def ratio(self) -> float | None:
        return None if self.peer_ms is None else self.peer_ms / self.ms

    def cells(self) -> list[str]:
        share = "" if self.floor_ms is None else f"{self.floor_ms / self.ms:.0%}"
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}x {self.peer}"
        verdict = {None: "", True: "holds", False: "misses"}[self.holds]
        rate = f"{self.rate:.3g} {self.unit}"
        return [self.section, self.name, f"{self.ms:.3f}", rate, share, ratio, self.target, verdict]


AHEAD_CYCLES = 1_000_000  # half a millisecond
HEADER = ["section", "figure", "ms", "rate", "of floor", "against", "target", ""]


def medians(
    arms: Sequence[Callable[[], object]], *, repeats: int = 7, warm: int = 2
) -> list[float]:
    """Median milliseconds of each arm on the device; they take turns, so that clocks and heat treat
    all alike. The device is kept busy while a call is prepared: the host's speed does not count."""
    for arm in arms:
        for _ in range(warm):
            arm()
    times: list[list[float]] = [[] for _ in arms]
    for _ in range(repeats):
        for arm, taken in zip(arms, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(AHEAD_CYCLES)
            begin.record()
            arm()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end))
    return [statistics.median(taken) for taken in times]


def copy_rate() -> float:
    """Bytes a second, read and written, of a device copy: the ceiling of what moves bytes."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    (ms,) = medians([lambda: target.copy_(source)])
    return 2 * source.numel() / ms * 1e3


def matmul_rate() -> float:
    """Bfloat16 operations a second of a large product: the ceiling of what multiplies."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    (ms,) = medians([lambda: a @ b])
    return 2 * 8192**3 / ms * 1e3


def at_least(figure: Figure, *, ratio: float | None = None, rate: float | None = None) -> Figure:
    """The same figure with a claim: a ratio against its peer, or a rate."""
    if ratio is not None:
        assert figure.ratio is not None
        return replace(figure, target=f">= {ratio:g}x", holds=figure.ratio >= ratio)
    assert rate is not None
    return replace(figure, target=f">= {rate:g} {figure.unit}", holds=figure.rate >= rate)


def measure(sections: Sequence[str]) -> Iterator[Figure]:
    """Figures as they are taken. A section that breaks is reported, and the next one runs."""
    for name in sections:
        try:
            module = importlib.import_module(SECTIONS[name])
            for figure in module.figures():
                print("  ".join(cell for cell in figure.cells() if cell), flush=True)
                yield figure
        except Exception:
            print(f"section {name} broke off:", flush=True)
            traceback.print_exc(file=sys.stdout)
        torch.cuda.empty_cache()


def print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def claims() -> "list[Claim]":
    """For benchmarks.prove."""
    from benchmarks.table import Claim

    if not torch.cuda.is_available():
        return [Claim(name="fast kernels", target="see benchmarks.kernels", measured="needs a GPU")]
    return [
        Claim(
            name=f"{figure.section}: {figure.name}",
            target=figure.target,
            measured=" ".join(cell for cell in figure.cells()[2:6] if cell) + " (ms, rate, floor)",
            holds=figure.holds,
        )
        for figure in measure([*SECTIONS])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", help=f"default: all of {', '.join(SECTIONS)}")
    parser.add_argument("--json", type=Path, help="also write a JSON line per figure")
    options = parser.parse_args()
    unknown = set(options.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    import triton

    where = torch.cuda.get_device_name()
    print(f"{where}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    found = list(measure(options.sections or [*SECTIONS]))
    if options.json:
        lines = [json.dumps(asdict(figure) | {"device": where}) for figure in found]
        options.json.write_text("".join(f"{line}\n" for line in lines))
    print()
    print_table([HEADER, *(figure.cells() for figure in found)])
    sys.exit(any(figure.holds is False for figure in found))


if __name__ == "__main__":
    main()
