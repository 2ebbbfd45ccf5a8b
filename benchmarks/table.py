"""What a benchmark says: a claim, its target, what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """`ratio` says how many times better than the peer we are; None where it could not be run."""

    name: str
    target: float | None = None  # the least ratio that holds; None: reported, not claimed
    ratio: float | None
    detail: str = ""

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return "not run"
        if self.target is None:
            return ""
        return "holds" if self.ratio >= self.target else "misses"


def print_claims(claims: Sequence[Claim], *, against: str) -> None:
    table = Table("claim", f"target (x {against})", "measured", "", "detail")
    for claim in claims:
        table.add_row(
            claim.name,
            "" if claim.target is None else f">= {claim.target:g}",
            "" if claim.ratio is None else f"{claim.ratio:.2f}",
            claim.verdict,
            claim.detail,
        )
    Console(width=110).print(table)
