"""Recurrent and chunked forms of the gated delta rule.

T tokens, H heads, K key dim, V value dim; T is split into N chunks of C tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from paddock.kernels.precision import opmath_dtype


def recurrent_gated_delta_rule(
    query_THK: Tensor,
    key_THK: Tensor,
    value_THV: Tensor,
    log_alpha_TH: Tensor,
    beta_TH: Tensor,
    initial_state_HKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    state_HKV = _initial_state(key_THK, value_THV, initial_state_HKV)
    operands = (query_THK, key_THK, value_THV, log_alpha_TH, beta_TH)
    query_THK, key_THK, wide_THV, log_alpha_TH, beta_TH = (x.to(state_HKV.dtype) for x in operands)
    out = []
    for t in range(len(key_THK)):
        state_HKV = log_alpha_TH[t, :, None, None].exp() * state_HKV
        recalled_HV = torch.einsum("hk,hkv->hv", key_THK[t], state_HKV)
        correction_HV = beta_TH[t, :, None] * (wide_THV[t] - recalled_HV)
        state_HKV = state_HKV + key_THK[t, :, :, None] * correction_HV[:, None, :]
        out.append(torch.einsum("hk,hkv->hv", query_THK[t], state_HKV))
    return torch.stack(out).to(value_THV.dtype), state_HKV


def chunk_gated_delta_rule(  # noqa: PLR0913  the recurrence has six operands
    query_THK: Tensor,
    key_THK: Tensor,
    value_THV: Tensor,
    log_alpha_TH: Tensor,
    beta_TH: Tensor,
    initial_state_HKV: Tensor | None = None,
    *,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """The WY form. Write S_i = alpha_i S_{i-1} + k_i u_i^T: a step adds one row u_i, which is

        u_i = beta_i (v_i - e^{g_i} S_0^T k_i - sum_{j<i} e^{g_i - g_j} (k_i . k_j) u_j)

    with S_0 the state before the chunk and g the running sum of log alpha in it. All u of a chunk
    are one unit triangular system. Its solution is affine in S_0, so all chunks are solved at once
    and only the products with S_0 remain in the loop.
    """
    state_HKV = _initial_state(key_THK, value_THV, initial_state_HKV)
    T, chunk = len(key_THK), min(chunk, len(key_THK))
    operands = (query_THK, key_THK, value_THV, log_alpha_TH[..., None], beta_TH[..., None])
    query_NHCK, key_NHCK, value_NHCV, log_alpha_NHC1, beta_NHC1 = (
        _to_chunks(x.to(state_HKV.dtype), chunk) for x in operands
    )
    g_NHC1 = log_alpha_NHC1.cumsum(dim=-2)
    decay_NHCC = _decay_between(g_NHC1)
    reach_NHC1 = g_NHC1.exp()  # how much of S_0 is left
    rest_NHC1 = (g_NHC1[..., -1:, :] - g_NHC1).exp()  # how much of u_i is left at the end

    # A solve, not the series of powers that inverts a unit triangle by products alone: equal keys
    # make those powers as large as binomials, which then must cancel.
    system_NHCC = beta_NHC1 * (key_NHCK @ key_NHCK.mT) * decay_NHCC
    rhs_NHCX = torch.cat((beta_NHC1 * value_NHCV, beta_NHC1 * reach_NHC1 * key_NHCK), dim=-1)
    solved_NHCX = torch.linalg.solve_triangular(
        system_NHCC, rhs_NHCX, upper=False, unitriangular=True
    )
    fresh_NHCV, recall_NHCK = solved_NHCX.split((value_THV.size(-1), key_THK.size(-1)), dim=-1)

    seen_NHCC = (query_NHCK @ key_NHCK.mT) * decay_NHCC
    query_NHCK, key_NHCK = query_NHCK * reach_NHC1, key_NHCK * rest_NHC1
    out = []
    for n in range(len(key_NHCK)):
        u_HCV = fresh_NHCV[n] - recall_NHCK[n] @ state_HKV
        out.append(query_NHCK[n] @ state_HKV + seen_NHCC[n] @ u_HCV)
        state_HKV = reach_NHC1[n, :, -1:] * state_HKV + key_NHCK[n].mT @ u_HCV
    out_THV = torch.stack(out).transpose(1, 2).flatten(0, 1)[:T]
    return out_THV.to(value_THV.dtype), state_HKV


def _initial_state(key_THK: Tensor, value_THV: Tensor, initial_state_HKV: Tensor | None) -> Tensor:
    dtype = opmath_dtype(value_THV.dtype)
    if initial_state_HKV is not None:
        return initial_state_HKV.to(dtype)
    return value_THV.new_zeros(*key_THK.shape[1:], value_THV.size(-1), dtype=dtype)


def _to_chunks(x_THX: Tensor, chunk: int) -> Tensor:
    """[T, H, X] -> [N, H, C, X], zero-padded: beta = log alpha = 0 changes no state."""
    padding = -len(x_THX) % chunk
    return F.pad(x_THX, (0, 0, 0, 0, 0, padding)).unflatten(0, (-1, chunk)).transpose(1, 2)


def _decay_between(g_NHC1: Tensor) -> Tensor:
    """e^{g_i - g_j} for j <= i, else 0. Masked before exp, which would overflow for j > i."""
    later = torch.ones(g_NHC1.size(-2), g_NHC1.size(-2), device=g_NHC1.device).triu(1).bool()
    return (g_NHC1 - g_NHC1.mT).masked_fill(later, -torch.inf).exp()
