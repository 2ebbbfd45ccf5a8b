"""A device's work, recorded once and then repeated with a single call.

A step of decoding is some thousand small launches; told one by one they take the host longer than
the device. A recording holds them all: same kernels, same memory, other contents. So whatever
`work` reads must stay where it is and be written over, and nothing in it may ask the device for a
number.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

WARMUP_RUNS = (
    2  # runs before the recording: compilers, handles and workspaces are made in the first
)


def can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


@dataclass(frozen=True, slots=True)
class CapturedGraph(Generic[T]):
    """`repeat` queues the work; what it returns is good until another of its pool is repeated."""

    replay: Callable[[], T]


class CudaGraphPool:
    """Recordings that share their scratch memory. A device that cannot record does the work
    again each time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handle = torch.cuda.graph_pool_handle() if can_capture(device) else None

    def capture(self, work: Callable[[], T]) -> CapturedGraph[T]:
        """Do the work a few times, then once more for the record."""
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
            # Only this thread's calls are watched: others may copy weights meanwhile.
            with torch.cuda.graph(graph, pool=self._handle, capture_error_mode="thread_local"):
                result = work()

        def repeat() -> T:
            graph.replay()
            return result

        return CapturedGraph(repeat)
