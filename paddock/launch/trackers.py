"""Where a run's numbers go besides its journal: TensorBoard, trackio, Weights & Biases.

The journal always has everything; a tracker is a copy for eyes that prefer it. Their libraries are
the extra `track`.
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
    """A watcher that copies every step's numbers to the tracker, which is closed at the end."""
    if tracker is None:
        yield lambda _: None
        return
    with OPEN[tracker](folder, settings) as log:
        yield lambda moment: log(_numbers(moment), moment.step)


def _numbers(moment: "StepMetrics") -> dict[str, float]:
    report = moment.output
    numbers = {f"loss/{name}": value for name, value in report.losses.items()}
    numbers |= {
        "grad_norm": report.grad_norm,
        "lr": report.lr,
        "imbalance": report.expert_imbalance,
    }
    numbers["tokens_per_second"] = report.tokens / moment.seconds
    if moment.validation is not None:
        numbers["loss/held_out"] = moment.validation.loss
        for source, nats in moment.validation.by_source.items():
            numbers[f"held_out/{source}"] = nats
    return numbers


@contextmanager
def _tensorboard(folder: Path, settings: dict[str, Any]) -> Iterator[Log]:  # noqa: ARG001
    _library("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard")) as writer:

        def log(numbers: dict[str, float], step: int) -> None:
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)

        yield log


@contextmanager
def _trackio(folder: Path, settings: dict[str, Any]) -> Iterator[Log]:
    trackio = _library("trackio")
    trackio.init(project=PROJECT, name=_name(folder), config=settings, resume="allow")
    try:
        yield lambda numbers, step: trackio.log(numbers, step=step)
    finally:
        trackio.finish()


@contextmanager
def _wandb(folder: Path, settings: dict[str, Any]) -> Iterator[Log]:
    wandb = _library("wandb")
    run = wandb.init(project=PROJECT, name=_name(folder), dir=str(folder), config=settings)
    try:
        yield lambda numbers, step: run.log(numbers, step=step)
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
    """A run is called by its recipe and its stage."""
    return "-".join(folder.resolve().parts[-2:])
