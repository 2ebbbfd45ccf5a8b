"""Where the time of one training step goes: by part, by kernel, and by fast twin.

Each section stands alone: one that fails says so and the next goes on.
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
    """`step` drives `trainer`; both are warm after the first section."""
    print(f"\n{title}")
    sections: dict[str, Callable[[], None]] = {
        "time of a step": lambda: print(f"{milliseconds(step, steps):.1f} ms a step"),
        "share of time by part": lambda: print_parts(step, trainer),
        "kernels": lambda: print_kernels(step),
        "without each twin": lambda: print_without_each(step, steps),
    }
    for name, section in sections.items():
        print(f"\n-- {name}", flush=True)
        try:
            section()
        except Exception:  # a report of many parts is worth more than its first failure
            print("failed:", traceback.format_exc(limit=-3))


def milliseconds(step: Step, steps: int) -> float:
    """Median of a step, after two that warm up."""
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
    """Marks on the device's stream, read when the step is over: nothing waits in between."""

    def __init__(self) -> None:
        self._on_device = torch.accelerator.is_available()
        self._spans: dict[tuple[str, str], list[tuple[Mark, Mark]]] = defaultdict(list)
        self._begun: dict[tuple[str, str, int], Mark] = {}

    def mark(self) -> Mark:
        if not self._on_device:
            return time.perf_counter()
        event = torch.Event(enable_timing=True)
        event.record()
        return event

    def begin(self, way: str, part: str, owner: object = None) -> None:
        self._begun[way, part, id(owner)] = self.mark()

    def end(self, way: str, part: str, owner: object = None) -> None:
        begun = self._begun.pop((way, part, id(owner)), None)
        if begun is not None:
            self._spans[way, part].append((begun, self.mark()))

    def read(self) -> dict[tuple[str, str], float]:
        """Milliseconds of each part, forward and backward."""
        synchronize()
        if self._on_device:
            return {key: sum(a.elapsed_time(b) for a, b in at) for key, at in self._spans.items()}
        return {key: 1e3 * sum(b - a for a, b in at) for key, at in self._spans.items()}


def print_parts(step: Step, trainer: Trainer) -> None:
    watch = Stopwatch()
    with watched(trainer, watch):
        watch.begin("whole", "step")
        step()
        watch.end("whole", "step")
    spent = watch.read()
    whole = spent["whole", "step"]
    forward, backward = spent["forward", "all"], spent["backward", "all"]
    # The choice of keys happens inside attention.
    spent["forward", "attention"] -= spent.get(("forward", "indexer"), 0.0)
    rows = {
        part: (spent.get(("forward", part), 0.0), spent.get(("backward", part), 0.0))
        for part in ("attention", "indexer", "feed-forward", "head and loss")
    }
    rows["norms, residuals, embedding"] = (
        forward - sum(f for f, _ in rows.values()),
        backward - sum(b for _, b in rows.values()),
    )
    print(f"{'part':30}{'forward':>10}{'backward':>10}{'share':>8}")
    for part, (f, b) in rows.items():
        print(f"{part:30}{f:8.1f}ms{b:8.1f}ms{(f + b) / whole:8.1%}")
    for part in ("collect and clip gradients", "optimizer", "publish weights"):
        took = spent.get(("after", part), 0.0)
        print(f"{part:30}{took:18.1f}ms{took / whole:8.1%}")
    rest = whole - forward - backward - sum(t for (way, _), t in spent.items() if way == "after")
    print(f"{'between, waiting for the host':30}{rest:18.1f}ms{rest / whole:8.1%}")
    print(f"{'step':30}{whole:18.1f}ms")


