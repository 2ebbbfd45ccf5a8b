"""Top-k by one block of threads a row; see topk.cu. T rows, S columns, K kept."""

from ctypes import c_int, c_longlong, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from paddock.kernels.compile import CudaKernel, compile_cuda, max_shared_memory_bytes, nvrtc
from paddock.kernels.dispatch import is_enabled

MOST = 4096
SHORT_THREADS, LONG_THREADS = 256, 512
WHOLE = 8192  # of the source: up to here a row is held as it is, without a bitmap


def suits(device: torch.device, longest: int, k: int) -> bool:
    """An NVIDIA GPU since Ampere, a compiler for it, and a bitmap of the row that fits on chip."""
    return (
        device.type == "cuda"
        and is_enabled("topk")
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and nvrtc() is not None
        and 1 <= k <= MOST
        and shared_bytes(longest) <= max_shared_memory_bytes(device)
    )


def topk(
    score_TS: Tensor,
    visible_T: Tensor,
    k: int,
    *,
    start_T: Tensor | None,
    out_TK: Tensor,
    threads: int | None = None,
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
        threads = threads or (LONG_THREADS if S > WHOLE else SHORT_THREADS)
        chosen = kernel(score_TS.device, threads, S > WHOLE)
        chosen.launch(T, threads, shared_bytes(S), arguments)
    return out_TK


@cache
def kernel(device: torch.device, threads: int, long: bool) -> CudaKernel:
    """For rows up to WHOLE, or for rows of any length."""
    major, minor = torch.cuda.get_device_capability(device)
    source = Path(__file__).with_name("topk.cu").read_text()
    options = [f"-DTHREADS={threads}", f"-DLONG={int(long)}"]
    code, _ = compile_cuda(source, f"sm_{major}{minor}", options)
    return CudaKernel(code, "topk_rows", device, max_shared_memory_bytes(device))


def shared_bytes(longest: int) -> int:
    """sizeof(Shared) of the source and, for longer rows, a bitmap of a row, which may begin at any
    of four floats."""
    long = longest > WHOLE
    held = 4 * ((2 if long else 1) * WHOLE + 2 * 2048 + 4 * 32 + 12)
    return held + (4 * -(-(longest + 3) // 32) if long else 0)
