"""Reference of the fused MLA decode operations, one after the other.

T tokens, Q query latent, L latent and C row width, R = 2 P rotated dims, D dims of a head, H heads,
S rows of storage.
"""

import torch
from torch import Tensor

from paddock.kernels.linear_fp32 import linear_fp32
from paddock.kernels.norm import layer_norm, rms_norm
from paddock.kernels.rope import rope_halves, rope_interleaved

from .inputs import (
    IndexKeyInput,
    IndexQueryInput,
    KVLatentInput,
    QueryLatentInput,
    QueryRopeInput,
    RotaryCosSin,
)


def norm_rope_and_cache(
    latent: QueryLatentInput,
    row: KVLatentInput,
    key: IndexKeyInput | None,
    angles: RotaryCosSin,
    slot_T: Tensor,
) -> Tensor:
    rope = 2 * angles.cos_TP.shape[1]
    latent_TL, key_TR = row.raw_TC.split((len(row.weight_L), rope), -1)
    key_TR = _rotated(key_TR.unsqueeze(1), angles, row.interleaved).squeeze(1)
    row_TC = torch.cat((rms_norm(latent_TL, row.weight_L, row.eps), key_TR), dim=-1)
    row.stored_SC.index_copy_(0, slot_T, row_TC)
    if key is not None:
        key_TD = layer_norm(key.raw_TD, key.weight_D, key.bias_D, key.eps)
        key_TD = _rotated(key_TD.unsqueeze(1), angles, key.interleaved).squeeze(1)
        key.stored_SD.index_copy_(0, slot_T, key_TD)
    return rms_norm(latent.raw_TQ, latent.weight_Q, latent.eps)


def rotate_queries(
    queries: QueryRopeInput, angles: RotaryCosSin, index: IndexQueryInput | None
) -> tuple[Tensor, Tensor] | None:
    rope = 2 * angles.cos_TP.shape[1]
    rope_THR = _rotated(queries.raw_THD[..., -rope:], angles, queries.interleaved)
    queries.absorbed_THC[..., -rope:] = rope_THR
    if index is None:
        return None
    query_THD = _rotated(index.raw_THD, angles, index.interleaved)
    return query_THD, linear_fp32(index.x_TE, index.weight_HE) * index.scale


def _rotated(x_THD: Tensor, angles: RotaryCosSin, interleaved: bool) -> Tensor:
    rotate = rope_interleaved if interleaved else rope_halves
    return rotate(x_THD, angles.cos_TP, angles.sin_TP)
