"""Top-k by one block of threads a row; see topk.cu. T rows, S columns, K kept."""

from ctypes import c_int, c_longlong, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from paddock.kernels.compile import Kernel, compiled, most_shared_bytes, nvrtc
from paddock.kernels.twins import allowed

MOST = 4096  # CAP of the source
THREADS = 512
SHARED_BYTES = 4 * (8192 + 2 * 2048 + 32 + 8)  # sizeof(Shared) of the source; a bitmap comes behind


def suits(device: torch.device, longest: int, k: int) -> bool:
    """An NVIDIA GPU since Ampere, a compiler for it, and a bitmap of the row that fits on chip."""
    return (
        device.type == "cuda"
        and allowed("topk")
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and nvrtc() is not None
        and 1 <= k <= MOST
        and _shared_bytes(longest) <= most_shared_bytes(device)
    )


def topk(
    score_TS: Tensor,
    visible_T: Tensor,
    k: int,
    *,
    start_T: Tensor | None,
    out_TK: Tensor,
    threads: int = THREADS,
) -> Tensor:
    """Query t keeps k of its entries [0, visible_T[t]); `start_T` is added to their indices.

    float32 scores with adjacent columns, int32 and contiguous otherwise; visible_T[t] <= S.
    """
    T, S = score_TS.shape
    assert score_TS.dtype == torch.float32
    assert score_TS.stride(1) == 1 or S == 1
    tables = (visible_T, out_TK) if start_T is None else (visible_T, start_T, out_TK)
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in tables)
    if T:
        start = c_void_p(None) if start_T is None else start_T
        arguments = (score_TS, c_longlong(score_TS.stride(0)), visible_T, start, out_TK, c_int(k))
        kernel(score_TS.device, threads).launch(T, threads, _shared_bytes(S), arguments)
    return out_TK


@cache
def kernel(device: torch.device, threads: int) -> Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    source = Path(__file__).with_name("topk.cu").read_text()
    code, _ = compiled(source, f"sm_{major}{minor}", [f"-DTHREADS={threads}"])
    return Kernel(code, "topk_rows", device, most_shared_bytes(device))


def _shared_bytes(longest: int) -> int:
    return SHARED_BYTES + 4 * -(-longest // 32)
