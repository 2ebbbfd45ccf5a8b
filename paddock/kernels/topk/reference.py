"""Reference of deterministic top-k. T queries, S keys, K selected, Q a chunk of T.

In a decode batch: B sequences, Q queries each, N = B * Q, M maximum keys, H heads.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from paddock.kernels.block_table import BlockTable
from paddock.kernels.index_scores.reference import IndexKeys, index_scores
from paddock.kernels.precision import opmath_dtype
from paddock.kernels.spans import Span
from paddock.kernels.workspace import chunks, scratch_bytes

PAD = -1
FEW = 8  # rows processed one by one: a decode step has no more


def topk_indices(score_TS: Tensor, k: int) -> Tensor:
    """Indices of the k best of each row, ascending, int64; of equal scores the lowest index wins.

    No -1 here: the row must have at least k entries, -inf included.
    """
    T, S = score_TS.shape
    if k == S:
        return torch.arange(S, device=score_TS.device).expand(T, S)
    find = _by_partition if score_TS.device.type == "cpu" else _by_topk
    return find(score_TS.detach().float(), k)


def _by_topk(score_TS: Tensor, k: int) -> Tensor:
    """torch.topk of k + 1: if that one alone is the worst, no tie needs a rule."""
    top = score_TS.topk(k + 1, dim=-1, sorted=False)
    worst_TK = top.values == top.values.amin(-1, keepdim=True)
    index_TK = top.indices.masked_fill(worst_TK, score_TS.shape[1]).sort(-1).values[:, :k]
    tied_T = worst_TK.sum(-1) != 1  # none at all where there is a NaN
    if bool(tied_T.any()):
        index_TK[tied_T] = _lowest_of_ties(score_TS[tied_T], k)
    return index_TK


def _by_partition(score_TS: Tensor, k: int) -> Tensor:
    """The same by numpy, whose vectorised selection is several times faster on a CPU."""
    score = score_TS.numpy()
    T, S = score.shape
    upper = np.partition(score, S - k, axis=1)[:, S - k :]
    kept = score >= upper[:, :1]
    index = np.flatnonzero(kept)
    nan = np.isnan(upper)  # sorted above all numbers, and greater than none
    if len(index) != T * k or nan.any():
        rows = nan.any(1) | (kept.sum(1) != k)  # ties keep more
        fixed = _lowest_of_ties(score_TS[torch.from_numpy(rows)], k).numpy()
        kept[rows] = False
        kept[np.flatnonzero(rows)[:, None], fixed] = True
        index = np.flatnonzero(kept)
    return torch.from_numpy(index.reshape(T, k) % S)


def _lowest_of_ties(score_TS: Tensor, k: int) -> Tensor:
    # A diverged model still gets k indices here; its NaN reaches the loss, which reports it.
    score_TS = score_TS.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    worst_T1 = score_TS.topk(k, dim=-1, sorted=True).values[:, -1:]
    above_TS, equal_TS = score_TS > worst_T1, score_TS == worst_T1  # -0.0 equals 0.0
    ties_kept_T1 = k - above_TS.sum(-1, keepdim=True)
    kept_TS = above_TS | (equal_TS & (equal_TS.cumsum(-1) <= ties_kept_T1))
    return kept_TS.nonzero()[:, 1].view(-1, k)


def topk(score_TS: Tensor, visible_T: Tensor, k: int) -> Tensor:
    T, S = score_TS.shape
    if T <= FEW and score_TS.device.type == "cpu":
        return _row_by_row(score_TS.detach().float(), visible_T, k)
    hidden_TS = torch.arange(S, device=score_TS.device) >= visible_T.unsqueeze(1)
    index_TK = topk_indices(score_TS.detach().masked_fill(hidden_TS, float("-inf")), min(k, S))
    return _padded(index_TK, visible_T, k)


def _row_by_row(score_TS: Tensor, visible_T: Tensor, k: int) -> Tensor:
    """Only what is visible of each row: nothing to hide, and half as many calls."""
    index = np.full((len(score_TS), k), PAD, dtype=np.int32)
    for t, (row, visible) in enumerate(zip(score_TS.numpy(), visible_T.tolist(), strict=True)):
        seen = row[:visible]
        if len(seen) <= k:
            index[t, : len(seen)] = np.arange(len(seen))
            continue
        upper = np.partition(seen, len(seen) - k)[len(seen) - k :]
        kept = (seen >= upper[0]).nonzero()[0]
        if len(kept) != k or np.isnan(upper).any():
            kept = _lowest_of_ties(score_TS[t : t + 1, :visible], k).numpy()[0]
        index[t] = kept
    return torch.from_numpy(index)


def _padded(index_TK: Tensor, visible_T: Tensor, k: int) -> Tensor:
    # A short row also selected hidden keys; they come last, because the visible ones are a prefix.
    index_TK = index_TK.masked_fill(index_TK >= visible_T.unsqueeze(1), PAD)
    return F.pad(index_TK, (0, k - index_TK.shape[1]), value=PAD).int()


@torch.no_grad()
def index_topk(query_THD: Tensor, key_SD: Tensor, weight_TH: Tensor, past: int, k: int) -> Tensor:
    (T, H, _), S = query_THD.shape, key_SD.shape[0]
    index_TK = torch.full((T, k), PAD, dtype=torch.int32, device=query_THD.device)
    visible_T = torch.arange(past + 1, past + T + 1, device=query_THD.device)
    for q in chunks(T, 4 * H * S, scratch_bytes(query_THD.device)):
        seen = past + q.stop  # the chunk's last query sees no further
        score_QS = index_scores(query_THD[q], key_SD[:seen], weight_TH[q])
        newest_QQ = score_QS[:, past + q.start :]  # only among these is anything hidden
        newest_QQ.masked_fill_(torch.ones_like(newest_QQ, dtype=torch.bool).triu(1), -torch.inf)
        index_TK[q] = _padded(topk_indices(score_QS, min(k, seen)), visible_T[q], k)
    return index_TK


@torch.no_grad()
def index_topk_varlen(
    query_THD: Tensor, keys: IndexKeys, weight_TH: Tensor, spans: Sequence[Span], k: int
) -> Tensor:
    query_THD = _from_float8(query_THD)
    pieces = [torch.zeros((0, k), dtype=torch.int32, device=query_THD.device)]
    for span in spans:
        query, key_SD = span.query_slice, _from_float8(keys.rows(span.key_slice))
        index_QK = index_topk(query_THD[query], key_SD, weight_TH[query], span.past, k)
        pieces.append(torch.where(index_QK == PAD, PAD, index_QK + span.key))
    return torch.cat(pieces)


@torch.no_grad()
def index_topk_paged(
    query_NHD: Tensor,
    keys: IndexKeys,
    weight_NH: Tensor,
    pages: BlockTable,
    visible_BQ: Tensor,
    k: int,
) -> Tensor:
    query_NHD, slot_BM = _from_float8(query_NHD), pages.slot_BM
    (B, M), Q = slot_BM.shape, visible_BQ.shape[1]
    _, H, D = query_NHD.shape
    dtype = opmath_dtype(query_NHD.dtype)
    query_BXD = query_NHD.to(dtype).view(B, Q * H, D)
    weight_N1H = weight_NH.to(dtype).unsqueeze(1)
    pieces = []
    for b in chunks(B, (D + Q * H) * M * dtype.itemsize, scratch_bytes(query_NHD.device)):
        n = slice(b.start * Q, b.stop * Q)
        flat = IndexKeys(keys.row_SD, slot_BM[b].reshape(-1), keys.scale_S)
        key_BMD = flat.rows(slice(None)).to(dtype).view(-1, M, D)
        match_NHM = torch.bmm(query_BXD[b], key_BMD.mT).relu_().view(-1, H, M)
        score_NM = torch.bmm(weight_N1H[n], match_NHM).squeeze(1)
        pieces.append(topk(score_NM, visible_BQ[b].reshape(-1), k))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _from_float8(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize == 1 else x
