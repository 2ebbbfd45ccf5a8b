"""CUDA graph capture and replay.

A decode step is a thousand small kernel launches, which take the host longer than the device. A
CUDA graph replays them with one call: same kernels, same memory addresses, other contents. So the
inputs of the captured work must stay at their addresses and be overwritten in place, and the work
must not synchronize with the host.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

WARMUP_RUNS = 2  # runs before capture: the first compiles kernels and allocates workspaces


def can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


@dataclass(frozen=True, slots=True)
class CapturedGraph(Generic[T]):
    """`replay` queues the work; its result is valid until another graph of the pool replays."""

    replay: Callable[[], T]


class CudaGraphPool:
    """CUDA graphs that share their memory pool. On other devices replay runs the work again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handle = torch.cuda.graph_pool_handle() if can_capture(device) else None

    def capture(self, work: Callable[[], T]) -> CapturedGraph[T]:
        """Run the work a few times to warm up, then capture it."""
        if not can_capture(self._device):
            return CapturedGraph(work)
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARMUP_RUNS):
                    work()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Thread-local capture: other threads may copy weights meanwhile.
            with torch.cuda.graph(graph, pool=self._handle, capture_error_mode="thread_local"):
                result = work()

        def replay() -> T:
            graph.replay()
            return result

        return CapturedGraph(replay)
