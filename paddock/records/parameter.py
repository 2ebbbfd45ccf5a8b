"""Parameter roles: what an optimizer must know about a parameter without knowing the model."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

ParameterKind = Literal["matrix", "vector", "embedding", "head", "router"]
ModelPart = Literal["main", "indexer", "mtp", "mtp_indexer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonSplit:
    """Muon Split: row blocks of a matrix that Muon orthogonalizes separately.

    One block per entry of `rows`, repeated `heads` times.

    >>> kv_up = MuonSplit(heads=64, rows=(192, 256))  # each head's keys, then its values
    >>> gate_and_up = MuonSplit(rows=(2048, 2048))
    >>> kv_up.num_rows
    28672
    """

    rows: tuple[int, ...]
    heads: int = 1

    def __post_init__(self) -> None:
        if self.heads < 1 or not self.rows or min(self.rows) < 1:
            raise ValueError(f"a split needs at least one head and one row per block, got {self}")

    @property
    def num_rows(self) -> int:
        return self.heads * sum(self.rows)


@dataclass(frozen=True, slots=True)
class ParameterRole:
    """What a parameter is, as far as an optimizer cares.

    matrix     a linear map, or a stack of them [E, rows, columns], each a matrix of its own
    vector     norms, biases and everything else that is not a linear map
    embedding  the token embedding
    head       the output head
    router     the MoE router

    A matrix without a split is orthogonalized as a whole.
    """

    kind: ParameterKind
    split: MuonSplit | None = None
    part: ModelPart = "main"  # what a stage may train alone or freeze
    keep_fp32: bool = False  # not rounded to a smaller dtype: it decides a ranking

    def __post_init__(self) -> None:
        if self.kind not in get_args(ParameterKind):
            raise ValueError(
                f"kind: must be one of {', '.join(get_args(ParameterKind))}, got {self.kind!r}"
            )
        if self.split is not None and self.kind != "matrix":
            raise ValueError(f"split: only allowed for kind 'matrix', got {self.kind!r}")


class NamedParameter(NamedTuple):
    """A parameter with its name and role, as its model declares it."""

    name: str
    parameter: Any  # a tensor; this package does not import torch
    role: ParameterRole
