"""Reference of paged GQA decode, on top of scaled_dot_product_attention.

B sequences, Q queries each, H heads, G key heads, D query/key dim, V value dim, S KV slots,
M maximum keys.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from paddock.kernels.block_table import BlockTable


def gqa_paged_decode(  # noqa: PLR0913  separate keys and values
    query_BQHD: Tensor,
    key_SGD: Tensor,
    value_SGV: Tensor,
    pages: BlockTable,
    visible_BQ: Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """[B, Q, H, V]; see the package's contract."""
    key_M = torch.arange(pages.max_keys, device=query_BQHD.device)
    visible_BQ1 = visible_BQ.unsqueeze(-1)
    seen_BQM = key_M < visible_BQ1
    if window is not None:
        seen_BQM = seen_BQM & (key_M >= visible_BQ1 - window)
    out_BHQV = F.scaled_dot_product_attention(
        query_BQHD.transpose(1, 2),
        _rows(key_SGD, pages).transpose(1, 2),
        _rows(value_SGV, pages).transpose(1, 2),
        attn_mask=seen_BQM.unsqueeze(1),
        scale=scale,
        enable_gqa=query_BQHD.shape[2] != key_SGD.shape[1],
    )
    return out_BHQV.transpose(1, 2)


def _rows(x_SGD: Tensor, pages: BlockTable) -> Tensor:
    """[B, M, G, D]; index_select is several times faster than indexing on a CPU."""
    slot_BM = pages.slot_BM
    return x_SGD.index_select(0, slot_BM.flatten()).unflatten(0, slot_BM.shape)
