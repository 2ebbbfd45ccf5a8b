"""Every kernel's fast form beside its plain one: how long each takes, how far apart they are.

Forward passes alone. Twins for GPUs are switched on and off; where none can run, the plain form is
timed alone.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddock.bench.kernel_cases import CASES, PAIRED_CASES, Call, RandomInputs, layer_shape
from paddock.cli.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MIN_TIMING_S = 0.002  # a timing lasts at least so long, in as many calls as that takes
KERNELS = tuple(sorted({**CASES, **PAIRED_CASES}))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTiming:
    kernel: str
    replaces: str  # what the fast form stands in for
    plain_ms: float
    fast_ms: float | None = None  # None: it cannot run here
    apart: float | None = None  # of numbers: relative, in L2; of choices: the share that differs
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return None if self.fast_ms is None else self.plain_ms / self.fast_ms


def time_kernels(
    names: Sequence[str], device: "torch.device", repeats: int
) -> Iterator[KernelTiming]:
    """Of the kernels named, or of all; each as soon as it is known."""
    import torch

    for name in names:
        if name not in KERNELS:
            raise UserError(f"no kernel is called '{name}'; there are {', '.join(KERNELS)}")
    torch.manual_seed(0)
    made = RandomInputs(device, layer_shape(device))
    for name in names or KERNELS:
        with torch.no_grad():
            yield _figure(name, made, repeats)


def _figure(name: str, made: RandomInputs, repeats: int) -> KernelTiming:
    from paddock.kernels.dispatch import KERNELS, disable_kernels, has_triton

    if name in PAIRED_CASES:
        replaces, case = PAIRED_CASES[name]
        return _compared(name, replaces, case(made), made.device, repeats)
    call = CASES[name](made)

    def plain() -> "Tensor":
        with disable_kernels(name):
            return call()

    if made.device.type == "cuda" and has_triton():
        return _compared(name, KERNELS[name], (plain, call), made.device, repeats)
    (plain_ms,) = median_times([plain], made.device, repeats)
    missing = "triton" if made.device.type == "cuda" else "an NVIDIA GPU"
    return KernelTiming(
        kernel=name, replaces=KERNELS[name], plain_ms=plain_ms, note=f"the twin needs {missing}"
    )


def _compared(
    name: str, replaces: str, forms: tuple[Call, Call], device: "torch.device", repeats: int
) -> KernelTiming:
    plain, fast = forms
    apart = _apart(fast(), plain())
    plain_ms, fast_ms = median_times(forms, device, repeats)
    return KernelTiming(
        kernel=name, replaces=replaces, plain_ms=plain_ms, fast_ms=fast_ms, apart=apart
    )


def median_times(calls: Sequence[Call], device: "torch.device", repeats: int) -> list[float]:
    """Median milliseconds of each; they take turns, so that neighbours and heat treat all alike."""
    for call in calls:
        call()
    many = [max(1, int(MIN_TIMING_S / max(1e-9, _seconds(call, 1, device)))) for call in calls]
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, count, taken in zip(calls, many, times, strict=True):
            taken.append(_seconds(call, count, device) / count * 1e3)
    return [statistics.median(taken) for taken in times]


def _seconds(call: Call, count: int, device: "torch.device") -> float:
    import torch

    settle: Callable[[], object] = (
        torch.accelerator.synchronize if device.type != "cpu" else lambda: None
    )
    settle()
    start = time.perf_counter()
    for _ in range(count):
        call()
    settle()
    return time.perf_counter() - start


def _apart(fast: "Tensor", plain: "Tensor") -> float | None:
    if not plain.numel():
        return None
    if not plain.is_floating_point():
        return float((fast != plain).float().mean())
    wide = plain.double()
    return float((fast.double() - wide).norm() / wide.norm().clamp_min(1e-30))
