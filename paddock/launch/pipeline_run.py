"""A pipeline run stage after stage, with its suites after each; finished stages are skipped."""

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paddock.launch.distill import distill
from paddock.launch.errors import UserError
from paddock.launch.estimate import estimate_time
from paddock.launch.pipeline import (
    PipelineStage,
    finished_stages,
    finished_suites,
    load_pipeline,
    resolve_stages,
)
from paddock.launch.quantize import quantize
from paddock.launch.rl import rl
from paddock.launch.settings import StrPath
from paddock.launch.train import train

if TYPE_CHECKING:
    from paddock.journal import Journal
    from paddock.launch.pipeline import PipelineSettings
    from paddock.launch.suites import SuiteResult


class PipelineCallbacks:
    """What a caller may observe of a pipeline; override what is needed."""

    def on_estimate(self, seconds: float, *, first: bool) -> None:
        """About so many seconds remain, before the first stage or after one."""

    def on_stage_start(self, stage: PipelineStage, number: int, total: int) -> None: ...

    def on_stage_skipped(self, stage: PipelineStage, number: int, total: int) -> None:
        """The stage was finished by an earlier call."""

    def on_stage_end(
        self, stage: PipelineStage, seconds: float, number: int, total: int
    ) -> None: ...

    def on_stage_failed(self, stage: PipelineStage) -> None: ...

    def on_suite_result(self, stage: PipelineStage, result: "SuiteResult") -> None: ...


def run_stage(stage: PipelineStage) -> None:
    """Run the stage's command in this process."""
    if stage.stage.command == "quantize":
        # No needles: the suites of the pipeline evaluate every stage.
        quantize(
            stage.model,
            stage.out,
            recipe=str(stage.recipe),
            overrides=stage.overrides,
            calibration_data=stage.calibration_runs,
            needles=0,
        )
        return
    commands: dict[str, Callable[..., object]] = {"train": train, "rl": rl, "distill": distill}
    commands[stage.stage.command](stage.recipe, out=stage.out, overrides=stage.overrides)


def run_pipeline(  # noqa: PLR0913  keyword options of one command
    pipeline: StrPath,
    *,
    out: StrPath | None = None,
    overrides: Sequence[str] = (),
    until: str | None = None,
    restart_from: str | None = None,
    callbacks: PipelineCallbacks | None = None,
    execute: Callable[[PipelineStage], None] = run_stage,
) -> Path:
    """Run every stage of a pipeline up to `until`, then its suites; returns the folder of its runs.

    `pipeline` is a folder with pipeline.toml, or such a file. Called again, it skips finished
    stages and resumes the one that was interrupted. `restart_from` deletes that stage and those
    after it first. `execute` runs one stage; the command line passes one that shows progress.
    """
    opened = open_pipeline(pipeline, out=out, overrides=overrides)
    return opened.run(until, restart_from, callbacks or PipelineCallbacks(), execute)


def open_pipeline(
    pipeline: StrPath, *, out: StrPath | None = None, overrides: Sequence[str] = ()
) -> "PipelineRun":
    """Read a pipeline and check its suites, before anything is run."""
    from paddock.launch.suites import validate_suites

    recipes, settings = load_pipeline(Path(pipeline), overrides)
    validate_suites(settings.suites)
    folder = Path("runs") / recipes.resolve().name if out is None else Path(out)
    return PipelineRun(settings, folder, resolve_stages(settings, recipes, folder))


