"""Arguments of the fused MLA decode kernels: raw projections with their norms and storage.

Raw projections may be columns of a wider tensor; rows must be contiguous. T tokens, Q query
latent, L latent and C = L + 2 P row width, D index dims or dims of a query head, H heads, P rotated
pairs, S rows of storage, E hidden.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RotaryCosSin:
    """cos and sin of every token's angles, in float32."""

    cos_TP: Tensor
    sin_TP: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class QueryLatentInput:
    """Query latent before RMSNorm."""

    raw_TQ: Tensor
    weight_Q: Tensor
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class KVLatentInput:
    """KV latent before RMSNorm, followed by the rope key shared by all heads."""

    raw_TC: Tensor
    weight_L: Tensor
    eps: float
    interleaved: bool
    stored_SC: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class IndexKeyInput:
    """Index key before LayerNorm and RoPE."""

    raw_TD: Tensor
    weight_D: Tensor
    bias_D: Tensor
    eps: float
    interleaved: bool
    stored_SD: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class QueryRopeInput:
    """Queries whose last 2 P dims are rotated into the last 2 P columns of `absorbed_THC`."""

    raw_THD: Tensor
    interleaved: bool
    absorbed_THC: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class IndexQueryInput:
    """Index queries, and the inputs of their head weights: scale * weight_HE x_TE."""

    raw_THD: Tensor
    interleaved: bool
    x_TE: Tensor
    weight_HE: Tensor
    scale: float
