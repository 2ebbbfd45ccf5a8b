"""What deterministic top-k means. T queries, S keys, K kept, Q a chunk of T."""

import torch
from torch import Tensor

from paddock.kernels.index_scores.reference import index_scores
from paddock.kernels.workspace import chunks

PAD = -1


@torch.no_grad()
def best(score_TS: Tensor, k: int) -> Tensor:
    """Indices of the k best of each row, ascending, int64; of equal scores the lowest index wins.

    No -1 here: the row must have at least k entries, -inf included.
    """
    score_TS = score_TS.float() + 0.0  # -0.0 becomes 0.0, and the two must tie
    # A diverged model still gets k indices here; its NaN reaches the loss, which reports it.
    score_TS.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    worst_T1 = score_TS.topk(k, dim=-1, sorted=True).values[:, -1:]
    kept_TS = score_TS >= worst_T1
    tied_T = kept_TS.sum(-1) > k
    if bool(tied_T.any()):
        kept_TS[tied_T] = _without_late_ties(score_TS[tied_T], worst_T1[tied_T], k)
    return kept_TS.nonzero()[:, 1].view(-1, k)


def _without_late_ties(score_TS: Tensor, worst_T1: Tensor, k: int) -> Tensor:
    above_TS, equal_TS = score_TS > worst_T1, score_TS == worst_T1
    room_T1 = k - above_TS.sum(-1, keepdim=True)
    return above_TS | (equal_TS & (equal_TS.cumsum(-1) <= room_T1))


@torch.no_grad()
def topk(score_TS: Tensor, visible_T: Tensor, k: int) -> Tensor:
    S = score_TS.shape[1]
    hidden_TS = torch.arange(S, device=score_TS.device) >= visible_T.unsqueeze(1)
    index_TK = best(score_TS.masked_fill(hidden_TS, float("-inf")), min(k, S))
    # A short row also "kept" hidden keys; they come last, because the visible ones are a prefix.
    index_TK = index_TK.masked_fill(index_TK >= visible_T.unsqueeze(1), PAD)
    return torch.nn.functional.pad(index_TK, (0, k - index_TK.shape[1]), value=PAD).int()


@torch.no_grad()
def index_topk(query_THD: Tensor, key_SD: Tensor, weight_TH: Tensor, past: int, k: int) -> Tensor:
    (T, H, _), S = query_THD.shape, key_SD.shape[0]
    index_TK = torch.full((T, k), PAD, dtype=torch.int32, device=query_THD.device)
    visible_T = torch.arange(past + 1, past + T + 1, device=query_THD.device)
    for q in chunks(T, row_bytes=4 * H * S):
        seen = past + q.stop  # the chunk's last query sees no further
        score_QS = index_scores(query_THD[q], key_SD[:seen], weight_TH[q])
        index_TK[q] = topk(score_QS, visible_T[q], k)
    return index_TK
