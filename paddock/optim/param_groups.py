"""Optimizer options of each kind of parameter, and the row blocks of a parameter."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import get_args

from paddock.records import ParameterRole, parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamGroupOptions:
    """Learning-rate scale and weight decay of one kind of parameter."""

    lr_scale: float = 1.0
    apply_weight_decay: bool = True


# Vectors are norm gains and biases: weight decay would pull them towards zero.
PARAM_GROUP_OPTIONS: Mapping[str, ParamGroupOptions] = MappingProxyType(
    {
        kind: ParamGroupOptions(apply_weight_decay=kind != "vector")
        for kind in get_args(parameter.ParameterKind)
    }
)


def block_rows(role: ParameterRole, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Heights of the row blocks, repeated, that a parameter of this shape is split into.

    >>> from paddock.records.parameter import MuonSplit
    >>> block_rows(ParameterRole("matrix", MuonSplit(heads=64, rows=(192, 256))), (28672, 512))
    (192, 256)
    >>> block_rows(ParameterRole("matrix"), (256, 6144, 2048))
    (6144,)
    >>> block_rows(ParameterRole("matrix", MuonSplit(heads=3, rows=(4,))), (16, 8))
    Traceback (most recent call last):
    ValueError: 3 times (4,) is 12 rows, but the shape is (16, 8)
    """
    if len(shape) not in (2, 3):
        raise ValueError(f"expected a matrix or a stack of matrices, got shape {shape}")
    if role.split is None:
        return (shape[-2],)
    rows, heads = role.split.rows, role.split.heads
    if role.split.num_rows != shape[-2]:
        raise ValueError(
            f"{heads} times {rows} is {role.split.num_rows} rows, but the shape is {shape}"
        )
    return rows