class PipelineRun:
    """A pipeline in a certain folder."""

    def __init__(
        self, settings: "PipelineSettings", folder: Path, stages: list[PipelineStage]
    ) -> None:
        self.settings, self.folder, self.stages = settings, folder, stages

    def finished(self) -> dict[str, str]:
        """Digests of the finished stages, by name."""
        return finished_stages(self.folder)

    def until(self, last: str | None) -> list[PipelineStage]:
        """The stages up to `last`; all of them if it is None."""
        return self.stages if last is None else self.stages[: self._index(last, "--until") + 1]

    def starting_at(self, first: str | None) -> list[PipelineStage]:
        """The stages from `first` on; none if it is None."""
        return [] if first is None else self.stages[self._index(first, "--restart-from") :]

    def _index(self, name: str, option: str) -> int:
        names = [step.stage.name for step in self.stages]
        if name not in names:
            raise UserError(f"{option} {name}: stages are {', '.join(names)}")
        return names.index(name)

    def run(
        self,
        until: str | None,
        restart_from: str | None,
        callbacks: PipelineCallbacks,
        execute: Callable[[PipelineStage], None],
    ) -> Path:
        from paddock.journal import Journal

        todo, reset = self.until(until), self.starting_at(restart_from)
        with Journal(self.folder) as journal:
            # Stages after `until` are reset too: they depend on what is restarted.
            for step in reset:
                journal.log_event("stage_reset", stage=step.stage.name)
                shutil.rmtree(step.out, ignore_errors=True)
            self._check_unchanged(todo)
            names = [step.stage.name for step in todo]
            journal.log_event("pipeline_started", stages=names, seed=self.settings.seed)
            self._run_stages(todo, journal, callbacks, execute)
            journal.log_event("pipeline_finished")
        return self.folder

    def _check_unchanged(self, todo: list[PipelineStage]) -> None:
        """Raise UserError for a finished stage whose recipe has changed since."""
        done = finished_stages(self.folder)
        for step in todo:
            name = step.stage.name
            if done.get(name, step.digest) != step.digest:
                raise UserError(
                    f"{step.out} was made by another recipe or from another parent; "
                    f"run it again with --restart-from {name}, or choose another folder with --out"
                )

    def _run_stages(
        self,
        todo: list[PipelineStage],
        journal: "Journal",
        callbacks: PipelineCallbacks,
        execute: Callable[[PipelineStage], None],
    ) -> None:
        done = finished_stages(self.folder)
        new = [step for step in todo if done.get(step.stage.name) != step.digest]
        estimate = estimate_time(self.stages, new)
        if estimate is not None:
            callbacks.on_estimate(estimate.remaining_s, first=True)
        for number, step in enumerate(todo, start=1):
            started = time.monotonic()
            if step not in new:
                callbacks.on_stage_skipped(step, number, len(todo))
            else:
                callbacks.on_stage_start(step, number, len(todo))
                seconds = _run_and_log(step, journal, callbacks, execute)
                callbacks.on_stage_end(step, seconds, number, len(todo))
            self._run_suites(step, journal, callbacks)
            if estimate is not None and step in new:
                estimate.stage_finished(step.stage.name, time.monotonic() - started)
                if estimate.remaining_s:
                    callbacks.on_estimate(estimate.remaining_s, first=False)

    def _run_suites(
        self, step: PipelineStage, journal: "Journal", callbacks: PipelineCallbacks
    ) -> None:
        import paddock.quant  # noqa: F401  registers the loader of quantized folders
        from paddock.launch.suites import run_suites

        name = step.stage.name
        before = finished_suites(self.folder)
        todo = [
            suite for suite in self.settings.suites_after(name) if (name, suite.name) not in before
        ]
        # A quantized folder has no dtype of its own: it is run in that of the model it came from.
        like = step.model if step.stage.command == "quantize" else None
        for result in run_suites(todo, step.out, seed=self.settings.seed, like=like):
            journal.log_event("suite_result", stage=name, **result.as_event())
            callbacks.on_suite_result(step, result)


def _run_and_log(
    step: PipelineStage,
    journal: "Journal",
    callbacks: PipelineCallbacks,
    execute: Callable[[PipelineStage], None],
) -> float:
    """Seconds that the stage took."""
    name = step.stage.name
    journal.log_event("stage_started", stage=name, command=step.command_line)
    started = time.monotonic()
    try:
        execute(step)
    except BaseException:
        callbacks.on_stage_failed(step)
        raise
    seconds = time.monotonic() - started
    journal.log_event(
        "stage_finished",
        stage=name,
        description=step.stage.description,
        command=step.stage.command,
        digest=step.digest,
        seconds=seconds,
    )
    return seconds
