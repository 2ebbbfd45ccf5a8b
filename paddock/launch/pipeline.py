"""Pipelines: stages in order, the suites run after each, and which of them are finished."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from paddock.config import BaseSettings, find_recipe, load_recipe, resolve
from paddock.journal import EVENTS_FILE, follow
from paddock.launch.errors import UserError

PIPELINE_FILE, OLD_PIPELINE_FILE = "pipeline.toml", "plan.toml"
StageCommand = Literal["train", "rl", "distill", "quantize"]
# Kinds of journal events, each with its name in older runs.
STAGE_FINISHED, STAGE_RESET = ("stage_finished", "stage_done"), ("stage_reset", "stage_undone")


class StageSettings(BaseSettings):
    """One stage: the same command that can be run alone."""

    name: str
    command: StageCommand = "train"
    recipe: str  # in the pipeline's folder
    description: str = ""  # what it is for, in a few words
    estimated_s: PositiveFloat | None = None  # a measured time, suites included
    overrides: tuple[str, ...] = ()  # as --set; {out} is the pipeline's folder, {seed} its seed
    model: str = ""  # of command "quantize": the stage whose model is quantized
    calibration_stages: tuple[str, ...] = ()  # likewise: the stages whose text calibrates it

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        if (self.command == "quantize") != bool(self.model):
            raise ValueError(
                f"stage {self.name!r}: 'model' names the stage to quantize and is required by "
                "command 'quantize' and no other"
            )
        return self


class SuiteSettings(BaseSettings):
    """One evaluation, run on the same held-out tasks after every stage from `from_stage` on."""

    name: str
    kind: Literal["env", "loss", "niah"] = "env"
    env: str = ""  # of kind "env": its name and settings
    args: Mapping[str, Any] = {}
    num_tasks: PositiveInt = 200  # of kind "loss": thousands of tokens
    rollouts_per_task: PositiveInt = 1
    from_stage: str  # the first stage after which it is run
    enable_thinking: bool = True
    context_management: Mapping[str, Any] = {}  # of kind "env": as a task's in a recipe of RL
    context_length: PositiveInt | None = None  # of kind "env": prompt and reply; None: the model's


class ResourceSettings(BaseSettings):
    """The hardware a pipeline is made for: --dry-run checks that every stage fits on it."""

    name: str
    accelerators: PositiveInt
    accelerator_memory_gib: PositiveFloat  # of each


class PipelineSettings(BaseSettings):
    seed: int = 0
    resources: ResourceSettings | None = None
    stages: tuple[StageSettings, ...]
    suites: tuple[SuiteSettings, ...] = ()

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError("two stages have the same name")
        for suite in self.suites:
            if suite.from_stage not in names:
                raise ValueError(f"suite {suite.name!r}: stage {suite.from_stage!r} not found")
        for number, stage in enumerate(self.stages):
            for parent in (stage.model, *stage.calibration_stages):
                if parent and parent not in names[:number]:
                    raise ValueError(f"stage {stage.name!r}: no earlier stage is called {parent!r}")
        return self

    def suites_after(self, stage: str) -> list[SuiteSettings]:
        names = [s.name for s in self.stages]
        return [s for s in self.suites if names.index(s.from_stage) <= names.index(stage)]


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """A stage of a pipeline with its run folder."""

    stage: StageSettings
    recipe: Path
    out: Path
    overrides: tuple[str, ...]
    digest: str  # of everything that decides its result, earlier stages included

    @property
    def model(self) -> Path:
        """Of command "quantize": the run whose model is quantized."""
        return self.out.parent / self.stage.model

    @property
    def calibration_runs(self) -> list[Path]:
        return [self.out.parent / stage for stage in self.stage.calibration_stages]

    @property
    def command_line(self) -> str:
        words: list[str | Path] = ["paddock", self.stage.command]
        if self.stage.command == "quantize":
            words += [self.model, self.out, "--recipe", self.recipe]
            words += [word for run in self.calibration_runs for word in ("--calibration-data", run)]
            words += ["--needles", "0"]
        else:
            words += [self.recipe, "--out", self.out]
        words += [word for change in self.overrides for word in ("--set", change)]
        return shlex.join(map(str, words))


def load_pipeline(path: Path, overrides: Sequence[str] = ()) -> tuple[Path, PipelineSettings]:
    """The pipeline in a file, in a folder's pipeline.toml, or bundled under that name, and the
    folder of its recipes."""
    path = find_recipe(path)
    file = path / PIPELINE_FILE if path.is_dir() else path
    if not file.is_file() and (old := file.with_name(OLD_PIPELINE_FILE)).is_file():
        raise UserError(f"{old}: rename it to {PIPELINE_FILE}")
    if not file.is_file():
        raise UserError(f"{file}: pipeline not found")
    return file.parent, resolve(PipelineSettings, load_recipe(file, list(overrides)))


def resolve_stages(pipeline: PipelineSettings, recipes: Path, out: Path) -> list[PipelineStage]:
    """The stages as commands. Pipelines whose digests agree up to a stage agree on its result."""
    found: list[PipelineStage] = []
    digest = ""
    for stage in pipeline.stages:
        recipe = recipes / stage.recipe
        overrides, anywhere = (
            _overrides(stage, folder, pipeline.seed) for folder in (out, "anywhere")
        )
        # The digest must not depend on where the run folder is.
        values = load_recipe(recipe, anywhere).values
        parts = [digest, stage.name, stage.command, values]
        if stage.model:
            parts += [stage.model, stage.calibration_stages]
        described = json.dumps(parts, sort_keys=True, default=str)
        digest = sha256(described.encode()).hexdigest()[:16]
        found.append(PipelineStage(stage, recipe, out / stage.name, overrides, digest))
    return found


def _overrides(stage: StageSettings, out: Path | str, seed: int) -> tuple[str, ...]:
    values = {"{out}": str(out), "{seed}": str(seed)}  # other braces are TOML's tables
    changes = [*stage.overrides, "seed={seed}"]
    for name, value in values.items():
        changes = [change.replace(name, value) for change in changes]
    return tuple(changes)


def finished_stages(out: Path) -> dict[str, str]:
    """Digests of the stages that are finished in this folder, by name."""
    found: dict[str, str] = {}
    for event in read_events(out):
        if event.get("kind") in STAGE_FINISHED:
            found[event["stage"]] = event["digest"]
        elif event.get("kind") in STAGE_RESET:
            found.pop(event["stage"], None)
    return found


def finished_suites(out: Path) -> set[tuple[str, str]]:
    """Pairs of stage and suite that were measured since the stage was last finished."""
    found: set[tuple[str, str]] = set()
    for event in read_events(out):
        if event.get("kind") == "suite_result":
            found.add((event["stage"], event["suite"]))
        elif event.get("kind") == "skill":  # of an older run
            found.add((event["stage"], event["skill"]))
        elif event.get("kind") in (*STAGE_FINISHED, *STAGE_RESET):
            found = {pair for pair in found if pair[0] != event["stage"]}
    return found


def read_events(out: Path) -> list[dict[str, Any]]:
    if not (out / EVENTS_FILE).is_file():
        return []
    return [record for record, _ in follow(out / EVENTS_FILE) if isinstance(record, dict)]
