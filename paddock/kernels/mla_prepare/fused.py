"""Dispatch of the fused norm, RoPE and KV cache write kernels.

T tokens, Q query latent, L latent and C row width, P pairs, D dims of a head, H heads, S rows of
storage, E hidden.
"""

import torch
from torch import Tensor

from paddock.kernels.dispatch import can_use_kernel

from .inputs import (
    IndexKeyInput,
    IndexQueryInput,
    KVLatentInput,
    QueryLatentInput,
    QueryRopeInput,
    RotaryCosSin,
)

MAX_TOKENS = 128  # above this a GEMM computes the head weights faster
MAX_WIDTH = 16_384
# Tokens and columns per program of head weights. Constants, independent of the batch, so that the
# sums of a token are added in the same order whatever else is in the batch.
WEIGHT_TOKENS, WEIGHT_COLUMNS = 4, 1024


def suits(x_TE: Tensor, *parameters: Tensor) -> bool:
    """Whether these are few tokens in half precision on a GPU, and no gradients are needed."""
    return (
        x_TE.is_cuda
        and not torch.is_grad_enabled()
        and x_TE.ndim == 2
        and 0 < len(x_TE) <= MAX_TOKENS
        and takes(x_TE, *parameters)
    )


def takes(*tensors: Tensor) -> bool:
    """Half precision of one dtype on the current GPU, rows that fit in one program."""
    return (
        can_use_kernel("mla_prepare", *tensors)
        and all(x.dtype == tensors[0].dtype for x in tensors)
        and all(0 < x.shape[-1] <= MAX_WIDTH for x in tensors)
    )


def norm_rope_and_cache(
    latent: QueryLatentInput,
    row: KVLatentInput,
    key: IndexKeyInput | None,
    angles: RotaryCosSin,
    slot_T: Tensor,
) -> Tensor:
    from paddock.kernels.mla_prepare import triton as kernels

    (T, Q), L, P = latent.raw_TQ.shape, len(row.weight_L), angles.cos_TP.shape[1]
    D = 2 * P if key is None else len(key.weight_D)
    _check_rows_contiguous(latent.raw_TQ, row.raw_TC)
    assert angles.cos_TP.is_contiguous() and angles.sin_TP.is_contiguous()
    assert row.stored_SC.is_contiguous() and row.stored_SC.shape[1] == row.raw_TC.shape[1]
    latent_TQ = latent.raw_TQ.new_empty(T, Q)
    keys: tuple[Tensor | None, ...] = (None, None, None, None)
    if key is not None:
        _check_rows_contiguous(key.raw_TD)
        assert key.stored_SD.is_contiguous() and key.stored_SD.shape[1] == D >= 2 * P
        keys = (key.raw_TD, key.weight_D, key.bias_D, key.stored_SD)
    kernels.store_latents[(T, 2 if key is None else 3)](
        latent.raw_TQ, latent.weight_Q, latent_TQ, row.raw_TC, row.weight_L, row.stored_SC, *keys,
        angles.cos_TP, angles.sin_TP, slot_T, latent.eps, row.eps, 0.0 if key is None else key.eps,
        latent.raw_TQ.stride(0), row.raw_TC.stride(0), 0 if key is None else key.raw_TD.stride(0),
        Q=Q, L=L, P=P, D=D, BQ=_next_power_of_2(Q), BL=_next_power_of_2(L),
        BP=_next_power_of_2(P), BREST=_next_power_of_2(D - 2 * P),
        ROW_INTERLEAVED=row.interleaved, KEY_INTERLEAVED=key is not None and key.interleaved,
        num_warps=4 if Q <= 4096 else 8,
    )  # fmt: skip
    return latent_TQ


def rotate_queries(
    queries: QueryRopeInput, angles: RotaryCosSin, index: IndexQueryInput | None
) -> tuple[Tensor, Tensor] | None:
    from paddock.kernels.mla_prepare import triton as kernels

    raw_THD, absorbed_THC = queries.raw_THD, queries.absorbed_THC
    (T, H, D), P = raw_THD.shape, angles.cos_TP.shape[1]
    _check_rows_contiguous(raw_THD)
    assert angles.cos_TP.is_contiguous() and angles.sin_TP.is_contiguous()
    assert absorbed_THC.is_contiguous()
    outputs = None if index is None else _allocate_index_outputs(index)
    index_args: tuple[Tensor | None, ...] = (None,) * 5
    IH = ID = E = 1
    if index is not None:
        (_, IH, ID), E = index.raw_THD.shape, index.x_TE.shape[1]
        _check_rows_contiguous(index.raw_THD, index.x_TE)
        assert outputs is not None and index.weight_HE.is_contiguous() and 2 * P <= ID
        index_args = (index.raw_THD, outputs[0], index.x_TE, index.weight_HE, outputs[1])
    programs = T if index is None else 2 * T + IH * -(-T // WEIGHT_TOKENS)
    kernels.turn_queries[(programs,)](
        raw_THD, absorbed_THC, *index_args, angles.cos_TP, angles.sin_TP,
        0.0 if index is None else index.scale, T, raw_THD.stride(0),
        *((0, 0) if index is None else (index.raw_THD.stride(0), index.x_TE.stride(0))),
        H=H, D=D, C=absorbed_THC.shape[2], P=P, IH=IH, ID=ID, E=E,
        BH=_next_power_of_2(H), BIH=_next_power_of_2(IH), BP=_next_power_of_2(P),
        BREST=_next_power_of_2(ID - 2 * P),
        BT=WEIGHT_TOKENS, BE=min(WEIGHT_COLUMNS, _next_power_of_2(E)),
        INTERLEAVED=queries.interleaved,
        INDEX_INTERLEAVED=index is not None and index.interleaved,
    )  # fmt: skip
    return outputs


def _allocate_index_outputs(index: IndexQueryInput) -> tuple[Tensor, Tensor]:
    """Buffers for rotated index queries and for the weights of their heads."""
    T, H, D = index.raw_THD.shape
    query_THD = index.raw_THD.new_empty(T, H, D)
    return query_THD, index.raw_THD.new_empty(T, H, dtype=torch.float32)


def _check_rows_contiguous(*tensors: Tensor) -> None:
    for x in tensors:
        # Rows may be columns of a wider tensor; heads and head dims must be contiguous.
        assert x[:1].is_contiguous(), f"rows of {tuple(x.shape)} with strides {x.stride()}"


def _next_power_of_2(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
