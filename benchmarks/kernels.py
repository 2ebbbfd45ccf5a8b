"""Kernels on one GPU, each against its floor and against PyTorch in the same run.

    python -m benchmarks.kernels [SECTION ...] [--json FILE]

Prints a line per figure as it is measured, a table at the end and, with --json, a JSON line per
figure. Section `module` needs transformers. Arms alternate and are timed with device events;
medians are reported. A section that fails is reported and the next one runs.
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
    """One measurement: time, rate, floor and baseline."""

    section: str
    name: str
    ms: float
    rate: float  # in `unit`
    unit: str  # TFLOP/s, TB/s
    floor_ms: float | None = None  # at the device's measured peak rate
    peer: str = ""  # the baseline
    peer_ms: float | None = None
    target: str = ""
    holds: bool | None = None  # None: no target

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
    """Median milliseconds of each arm on the device. The arms alternate, so that clocks and heat
    affect all equally. A sleep kernel hides launch latency: the host's speed does not count."""
    for arm in arms:
        for _ in range(warm):
            arm()
    times: list[list[float]] = [[] for _ in arms]
    for _ in range(repeats):
        for arm, arm_times in zip(arms, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(AHEAD_CYCLES)
            begin.record()
            arm()
            end.record()
            end.synchronize()
            arm_times.append(begin.elapsed_time(end))
    return [statistics.median(each) for each in times]


def copy_rate() -> float:
    """Bytes per second, read and written, of a device copy: the peak rate of memory traffic."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    (ms,) = medians([lambda: target.copy_(source)])
    return 2 * source.numel() / ms * 1e3


def matmul_rate() -> float:
    """FLOP/s of a large bfloat16 matrix product: the peak rate of arithmetic."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    (ms,) = medians([lambda: a @ b])
    return 2 * 8192**3 / ms * 1e3


def at_least(figure: Figure, *, ratio: float | None = None, rate: float | None = None) -> Figure:
    """The same figure with a target: a min ratio against its baseline, or a min rate."""
    if ratio is not None:
        assert figure.ratio is not None
        return replace(figure, target=f">= {ratio:g}x", holds=figure.ratio >= ratio)
    assert rate is not None
    return replace(figure, target=f">= {rate:g} {figure.unit}", holds=figure.rate >= rate)


def measure(sections: Sequence[str]) -> Iterator[Figure]:
    """Yields figures as they are measured. A section that fails is reported; the next one runs."""
    for name in sections:
        try:
            module = importlib.import_module(SECTIONS[name])
            for figure in module.figures():
                print("  ".join(cell for cell in figure.cells() if cell), flush=True)
                yield figure
        except Exception:
            print(f"section {name} failed:", flush=True)
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
        return [Claim(name="kernels", target="see benchmarks.kernels", measured="needs a GPU")]
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
        parser.error(
            f"unknown section {', '.join(sorted(unknown))}; choose from {', '.join(SECTIONS)}"
        )
    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    import triton

    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    found = list(measure(options.sections or [*SECTIONS]))
    if options.json:
        lines = [json.dumps(asdict(figure) | {"device": device}) for figure in found]
        options.json.write_text("".join(f"{line}\n" for line in lines))
    print()
    print_table([HEADER, *(figure.cells() for figure in found)])
    sys.exit(any(figure.holds is False for figure in found))


if __name__ == "__main__":
    main()