@contextmanager
def watched(trainer: Trainer, watch: Stopwatch) -> Iterator[None]:
    """The parts of the trainer's next step, marked."""
    network, handles = trainer.network, []
    for block in network.modules():
        if isinstance(block, DecoderLayer):
            handles += _watch_module(watch, "attention", block.attention)
            handles += _watch_module(watch, "feed-forward", block.mlp)
        elif isinstance(block, MLA) and isinstance(getattr(block, "indexer", None), Indexer):
            handles += _watch_module(watch, "indexer", block.indexer)
    handles.append(
        network.norm.register_full_backward_pre_hook(
            lambda *_: watch.end("backward", "head and loss")
        )
    )
    handles.append(
        network.norm.register_forward_hook(lambda *_: watch.begin("forward", "head and loss"))
    )
    replaced = [
        (trainer, "objective", _objective(watch, trainer.objective)),
        (trainer, "_accumulate", _accumulate(watch, trainer._accumulate)),
        (trainer.optimizer, "step", _timed(watch, "optimizer", trainer.optimizer.step)),
        (
            trainer.weights,
            "publish",
            _timed(watch, "publish weights", trainer.weights.copy_to_model),
        ),
        (dsa, "choose", _chosen(watch, dsa.select_topk)),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, put in replaced:
        setattr(owner, name, put)
    try:
        yield
    finally:
        for owner, name, old in before:
            setattr(owner, name, old)
        for handle in handles:
            handle.remove()


def _watch_module(watch: Stopwatch, part: str, module: nn.Module) -> list[Any]:
    def begin(way: str) -> Callable[..., None]:
        return lambda *_: watch.begin(way, part, module)

    def end(way: str) -> Callable[..., None]:
        return lambda *_: watch.end(way, part, module)

    return [
        module.register_forward_pre_hook(begin("forward")),
        module.register_forward_hook(end("forward")),
        module.register_full_backward_pre_hook(begin("backward")),
        module.register_full_backward_hook(end("backward")),
    ]


def _objective(watch: Stopwatch, call: Callable[..., Any]) -> Callable[..., Any]:
    def objective(*args: Any) -> Any:
        watch.begin("forward", "all")
        losses = call(*args)
        watch.end("forward", "head and loss")
        watch.end("forward", "all")
        watch.begin("backward", "all")
        watch.begin("backward", "head and loss")
        return losses

    return objective


def _accumulate(watch: Stopwatch, call: Callable[..., Any]) -> Callable[..., Any]:
    """Backward ends where the optimizer's work begins."""

    def accumulate(*args: Any) -> Any:
        losses = call(*args)
        watch.end("backward", "all")
        watch.begin("after", "collect and clip gradients")
        return losses

    return accumulate


def _timed(watch: Stopwatch, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        watch.end("after", "collect and clip gradients")
        watch.begin("after", part)
        result = call(*args, **kwargs)
        watch.end("after", part)
        return result

    return timed


def _chosen(watch: Stopwatch, call: Callable[..., Any]) -> Callable[..., Any]:
    def choose(*args: Any, **kwargs: Any) -> Any:
        watch.begin("forward", "indexer")
        chosen = call(*args, **kwargs)
        watch.end("forward", "indexer")
        return chosen

    return choose


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
    print(f"{whole:.1f} ms of kernels a step, {sum(row.count for row in rows) // steps} launches")
    for row in rows[:KERNELS]:
        took = row.self_device_time_total / steps / 1e3
        print(f"{took:8.2f} ms {took / whole:6.1%} {row.count // steps:6} x  {row.key[:NAME]}")


# By twin


def print_without_each(step: Step, steps: int) -> None:
    """Times with one twin off."""
    whole = milliseconds(step, steps)
    print(f"{'as it stands':30}{whole:8.1f} ms")
    for name, instead in dispatch.KERNELS.items():
        try:
            with dispatch.disable_kernels(name):
                took = milliseconds(step, steps)
            said = f"{took:8.1f} ms  {took - whole:+8.1f}"
        except Exception as error:  # the others are still worth knowing
            said = f"failed: {error!r}"[:200]
        print(f"without {name:22}{said}  ({instead})", flush=True)
