"""One training stage: pretraining, context extension, sparse adaptation, SFT."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paddock.launch.errors import UserError
from paddock.launch.settings import StrPath, default_run_dir, load_train_settings
from paddock.launch.trackers import Tracker, open_tracker

if TYPE_CHECKING:
    from paddock.train import StepMetrics, TrainSettings


def train(
    recipe: "StrPath | TrainSettings",
    *,
    out: StrPath | None = None,
    overrides: Sequence[str] = (),
    tracker: Tracker | None = None,
    on_message: Callable[[str], None] | None = None,
    on_update: "Callable[[StepMetrics], None] | None" = None,
) -> Path:
    """Train one stage and return its run folder; called again, it resumes.

    `recipe` is a TOML file or resolved settings, which need `out`. `on_update` gets the metrics of
    every step, `on_message` lines about what is prepared before the first one. Under torchrun every
    rank calls this, and only rank 0 calls back.
    """
    from paddock.parallel import is_rank_zero
    from paddock.train import TrainingRun
    from paddock.train import train as run_stage

    settings, folder = _settings_and_folder(recipe, out, overrides)
    run = TrainingRun(
        folder=folder,
        corpora_dir=folder.parent / "corpora",
        settings=settings,
        processes=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
    )
    if not is_rank_zero():
        run_stage(run)
        return folder
    with open_tracker(tracker, folder, settings.model_dump(mode="json")) as track:

        def update(metrics: "StepMetrics") -> None:
            track(metrics)
            if on_update is not None:
                on_update(metrics)

        run_stage(run, log=on_message or (lambda _: None), on_update=update)
    return folder


def _settings_and_folder(
    recipe: "StrPath | TrainSettings", out: StrPath | None, overrides: Sequence[str]
) -> "tuple[TrainSettings, Path]":
    if isinstance(recipe, str | os.PathLike):
        settings = load_train_settings(recipe, overrides)
        return settings, default_run_dir(recipe) if out is None else Path(out)
    if out is None or overrides:
        raise UserError("resolved settings need `out` and take no `overrides`")
    return recipe, Path(out)
