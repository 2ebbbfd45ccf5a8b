"""Profile of a training step: time by part, by CUDA kernel, and without each of our kernels.

Sections are independent: a failure is printed and the next one runs.
"""

import statistics
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paddock.kernels import dispatch
from paddock.model.attention import dsa
from paddock.model.attention.indexer import Indexer
from paddock.model.attention.mla import MLA
from paddock.model.decoder_layer import DecoderLayer
from paddock.train import Trainer

Step = Callable[[], float]
Mark = Any  # a device event, or seconds on a CPU
KERNELS = 30
NAME = 100  # characters of a kernel's name


def print_profile(title: str, step: Step, trainer: Trainer, steps: int = 4) -> None:
    """`step` runs one step of `trainer`; both are warm after the first section."""
    print(f"\n{title}")
    sections: dict[str, Callable[[], None]] = {
        "step time": lambda: print(f"{milliseconds(step, steps):.1f} ms/step"),
        "time by part": lambda: print_parts(step, trainer),
        "CUDA kernels": lambda: print_kernels(step),
        "without each kernel": lambda: print_without_each(step, steps),
    }
    for name, section in sections.items():
        print(f"\n-- {name}", flush=True)
        try:
            section()
        except Exception:  # the other sections are still useful
            print("failed:", traceback.format_exc(limit=-3))


def milliseconds(step: Step, steps: int) -> float:
    """Median of a step, after two warm-up steps."""
    times = []
    for _ in range(steps + 2):
        start = time.perf_counter()
        step()
        synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


# By part


class Stopwatch:
    """Events on the device's stream, read after the step: nothing synchronizes in between."""

    def __init__(self) -> None:
        self._on_device = torch.accelerator.is_available()
        self._spans: dict[tuple[str, str], list[tuple[Mark, Mark]]] = defaultdict(list)
        self._started: dict[tuple[str, str, int], Mark] = {}

    def mark(self) -> Mark:
        if not self._on_device:
            return time.perf_counter()
        event = torch.Event(enable_timing=True)
        event.record()
        return event

    def begin(self, direction: str, part: str, owner: object = None) -> None:
        self._started[direction, part, id(owner)] = self.mark()

    def end(self, direction: str, part: str, owner: object = None) -> None:
        started = self._started.pop((direction, part, id(owner)), None)
        if started is not None:
            self._spans[direction, part].append((started, self.mark()))

    def read(self) -> dict[tuple[str, str], float]:
        """Milliseconds of each part, forward and backward."""
        synchronize()
        if self._on_device:
            return {key: sum(a.elapsed_time(b) for a, b in at) for key, at in self._spans.items()}
        return {key: 1e3 * sum(b - a for a, b in at) for key, at in self._spans.items()}


def print_parts(step: Step, trainer: Trainer) -> None:
    stopwatch = Stopwatch()
    with instrumented(trainer, stopwatch):
        stopwatch.begin("whole", "step")
        step()
        stopwatch.end("whole", "step")
    spent = stopwatch.read()
    whole = spent["whole", "step"]
    forward, backward = spent["forward", "all"], spent["backward", "all"]
    # Keys are selected inside attention.
    spent["forward", "attention"] -= spent.get(("forward", "indexer"), 0.0)
    rows = {
        part: (spent.get(("forward", part), 0.0), spent.get(("backward", part), 0.0))
        for part in ("attention", "indexer", "MLP", "head and loss")
    }
    rows["norms, residuals, embedding"] = (
        forward - sum(f for f, _ in rows.values()),
        backward - sum(b for _, b in rows.values()),
    )
    print(f"{'part':30}{'forward':>10}{'backward':>10}{'share':>8}")
    for part, (f, b) in rows.items():
        print(f"{part:30}{f:8.1f}ms{b:8.1f}ms{(f + b) / whole:8.1%}")
    for part in ("collect and clip gradients", "optimizer", "copy weights to model"):
        took = spent.get(("after", part), 0.0)
        print(f"{part:30}{took:18.1f}ms{took / whole:8.1%}")
    rest = (
        whole
        - forward
        - backward
        - sum(t for (direction, _), t in spent.items() if direction == "after")
    )
    print(f"{'idle, waiting for the host':30}{rest:18.1f}ms{rest / whole:8.1%}")
    print(f"{'step':30}{whole:18.1f}ms")


