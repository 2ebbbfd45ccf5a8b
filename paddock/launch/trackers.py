"""Experiment trackers: TensorBoard, trackio, Weights & Biases.

The journal always has all metrics; a tracker gets a copy. The libraries are in the extra `track`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from paddock.launch.errors import UserError

if TYPE_CHECKING:
    from paddock.train import StepMetrics

PROJECT = "paddock"
Log = Callable[[dict[str, float], int], None]


class Tracker(StrEnum):
    TENSORBOARD = "tensorboard"
    TRACKIO = "trackio"
    WANDB = "wandb"


@contextmanager
def open_tracker(
    tracker: Tracker | None, folder: Path, settings: dict[str, Any]
) -> "Iterator[Callable[[StepMetrics], None]]":
    """A callback that logs the metrics of every step to the tracker, which is closed at the end."""
    if tracker is None:
        yield lambda _: None
        return
    with OPEN[tracker](folder, settings) as log:
        yield lambda metrics: log(_to_scalars(metrics), metrics.step)


def _to_scalars(metrics: "StepMetrics") -> dict[str, float]:
    output = metrics.output
    scalars = {f"loss/{name}": value for name, value in output.losses.items()}
    scalars |= {
        "grad_norm": output.grad_norm,
        "lr": output.lr,
        "imbalance": output.expert_imbalance,
    }
    scalars["tokens_per_second"] = output.tokens / metrics.seconds
    if metrics.validation is not None:
        scalars["loss/held_out"] = metrics.validation.loss
        for source, nats in metrics.validation.by_source.items():
            scalars[f"held_out/{source}"] = nats
    return scalars


@contextmanager
def _tensorboard(folder: Path, settings: dict[str, Any]) -> Iterator[Log]:  # noqa: ARG001
    _library("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard")) as writer:

        def log(scalars: dict[str, float], step: int) -> None:
            for name, value in scalars.items():
                writer.add_scalar(name, value, step)

        yield log


@contextmanager
def _trackio(folder: Path, settings: dict[str, Any]) -> Iterator[Log]:
    trackio = _library("trackio")
    trackio.init(project=PROJECT, name=_name(folder), config=settings, resume="allow")
    try:
        yield lambda scalars, step: trackio.log(scalars, step=step)
    finally:
        trackio.finish()


@contextmanager
def _wandb(folder: Path, settings: dict[str, Any]) -> Iterator[Log]:
    wandb = _library("wandb")
    run = wandb.init(project=PROJECT, name=_name(folder), dir=str(folder), config=settings)
    try:
        yield lambda scalars, step: run.log(scalars, step=step)
    finally:
        run.finish()


OPEN = {
    Tracker.TENSORBOARD: _tensorboard,
    Tracker.TRACKIO: _trackio,
    Tracker.WANDB: _wandb,
}


def _library(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError:
        raise UserError(f"'{name}' is not installed: pip install 'paddock[track]'") from None


def _name(folder: Path) -> str:
    """The run name: recipe and stage."""
    return "-".join(folder.resolve().parts[-2:])
