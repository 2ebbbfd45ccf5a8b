"""How raw products are prepared on a GPU, and for how many tokens.

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

MOST_TOKENS = 128  # beyond them head weights are better made by a product of whole tiles
WIDEST = 16_384
# Tokens and columns that a program of head weights holds at once. Constants, not the tokens there
# are, so that a token's sums are added in the same order whoever stands beside it.
WEIGHT_TOKENS, WEIGHT_COLUMNS = 4, 1024


def suits(x_TE: Tensor, *parameters: Tensor) -> bool:
    """Whether these hidden states are few halves on a GPU, and nobody wants gradients of them."""
    return (
        x_TE.is_cuda
        and not torch.is_grad_enabled()
        and x_TE.ndim == 2
        and 0 < len(x_TE) <= MOST_TOKENS
        and takes(x_TE, *parameters)
    )


def takes(*tensors: Tensor) -> bool:
    """Halves of one kind on the current GPU, in rows that a program can hold."""
    return (
        can_use_kernel("mla_prepare", *tensors)
        and all(x.dtype == tensors[0].dtype for x in tensors)
        and all(0 < x.shape[-1] <= WIDEST for x in tensors)
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
    _refuse_scattered(latent.raw_TQ, row.raw_TC)
    assert angles.cos_TP.is_contiguous() and angles.sin_TP.is_contiguous()
    assert row.stored_SC.is_contiguous() and row.stored_SC.shape[1] == row.raw_TC.shape[1]
    latent_TQ = latent.raw_TQ.new_empty(T, Q)
    keys: tuple[Tensor | None, ...] = (None, None, None, None)
    if key is not None:
        _refuse_scattered(key.raw_TD)
        assert key.stored_SD.is_contiguous() and key.stored_SD.shape[1] == D >= 2 * P
        keys = (key.raw_TD, key.weight_D, key.bias_D, key.stored_SD)
    kernels.store_latents[(T, 2 if key is None else 3)](
        latent.raw_TQ, latent.weight_Q, latent_TQ, row.raw_TC, row.weight_L, row.stored_SC, *keys,
        angles.cos_TP, angles.sin_TP, slot_T, latent.eps, row.eps, 0.0 if key is None else key.eps,
        latent.raw_TQ.stride(0), row.raw_TC.stride(0), 0 if key is None else key.raw_TD.stride(0),
        Q=Q, L=L, P=P, D=D, BQ=_power(Q), BL=_power(L), BP=_power(P), BREST=_power(D - 2 * P),
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
    _refuse_scattered(raw_THD)
    assert angles.cos_TP.is_contiguous() and angles.sin_TP.is_contiguous()
    assert absorbed_THC.is_contiguous()
    made = None if index is None else _room(index)
    asked: tuple[Tensor | None, ...] = (None,) * 5
    IH = ID = E = 1
    if index is not None:
        (_, IH, ID), E = index.raw_THD.shape, index.x_TE.shape[1]
        _refuse_scattered(index.raw_THD, index.x_TE)
        assert made is not None and index.weight_HE.is_contiguous() and 2 * P <= ID
        asked = (index.raw_THD, made[0], index.x_TE, index.weight_HE, made[1])
    programs = T if index is None else 2 * T + IH * -(-T // WEIGHT_TOKENS)
    kernels.turn_queries[(programs,)](
        raw_THD, absorbed_THC, *asked, angles.cos_TP, angles.sin_TP,
        0.0 if index is None else index.scale, T, raw_THD.stride(0),
        *((0, 0) if index is None else (index.raw_THD.stride(0), index.x_TE.stride(0))),
        H=H, D=D, C=absorbed_THC.shape[2], P=P, IH=IH, ID=ID, E=E,
        BH=_power(H), BIH=_power(IH), BP=_power(P), BREST=_power(ID - 2 * P),
        BT=WEIGHT_TOKENS, BE=min(WEIGHT_COLUMNS, _power(E)),
        INTERLEAVED=queries.interleaved,
        INDEX_INTERLEAVED=index is not None and index.interleaved,
    )  # fmt: skip
    return made


def _room(index: IndexQueryInput) -> tuple[Tensor, Tensor]:
    """For rotated index queries, and for the weights of their heads."""
    T, H, D = index.raw_THD.shape
    query_THD = index.raw_THD.new_empty(T, H, D)
    return query_THD, index.raw_THD.new_empty(T, H, dtype=torch.float32)


def _refuse_scattered(*tensors: Tensor) -> None:
    for x in tensors:
        # Columns of something wider may be; heads and the numbers of a head lie side by side.
        assert x[:1].is_contiguous(), f"rows of {tuple(x.shape)} with strides {x.stride()}"


def _power(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
