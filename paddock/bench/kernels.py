"""Every kernel timed against its reference, and the difference of their results.

Forward passes only. GPU kernels are switched on and off; where none can run, the reference is timed
alone.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddock.bench.kernel_cases import CASES, PAIRED_CASES, Call
from paddock.bench.kernel_inputs import RandomInputs, layer_shape
from paddock.launch import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MIN_TIMING_S = 0.002  # of one timing, in as many calls as that takes
KERNELS = tuple(sorted({**CASES, **PAIRED_CASES}))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTiming:
    kernel: str
    replaces: str  # what the kernel is used in place of
    reference_ms: float
    kernel_ms: float | None = None  # None: it cannot run here
    difference: float | None = None  # floats: relative, in L2; integers: the share that differs
    note: str = ""

    @property
    def speedup(self) -> float | None:
        return None if self.kernel_ms is None else self.reference_ms / self.kernel_ms


def time_kernels(
    names: Sequence[str], device: "torch.device", repeats: int
) -> Iterator[KernelTiming]:
    """Timings of the named kernels, by default of all; each as soon as it is known."""
    import torch

    for name in names:
        if name not in KERNELS:
            raise UserError(f"kernel '{name}' not found; kernels: {', '.join(KERNELS)}")
    torch.manual_seed(0)
    inputs = RandomInputs(device, layer_shape(device))
    for name in names or KERNELS:
        with torch.no_grad():
            yield _time_kernel(name, inputs, repeats)


def _time_kernel(name: str, inputs: RandomInputs, repeats: int) -> KernelTiming:
    from paddock.kernels.dispatch import KERNELS, disable_kernels, has_triton

    if name in PAIRED_CASES:
        replaces, case = PAIRED_CASES[name]
        return _compare(name, replaces, case(inputs), inputs.device, repeats)
    call = CASES[name](inputs)

    def reference() -> "Tensor":
        with disable_kernels(name, "cpu"):
            return call()

    if inputs.device.type == "cuda" and has_triton():
        return _compare(name, KERNELS[name], (reference, call), inputs.device, repeats)
    (reference_ms,) = median_times([reference], inputs.device, repeats)
    missing = "triton" if inputs.device.type == "cuda" else "an NVIDIA GPU"
    return KernelTiming(
        kernel=name,
        replaces=KERNELS[name],
        reference_ms=reference_ms,
        note=f"the kernel needs {missing}",
    )


def _compare(
    name: str, replaces: str, forms: tuple[Call, Call], device: "torch.device", repeats: int
) -> KernelTiming:
    reference, kernel = forms
    difference = _difference(kernel(), reference())
    reference_ms, kernel_ms = median_times(forms, device, repeats)
    return KernelTiming(
        kernel=name,
        replaces=replaces,
        reference_ms=reference_ms,
        kernel_ms=kernel_ms,
        difference=difference,
    )


def median_times(calls: Sequence[Call], device: "torch.device", repeats: int) -> list[float]:
    """Median milliseconds of each. They alternate, so that load and heat affect all alike."""
    for call in calls:
        call()
    counts = [max(1, int(MIN_TIMING_S / max(1e-9, _seconds(call, 1, device)))) for call in calls]
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, count, taken in zip(calls, counts, times, strict=True):
            taken.append(_seconds(call, count, device) / count * 1e3)
    return [statistics.median(taken) for taken in times]


def _seconds(call: Call, count: int, device: "torch.device") -> float:
    import torch

    synchronize: Callable[[], object] = (
        torch.accelerator.synchronize if device.type != "cpu" else lambda: None
    )
    synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    synchronize()
    return time.perf_counter() - start


def _difference(kernel: "Tensor", reference: "Tensor") -> float | None:
    if not reference.numel():
        return None
    if not reference.is_floating_point():
        return float((kernel != reference).float().mean())
    wide = reference.double()
    return float((kernel.double() - wide).norm() / wide.norm().clamp_min(1e-30))
