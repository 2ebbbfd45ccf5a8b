"""Reference of index scores. T queries, S keys, H index heads, D index head dim, Q a chunk of T."""

from dataclasses import dataclass

import torch
from torch import Tensor

from paddock.kernels.precision import mm_fp32, opmath_dtype
from paddock.kernels.workspace import chunks, scratch_bytes


@dataclass(frozen=True, slots=True, eq=False)
class IndexKeys:
    """Key s is row_SD[slot_S[s]] * scale_S[slot_S[s]].

    Without slots the rows lie in the order of the keys; without scales they are unscaled.
    """

    row_SD: Tensor
    slot_S: Tensor | None = None
    scale_S: Tensor | None = None

    def rows(self, keys: slice) -> Tensor:
        """A slice of the keys, contiguous."""
        if self.slot_S is None:
            row_SD, scale_S = (
                self.row_SD[keys],
                None if self.scale_S is None else self.scale_S[keys],
            )
        else:
            at = self.slot_S[keys]
            # Not row[at]: index_select copies whole rows and is several times faster.
            row_SD = self.row_SD.index_select(0, at)
            scale_S = None if self.scale_S is None else self.scale_S[at]
        return row_SD if scale_S is None else row_SD.float() * scale_S.unsqueeze(-1)


def index_scores(query_THD: Tensor, key_SD: Tensor, weight_TH: Tensor) -> Tensor:
    """[T, S] scores; see the package's contract."""
    (T, H, _), S = query_THD.shape, key_SD.shape[0]
    dtype = opmath_dtype(query_THD.dtype)
    pieces = [
        _scores(query_THD[q], key_SD, weight_TH[q].to(dtype))
        for q in chunks(T, H * S * dtype.itemsize, scratch_bytes(query_THD.device))
    ]
    if not pieces:
        return query_THD.new_zeros((0, S), dtype=dtype)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _scores(query_QHD: Tensor, key_SD: Tensor, weight_QH: Tensor) -> Tensor:
    if torch.is_grad_enabled() and (query_QHD.requires_grad or key_SD.requires_grad):
        dtype = opmath_dtype(query_QHD.dtype)
        match_QHS = (query_QHD.to(dtype).flatten(0, 1) @ key_SD.to(dtype).mT).relu()
    else:
        # In place: half the memory traffic where no gradient needs the sign.
        match_QHS = mm_fp32(query_QHD.flatten(0, 1), key_SD.mT).relu_()
    match_QHS = match_QHS.unflatten(0, query_QHD.shape[:2])
    return torch.bmm(weight_QH.unsqueeze(1), match_QHS).squeeze(1)
