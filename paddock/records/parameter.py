"""What a model says about a parameter, and an optimizer acts on without knowing the model."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

ParameterKind = Literal["matrix", "vector", "embedding", "head", "router"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonSplit:
    """Rows of a matrix that Muon orthogonalizes apart: a block per entry of `rows`, `heads` times.

    >>> kv_up = MuonSplit(heads=64, rows=(192, 256))  # each head's keys, then its values
    >>> gate_and_up = MuonSplit(rows=(2048, 2048))
    >>> kv_up.num_rows
    28672
    """

    rows: tuple[int, ...]
    heads: int = 1

    def __post_init__(self) -> None:
        if self.heads < 1 or not self.rows or min(self.rows) < 1:
            raise ValueError(f"a split needs at least one head and one row a block: {self}")

    @property
    def num_rows(self) -> int:
        return self.heads * sum(self.rows)


@dataclass(frozen=True, slots=True)
class ParameterRole:
    """What a parameter is for: a linear map (or a stack of them, [E, rows, columns], each a matrix
    of its own), a vector (norms, biases and whatever else is not a map), the token embedding,
    the output head, or the router. A matrix without a split is orthogonalized whole."""

    kind: ParameterKind
    split: MuonSplit | None = None
    part: str = ""  # "indexer", "mtp" or "": what a stage may train alone or freeze

    def __post_init__(self) -> None:
        if self.kind not in get_args(ParameterKind):
            raise ValueError(
                f"no parameter is a {self.kind!r}; there are {get_args(ParameterKind)}"
            )
        if self.split is not None and self.kind != "matrix":
            raise ValueError(f"only a matrix can be split, not a {self.kind}")


class NamedParameter(NamedTuple):
    """A parameter as its model declares it."""

    name: str
    parameter: Any  # a tensor; this room knows no torch
    role: ParameterRole
