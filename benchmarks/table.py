"""What a proof says: a claim, its target, what was measured, whether it holds."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    name: str
    target: str = ""  # empty: reported, not claimed
    measured: str
    holds: bool | None = None  # None: nothing was claimed, or this machine cannot say

    @property
    def verdict(self) -> str:
        if self.holds is None:
            return ""
        return "holds" if self.holds else "misses"


def times_better(name: str, ours: float, theirs: float, *, least: float | None, unit: str) -> Claim:
    """A ratio against a peer measured in the same run."""
    ratio = theirs / ours
    return Claim(
        name=name,
        target="" if least is None else f">= {least:g}x",
        measured=f"{ratio:.2f}x ({ours:.1f} against {theirs:.1f} {unit})",
        holds=None if least is None else ratio >= least,
    )


def print_claims(claims: Sequence[Claim]) -> None:
    table = Table("claim", "target", "measured", "holds or misses")
    for claim in claims:
        table.add_row(claim.name, claim.target, claim.measured, claim.verdict)
    Console(width=120).print(table)
