"""GPU scoring and top-k selection, in blocks through bounded scratch memory.

Two kernels per block: one writes float32 index scores, the other reads them once and selects.
T queries, S keys, K selected; in a decode batch B sequences, Q queries each, N = B * Q, M keys.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paddock.kernels.block_table import BlockTable
from paddock.kernels.dispatch import has_triton, is_enabled
from paddock.kernels.index_scores.blocks import WIDTH, blocks
from paddock.kernels.index_scores.reference import IndexKeys
from paddock.kernels.spans import Span
from paddock.kernels.topk import cuda
from paddock.kernels.workspace import chunks, scratch_bytes

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


def suits(query_THD: Tensor, keys: IndexKeys, longest: int, k: int) -> bool:
    """Whether the kernels apply: a supported dtype, and a GPU with tensor cores for it."""
    dtype, device = query_THD.dtype, query_THD.device
    return (
        device.type == "cuda"
        and is_enabled("index_topk")
        and dtype in DTYPES
        and keys.row_SD.dtype == dtype
        and len(query_THD) > 0
        and cuda.suits(device, longest, k)
        and (dtype.itemsize > 1 or torch.cuda.get_device_capability(device) >= (8, 9))
        and has_triton()
    )


@torch.no_grad()
def index_topk_varlen(
    query_THD: Tensor, keys: IndexKeys, weight_TH: Tensor, spans: Sequence[Span], k: int
) -> Tensor:
    from paddock.kernels.index_scores.triton import scores

    device = query_THD.device
    query_THD, keys, weight_TH = _as_kernel_inputs(query_THD, keys, weight_TH)
    plan = blocks(tuple(spans), k, device, scratch_bytes(device))
    workspace = torch.empty(max(b.rows_wide for b in plan), dtype=torch.float32, device=device)
    index_QK = torch.empty(plan[-1].rows.stop, k, dtype=torch.int32, device=device)
    with torch.cuda.device(device):
        for block in plan:
            score_RS = workspace[: block.rows_wide].view(block.shape)
            scores(query_THD, keys, weight_TH, block, score_RS)
            out_RK = index_QK[block.rows]
            cuda.topk(score_RS, block.visible_R, k, start_T=block.start_R, out_TK=out_RK)
    return index_QK


@torch.no_grad()
def index_topk_paged(
    query_NHD: Tensor,
    keys: IndexKeys,
    weight_NH: Tensor,
    pages: BlockTable,
    visible_BQ: Tensor,
    k: int,
) -> Tensor:
    from paddock.kernels.index_scores.triton import table_scores

    device, (B, Q) = query_NHD.device, visible_BQ.shape
    query_NHD, keys, weight_NH = _as_kernel_inputs(query_NHD, keys, weight_NH)
    visible_BQ = visible_BQ.int().contiguous()
    width = -(-pages.max_keys // WIDTH) * WIDTH
    index_NK = torch.empty(len(query_NHD), k, dtype=torch.int32, device=device)
    with torch.cuda.device(device):
        for b in chunks(B, 4 * Q * width, scratch_bytes(device)):
            n, visible = slice(b.start * Q, b.stop * Q), visible_BQ[b]
            score_NM = torch.empty(visible.numel(), width, dtype=torch.float32, device=device)
            table = BlockTable(pages.page_BP[b], pages.page_size)
            table_scores(query_NHD[n], keys, weight_NH[n], table, visible, k, score_NM)
            cuda.topk(score_NM, visible.view(-1), k, start_T=None, out_TK=index_NK[n])
    return index_NK


def _as_kernel_inputs(
    query_THD: Tensor, keys: IndexKeys, weight_TH: Tensor
) -> tuple[Tensor, IndexKeys, Tensor]:
    """Contiguous rows and float32 weights, as the kernels require."""
    query_THD = query_THD if query_THD.stride(2) == 1 else query_THD.contiguous()
    if keys.row_SD.stride(1) != 1:
        keys = IndexKeys(keys.row_SD.contiguous(), keys.slot_S, keys.scale_S)
    return query_THD, keys, weight_TH.float().contiguous()
