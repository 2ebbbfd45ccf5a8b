"""Result table of the benchmarks: a claim, its target, the measurement, whether it holds."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    name: str
    target: str = ""  # empty: reported only, no target
    measured: str
    holds: bool | None = None  # None: no target, or not measurable on this machine

    @property
    def verdict(self) -> str:
        if self.holds is None:
            return ""
        return "holds" if self.holds else "misses"


def speedup(name: str, ours: float, theirs: float, *, min_ratio: float | None, unit: str) -> Claim:
    """How many times better than a baseline that was measured in the same run."""
    ratio = theirs / ours
    return Claim(
        name=name,
        target="" if min_ratio is None else f">= {min_ratio:g}x",
        measured=f"{ratio:.2f}x ({ours:.1f} against {theirs:.1f} {unit})",
        holds=None if min_ratio is None else ratio >= min_ratio,
    )


def print_claims(claims: Sequence[Claim]) -> None:
    table = Table("claim", "target", "measured", "result")
    for claim in claims:
        table.add_row(claim.name, claim.target, claim.measured, claim.verdict)
    Console(width=120).print(table)
