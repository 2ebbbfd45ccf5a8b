"""Arguments of the fused MLA decode kernels: raw projections with their norms and storage.

Raw products may be columns of something wider; numbers of a row lie side by side. T tokens, Q query
latent, L latent and C = L + 2 P row width, D index dims or dims of a query head, H heads, P rotated
pairs, S rows of storage, E hidden.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RotaryCosSin:
    """Of every token, in float32."""

    cos_TP: Tensor
    sin_TP: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class QueryLatentInput:
    """Of the queries."""

    raw_TQ: Tensor
    weight_Q: Tensor
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class KVLatentInput:
    """The latent of keys and values and, behind it, the key that all heads share."""

    raw_TC: Tensor
    weight_L: Tensor
    eps: float
    interleaved: bool
    stored_SC: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class IndexKeyInput:
    """Of the indexer."""

    raw_TD: Tensor
    weight_D: Tensor
    bias_D: Tensor
    eps: float
    interleaved: bool
    stored_SD: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class QueryRopeInput:
    """Their last 2 P dims are rotated into the last 2 P columns of `absorbed_THC`."""

    raw_THD: Tensor
    interleaved: bool
    absorbed_THC: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class IndexQueryInput:
    """And what the heads' weights are made of: scale * weight_HE x_TE."""

    raw_THD: Tensor
    interleaved: bool
    x_TE: Tensor
    weight_HE: Tensor
    scale: float
