"""A plan: stages in order, what is measured after each, and what of it is already done."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from paddock.cli.errors import UserError
from paddock.config import BaseSettings, load_recipe, resolve
from paddock.journal import EVENTS_FILE, follow

PIPELINE_FILE = "pipeline.toml"
StageCommand = Literal["train", "rl", "distill", "quantize"]


class StageSettings(BaseSettings):
    """One stage: the same command that a person can run alone."""

    name: str
    command: StageCommand = "train"
    recipe: str  # beside the plan
    description: str = ""  # what it is for, in a few words
    estimated_s: PositiveFloat | None = None  # it took once, measuring included: for the estimate
    overrides: tuple[str, ...] = ()  # as --set; {out} is the run's folder, {seed} the run's seed
    model: str = ""  # of verb "quantize": the stage whose model becomes integers
    calibration_stages: tuple[
        str, ...
    ] = ()  # likewise: the stages with whose text it is calibrated

    @model_validator(mode="after")
    def _fits_its_verb(self) -> Self:
        if (self.command == "quantize") != bool(self.model):
            raise ValueError(
                f"stage {self.name!r}: 'model' names the stage that is quantized, for that verb "
                "and no other"
            )
        return self


class SuiteSettings(BaseSettings):
    """One thing a model can do, measured on the same held-out tasks after every stage."""

    name: str
    kind: Literal["world", "loss", "needles"] = "world"
    env: str = ""  # of kind "world": its name and settings
    args: Mapping[str, Any] = {}
    num_tasks: PositiveInt = 200  # of kind "loss": thousands of tokens
    rollouts_per_task: PositiveInt = 1  # at each task
    from_stage: str  # the first stage after which it is measured
    enable_thinking: bool = True  # whether the model may think before it answers


class ResourceSettings(BaseSettings):
    """The machines a plan is made for: --dry-run checks that every stage fits on them."""

    name: str
    accelerators: PositiveInt
    accelerator_memory_gib: PositiveFloat  # of memory of each


class PipelineSettings(BaseSettings):
    seed: int = 0
    resources: ResourceSettings | None = None
    stages: tuple[StageSettings, ...]
    suites: tuple[SuiteSettings, ...] = ()

    @model_validator(mode="after")
    def _names(self) -> Self:
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError("two stages have the same name")
        for skill in self.suites:
            if skill.from_stage not in names:
                raise ValueError(f"skill {skill.name!r}: no stage is called {skill.from_stage!r}")
        for number, stage in enumerate(self.stages):
            for parent in (stage.model, *stage.calibration_stages):
                if parent and parent not in names[:number]:
                    raise ValueError(f"stage {stage.name!r}: no earlier one is called {parent!r}")
        return self

    def suites_after(self, stage: str) -> list[SuiteSettings]:
        names = [s.name for s in self.stages]
        return [s for s in self.suites if names.index(s.from_stage) <= names.index(stage)]


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """A stage of a plan in a certain folder."""

    stage: StageSettings
    recipe: Path
    out: Path
    overrides: tuple[str, ...]
    digest: str  # of everything that decides how it ends, earlier stages included

    @property
    def model(self) -> Path:
        """Of verb "quantize": what becomes integers."""
        return self.out.parent / self.stage.model

    @property
    def calibration_runs(self) -> list[Path]:
        return [self.out.parent / text for text in self.stage.calibration_stages]

    @property
    def command_line(self) -> str:
        words: list[str | Path] = ["paddock", self.stage.command]
        if self.stage.command == "quantize":
            words += [self.model, self.out, "--recipe", self.recipe]
            words += [word for text in self.calibration_runs for word in ("--text", text)]
            words += ["--needles", "0"]
        else:
            words += [self.recipe, "--out", self.out]
        words += [word for change in self.overrides for word in ("--set", change)]
        return shlex.join(map(str, words))


def load_pipeline(path: Path, sets: list[str]) -> tuple[Path, PipelineSettings]:
    """The plan in a file, or in a folder's plan.toml, and the folder its recipes are in."""
    file = path / PIPELINE_FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{file}: no such plan")
    return file.parent, resolve(PipelineSettings, load_recipe(file, sets))


def resolve_stages(plan: PipelineSettings, recipes: Path, out: Path) -> list[PipelineStage]:
    """The stages as commands. Two plans whose digests agree up to a stage agree on its result."""
    found: list[PipelineStage] = []
    digest = ""
    for stage in plan.stages:
        recipe = recipes / stage.recipe
        sets, anywhere = (_sets(stage, place, plan.seed) for place in (out, "anywhere"))
        # Where a run lies decides nothing about how it ends.
        values = load_recipe(recipe, anywhere).values
        parts = [digest, stage.name, stage.command, values]
        if stage.model:
            parts += [stage.model, stage.calibration_stages]
        told = json.dumps(parts, sort_keys=True, default=str)
        digest = sha256(told.encode()).hexdigest()[:16]
        found.append(PipelineStage(stage, recipe, out / stage.name, sets, digest))
    return found


def _sets(stage: StageSettings, out: Path | str, seed: int) -> tuple[str, ...]:
    told = {"{out}": str(out), "{seed}": str(seed)}  # other braces are TOML's tables
    changes = [*stage.overrides, "seed={seed}"]
    for name, value in told.items():
        changes = [change.replace(name, value) for change in changes]
    return tuple(changes)


def finished_stages(out: Path) -> dict[str, str]:
    """Of each stage that was finished in this folder, its digest."""
    found: dict[str, str] = {}
    for event in read_events(out):
        if event.get("kind") == "stage_done":
            found[event["stage"]] = event["digest"]
        elif event.get("kind") == "stage_undone":
            found.pop(event["stage"], None)
    return found


def finished_suites(out: Path) -> set[tuple[str, str]]:
    """Stages and skills that were measured since the stage was last finished."""
    found: set[tuple[str, str]] = set()
    for event in read_events(out):
        if event.get("kind") == "skill":
            found.add((event["stage"], event["skill"]))
        elif event.get("kind") in ("stage_done", "stage_undone"):
            found = {pair for pair in found if pair[0] != event["stage"]}
    return found


def read_events(out: Path) -> list[dict[str, Any]]:
    if not (out / EVENTS_FILE).is_file():
        return []
    return [record for record, _ in follow(out / EVENTS_FILE) if isinstance(record, dict)]