@contextmanager
def instrumented(trainer: Trainer, stopwatch: Stopwatch) -> Iterator[None]:
    """Instruments the parts of the trainer's next step."""
    network, handles = trainer.network, []
    for block in network.modules():
        if isinstance(block, DecoderLayer):
            handles += _instrument(stopwatch, "attention", block.attention)
            handles += _instrument(stopwatch, "MLP", block.mlp)
        elif isinstance(block, MLA) and isinstance(getattr(block, "indexer", None), Indexer):
            handles += _instrument(stopwatch, "indexer", block.indexer)
    handles.append(
        network.norm.register_full_backward_pre_hook(
            lambda *_: stopwatch.end("backward", "head and loss")
        )
    )
    handles.append(
        network.norm.register_forward_hook(lambda *_: stopwatch.begin("forward", "head and loss"))
    )
    replaced = [
        (trainer, "objective", _objective(stopwatch, trainer.objective)),
        (trainer, "_accumulate", _accumulate(stopwatch, trainer._accumulate)),
        (trainer.optimizer, "step", _timed(stopwatch, "optimizer", trainer.optimizer.step)),
        (
            trainer.weights,
            "copy_to_model",
            _timed(stopwatch, "copy weights to model", trainer.weights.copy_to_model),
        ),
        (dsa, "select_topk", _timed_selection(stopwatch, dsa.select_topk)),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, wrapped in replaced:
        setattr(owner, name, wrapped)
    try:
        yield
    finally:
        for owner, name, old in before:
            setattr(owner, name, old)
        for handle in handles:
            handle.remove()


def _instrument(stopwatch: Stopwatch, part: str, module: nn.Module) -> list[Any]:
    def begin(direction: str) -> Callable[..., None]:
        return lambda *_: stopwatch.begin(direction, part, module)

    def end(direction: str) -> Callable[..., None]:
        return lambda *_: stopwatch.end(direction, part, module)

    return [
        module.register_forward_pre_hook(begin("forward")),
        module.register_forward_hook(end("forward")),
        module.register_full_backward_pre_hook(begin("backward")),
        module.register_full_backward_hook(end("backward")),
    ]


def _objective(stopwatch: Stopwatch, call: Callable[..., Any]) -> Callable[..., Any]:
    def objective(*args: Any) -> Any:
        stopwatch.begin("forward", "all")
        losses = call(*args)
        stopwatch.end("forward", "head and loss")
        stopwatch.end("forward", "all")
        stopwatch.begin("backward", "all")
        stopwatch.begin("backward", "head and loss")
        return losses

    return objective


def _accumulate(stopwatch: Stopwatch, call: Callable[..., Any]) -> Callable[..., Any]:
    """Marks the end of the backward pass, where gradient clipping begins."""

    def accumulate(*args: Any) -> Any:
        losses = call(*args)
        stopwatch.end("backward", "all")
        stopwatch.begin("after", "collect and clip gradients")
        return losses

    return accumulate


def _timed(stopwatch: Stopwatch, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        stopwatch.end("after", "collect and clip gradients")
        stopwatch.begin("after", part)
        result = call(*args, **kwargs)
        stopwatch.end("after", part)
        return result

    return timed


def _timed_selection(stopwatch: Stopwatch, call: Callable[..., Any]) -> Callable[..., Any]:
    def select(*args: Any, **kwargs: Any) -> Any:
        stopwatch.begin("forward", "indexer")
        selected = call(*args, **kwargs)
        stopwatch.end("forward", "indexer")
        return selected

    return select


# By kernel


def print_kernels(step: Step, steps: int = 2) -> None:
    if not torch.accelerator.is_available():
        print("needs a GPU")
        return
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(steps):
            step()
        synchronize()
    rows = [row for row in profile.key_averages() if row.self_device_time_total > 0]
    rows.sort(key=lambda row: -row.self_device_time_total)
    whole = sum(row.self_device_time_total for row in rows) / steps / 1e3
    print(f"{whole:.1f} ms of kernels per step, {sum(row.count for row in rows) // steps} launches")
    for row in rows[:KERNELS]:
        took = row.self_device_time_total / steps / 1e3
        print(f"{took:8.2f} ms {took / whole:6.1%} {row.count // steps:6} x  {row.key[:NAME]}")


# Without each kernel


def print_without_each(step: Step, steps: int) -> None:
    """Step time with one kernel disabled at a time."""
    whole = milliseconds(step, steps)
    print(f"{'all kernels':30}{whole:8.1f} ms")
    for name, replaced in dispatch.KERNELS.items():
        try:
            with dispatch.disable_kernels(name):
                took = milliseconds(step, steps)
            text = f"{took:8.1f} ms  {took - whole:+8.1f}"
        except Exception as error:  # the others are still useful
            text = f"failed: {error!r}"[:200]
        print(f"without {name:22}{text}  ({replaced})", flush=True)
