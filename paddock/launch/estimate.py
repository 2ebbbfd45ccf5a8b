"""How long a plan will take on this machine: what its stages took when they were measured, times
how much slower this machine is."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paddock.launch.pipeline import PipelineStage


class TimeEstimate:
    """Seconds that are left. `slower` is a first guess, until stages of this very run say better.

    >>> estimate_time = TimeEstimate({"pretrain": 100, "sft": 50, "rl": 10}, slower=2.0)
    >>> estimate_time.remaining_s
    320.0
    >>> estimate_time.stage_finished("pretrain", 300.0)
    >>> estimate_time.remaining_s
    180.0
    """

    def __init__(self, seconds: Mapping[str, float], slower: float) -> None:
        self._todo, self._slower = dict(seconds), slower
        self._took = self._measured = 0.0

    @property
    def remaining_s(self) -> float:
        return sum(self._todo.values()) * self._slower

    def stage_finished(self, stage: str, took: float) -> None:
        """A stage took so long here, measuring its skills included."""
        self._measured += self._todo.pop(stage)
        self._took += took
        self._slower = self._took / self._measured


def estimate_time(
    every: Sequence["PipelineStage"], todo: Sequence["PipelineStage"]
) -> TimeEstimate | None:
    """For the stages that are still to do; None if the plan does not say how long they took."""
    seconds = {step.stage.name: step.stage.estimated_s for step in todo}
    known = {name: value for name, value in seconds.items() if value is not None}
    if not known or len(known) < len(seconds):
        return None
    return TimeEstimate(known, _slower(every[0]))


def _slower(step: "PipelineStage") -> float:
    """This machine against the one where the plan was measured, by a few steps of its first stage;
    1 where that cannot be tried."""
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
    with torch.random.fork_rng():  # the run must not notice
        # Of three, a busy machine may hold up two.
        seconds = measure_step_time(settings, config, steps=15)
    return settings.steps * seconds / step.stage.estimated_s
