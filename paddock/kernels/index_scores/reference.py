"""What index scores mean. T queries, S keys, H index heads, D index head dim, Q a chunk of T."""

import torch
from torch import Tensor

from paddock.kernels.precision import wide
from paddock.kernels.workspace import chunks


def index_scores(query_THD: Tensor, key_SD: Tensor, weight_TH: Tensor) -> Tensor:
    """[T, S] scores; see the package's contract."""
    (T, H, _), S = query_THD.shape, key_SD.shape[0]
    dtype = wide(query_THD.dtype)
    key_SD = key_SD.to(dtype)
    pieces = [
        _scores(query_THD[q].to(dtype), key_SD, weight_TH[q].to(dtype))
        for q in chunks(T, row_bytes=H * S * dtype.itemsize)
    ]
    if not pieces:
        return query_THD.new_zeros((0, S), dtype=dtype)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _scores(query_QHD: Tensor, key_SD: Tensor, weight_QH: Tensor) -> Tensor:
    match_QHS = (query_QHD.flatten(0, 1) @ key_SD.mT).unflatten(0, query_QHD.shape[:2])
    if torch.is_grad_enabled() and match_QHS.requires_grad:
        match_QHS = match_QHS.relu()
    else:
        match_QHS = match_QHS.relu_()  # half the traffic where nobody needs the sign back
    return torch.bmm(weight_QH.unsqueeze(1), match_QHS).squeeze(1)
