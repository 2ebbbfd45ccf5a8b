"""What an optimizer wants to be told about a parameter, and how it treats each kind.

An optimizer reads the protocols here, so that a model need not import this room to declare
itself; the records are ready-made declarations for whoever may.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol, get_args

from torch import Tensor

Kind = Literal["matrix", "vector", "embedding", "head", "router"]


class SplitLike(Protocol):
    @property
    def rows(self) -> tuple[int, ...]: ...
    @property
    def heads(self) -> int: ...


class RoleLike(Protocol):
    @property
    def kind(self) -> str: ...
    @property
    def split(self) -> SplitLike | None: ...


class Declared(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def parameter(self) -> Tensor: ...
    @property
    def role(self) -> RoleLike: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Rows that Muon orthogonalizes apart: a block per entry of `rows`, all of that `heads` times.

    >>> keys_and_values = Split(heads=64, rows=(192, 256))
    >>> gate_and_up = Split(rows=(2048, 2048))
    """

    rows: tuple[int, ...]
    heads: int = 1


@dataclass(frozen=True, slots=True)
class Role:
    """What a parameter is for.

    matrix     a linear map [rows, columns], or a stack [E, rows, columns] of maps, each its own
    vector     norms, biases and whatever else is not a map
    embedding, head, router   maps that are customarily stepped otherwise than the rest
    """

    kind: Kind
    split: Split | None = None  # None: orthogonalized whole


@dataclass(frozen=True, slots=True, eq=False)
class NamedRole:
    name: str
    parameter: Tensor
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How the steps of one kind differ from those of the rest."""

    lr_scale: float = 1.0
    decays: bool = True


# Decay keeps a map from outgrowing its steps. A gain has a right size, and it is not zero.
RULES: Mapping[str, Rule] = MappingProxyType(
    {kind: Rule(decays=kind != "vector") for kind in get_args(Kind)}
)


def block_rows(role: RoleLike, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The heights whose repetition makes up the rows of a parameter of this shape.

    >>> block_rows(Role("matrix", Split(heads=64, rows=(192, 256))), (28672, 512))
    (192, 256)
    >>> block_rows(Role("matrix"), (256, 6144, 2048))
    (6144,)
    >>> block_rows(Role("matrix", Split(heads=3, rows=(4,))), (16, 8))
    Traceback (most recent call last):
    ValueError: 3 times (4,) is 12 rows, but the shape is (16, 8)
    """
    if len(shape) not in (2, 3):
        raise ValueError(f"neither a matrix nor a stack of matrices: the shape is {shape}")
    if role.split is None:
        return (shape[-2],)
    rows, heads = role.split.rows, role.split.heads
    if heads * sum(rows) != shape[-2] or min(rows) < 1:
        raise ValueError(
            f"{heads} times {rows} is {heads * sum(rows)} rows, but the shape is {shape}"
        )
    return rows
