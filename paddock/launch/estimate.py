"""Estimates before a run: the cost of a training stage, the time of a pipeline on this machine."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paddock.launch.pipeline import PipelineStage
    from paddock.train import TrainingEstimate, TrainSettings


class TimeEstimate:
    """Remaining seconds of a pipeline: measured times of its stages, times how much slower this
    machine is. `slower` is a first guess, refined by the stages of this very run.

    >>> estimate = TimeEstimate({"pretrain": 100, "sft": 50, "rl": 10}, slower=2.0)
    >>> estimate.remaining_s
    320.0
    >>> estimate.stage_finished("pretrain", 300.0)
    >>> estimate.remaining_s
    180.0
    """

    def __init__(self, seconds: Mapping[str, float], slower: float) -> None:
        self._todo, self._slower = dict(seconds), slower
        self._took = self._measured = 0.0

    @property
    def remaining_s(self) -> float:
        return sum(self._todo.values()) * self._slower

    def stage_finished(self, stage: str, took: float) -> None:
        """A stage took `took` seconds here, its suites included."""
        self._measured += self._todo.pop(stage)
        self._took += took
        self._slower = self._took / self._measured


def estimate_time(
    every: Sequence["PipelineStage"], todo: Sequence["PipelineStage"]
) -> TimeEstimate | None:
    """Of the stages in `todo`; None unless the pipeline gives `estimated_s` for all of them."""
    seconds = {step.stage.name: step.stage.estimated_s for step in todo}
    known = {name: value for name, value in seconds.items() if value is not None}
    if not known or len(known) < len(seconds):
        return None
    return TimeEstimate(known, _slowdown(every[0]))


def _slowdown(step: "PipelineStage") -> float:
    """Time on this machine relative to the one where the pipeline was measured, from a few steps of
    its first stage; 1 if they cannot be run."""
    import torch

    from paddock.config import load_recipe, resolve
    from paddock.train import (
        TrainSettings,
        estimate_training,
        fits_in_memory,
        load_init_config,
        measure_step_time,
        pick_device,
    )

    if step.stage.command != "train" or step.stage.estimated_s is None:
        return 1.0
    settings = resolve(TrainSettings, load_recipe(step.recipe, step.overrides))
    if settings.init.checkpoint is not None and not Path(settings.init.checkpoint).exists():
        return 1.0
    config = load_init_config(settings)
    if not fits_in_memory(
        estimate_training(settings, config), pick_device(settings.compute.device)
    ):
        return 1.0
    with torch.random.fork_rng():  # the run itself must not be affected
        # 15 steps: on a busy machine two of three may be delayed.
        seconds = measure_step_time(settings, config, steps=15)
    return settings.steps * seconds / step.stage.estimated_s


def estimate_train(settings: "TrainSettings") -> "TrainingEstimate":
    """Parameters, FLOPs and memory of a stage; nothing is built or timed."""
    from paddock.train import estimate_training, load_init_config

    return estimate_training(settings, load_init_config(settings))


def estimate_step_s(settings: "TrainSettings", estimate: "TrainingEstimate") -> float | None:
    """Seconds per step, from a few timed steps on this machine; None if memory is too small."""
    from paddock.train import fits_in_memory, load_init_config, measure_step_time, pick_device

    if not fits_in_memory(estimate, pick_device(settings.compute.device)):
        return None
    return measure_step_time(settings, load_init_config(settings))
