"""The verb that runs a whole plan, stage after stage."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paddock.cli.errors import UserError
from paddock.cli.tables import print_parts, table
from paddock.dashboard import format_duration
from paddock.launch.estimate import estimate_time
from paddock.launch.pipeline import (
    PipelineStage,
    finished_stages,
    finished_suites,
    load_pipeline,
    resolve_stages,
)

if TYPE_CHECKING:
    from paddock.journal import Journal
    from paddock.launch.pipeline import PipelineSettings


def run(
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN", help="A folder with plan.toml, or such a file.")
    ],
    out: Annotated[Path | None, typer.Option(help="Default: runs/PLAN'S FOLDER.")] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="A=B", help="Change the plan: seed=1")
    ] = None,
    to: Annotated[str | None, typer.Option(help="The last stage to run.")] = None,
    redo: Annotated[
        str | None, typer.Option(help="Throw this stage and those after it away first.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print stages, commands and costs, and stop.")
    ] = False,
) -> None:
    """Run every stage of a recipe: from nothing to an agent. Called again, it goes on.

    Finished stages are skipped; what each is worth is measured on the same held-out tasks.
    """
    from paddock.dashboard import write_pipeline_report
    from paddock.journal import Journal
    from paddock.launch.suites import validate_suites

    recipes, wanted = load_pipeline(plan, sets or [])
    validate_suites(wanted.suites)
    folder = out or Path("runs") / recipes.resolve().name
    every = resolve_stages(wanted, recipes, folder)
    todo = _until(every, to)
    undone = _since(every, redo)  # those behind --to as well: they come of it
    if dry_run:
        _show_plan(wanted, todo, folder, {step.stage.name for step in undone})
        return
    with Journal(folder) as journal:
        for step in undone:
            journal.log_event("stage_undone", stage=step.stage.name)
            shutil.rmtree(step.out, ignore_errors=True)
        _refuse_changed(todo, folder)
        journal.log_event("plan", stages=[s.stage.name for s in todo], seed=wanted.seed)
        done = finished_stages(folder)
        expected = estimate_time(every, [s for s in todo if done.get(s.stage.name) != s.digest])
        if expected is not None:
            print_parts(f"expected: {format_duration(expected.remaining_s)} on this machine")
        for number, step in enumerate(todo, start=1):
            began, new = time.monotonic(), done.get(step.stage.name) != step.digest
            _run_stage(step, f"{number}/{len(todo)}", folder, journal)
            _measure(wanted, step, folder, journal)
            if expected is not None and new:
                expected.stage_finished(step.stage.name, time.monotonic() - began)
                if expected.remaining_s:
                    print_parts(f"      about {format_duration(expected.remaining_s)} left")
        journal.log_event("plan_done")
    _show_story(folder)
    print_parts(f"report: {write_pipeline_report(folder)}")


def _until(every: list[PipelineStage], last: str | None) -> list[PipelineStage]:
    names = [step.stage.name for step in every]
    if last is None:
        return every
    if last not in names:
        raise UserError(f"--to {last}: the stages are {', '.join(names)}")
    return every[: names.index(last) + 1]


def _since(every: list[PipelineStage], first: str | None) -> list[PipelineStage]:
    names = [step.stage.name for step in every]
    if first is None:
        return []
    if first not in names:
        raise UserError(f"--redo {first}: the stages are {', '.join(names)}")
    return every[names.index(first) :]


def _refuse_changed(todo: list[PipelineStage], folder: Path) -> None:
    """A finished stage whose recipe has changed is not what the plan asks for."""
    done = finished_stages(folder)
    for step in todo:
        name = step.stage.name
        if done.get(name, step.digest) != step.digest:
            raise UserError(
                f"{step.out} was made by another recipe, or from another parent; "
                f"run it anew with --redo {name}, or choose another folder with --out"
            )


def _run_stage(step: PipelineStage, place: str, folder: Path, journal: "Journal") -> None:
    name = step.stage.name
    if finished_stages(folder).get(name) == step.digest:
        print_parts(f"[{place}] {name}: done before")
        return
    print_parts(f"[{place}] {name}: {step.stage.description}\n      {step.command_line}")
    journal.log_event("stage_begun", stage=name, command=step.command_line)
    began = time.monotonic()
    try:
        _call(step)
    except BaseException:
        typer.echo(f"stage {name} did not end; the same command goes on with it", err=True)
        raise
    seconds = time.monotonic() - began
    journal.log_event(
        "stage_done",
        stage=name,
        about=step.stage.description,
        verb=step.stage.command,
        digest=step.digest,
        seconds=seconds,
    )
    print_parts(f"[{place}] {name}: {format_duration(seconds)}")


def _call(step: PipelineStage) -> None:
    """What the step's command does, in this process."""
    verb, sets = _verb(step.stage.command), list(step.overrides)
    if step.stage.command == "quantize":
        recipe, texts = str(step.recipe), step.calibration_runs
        # No needles: the plan's own skills say more, and of every stage.
        verb(step.model, step.out, recipe=recipe, texts=texts, needles=0, sets=sets)
    else:
        verb(step.recipe, out=step.out, sets=sets)


def _verb(name: str) -> Callable[..., None]:
    from paddock.cli.__main__ import COMMANDS

    verb = COMMANDS[name]
    assert not isinstance(verb, typer.Typer)
    return verb


def _measure(
    plan: "PipelineSettings", step: PipelineStage, folder: Path, journal: "Journal"
) -> None:
    import paddock.quant  # noqa: F401  so that stages that end in integers are read too
    from paddock.launch.suites import run_suites

    name = step.stage.name
    before = finished_suites(folder)
    todo = [skill for skill in plan.suites_after(name) if (name, skill.name) not in before]
    # Integers say nothing of what the rest is computed in: as the model they were.
    like = step.model if step.stage.command == "quantize" else None
    for result in run_suites(todo, step.out, seed=plan.seed, like=like):
        journal.log_event("skill", stage=name, **result.as_event())
        print_parts(f"      {result}")


def _show_plan(
    plan: "PipelineSettings", todo: list[PipelineStage], folder: Path, undone: set[str]
) -> None:
    from paddock.launch.dry_run import describe_stage, missing_pipeline_data

    done = finished_stages(folder)
    for number, step in enumerate(todo, start=1):
        name = step.stage.name
        state = "done" if name not in undone and done.get(name) == step.digest else "to do"
        print_parts(f"[{number}/{len(todo)}] {name}: {step.stage.description} ({state})")
        print_parts(f"      {step.command_line}")
        for line in describe_stage(step, plan.resources):
            print_parts(f"      {line}")
    for line in missing_pipeline_data(plan, todo):
        print_parts(line)


def _show_story(folder: Path) -> None:
    from paddock.dashboard import read_pipeline_report

    story = read_pipeline_report(folder)
    made = table("stage", numbers=(*story.metrics, "time"))
    for stage in story.stages:
        cells = ["" if (s := stage.scores.get(k)) is None else f"{s:.3f}" for k in story.metrics]
        made.add_row(stage.name, *cells, format_duration(stage.seconds))
    made.add_row("kept of the best", *(story.retained(skill) for skill in story.metrics), "")
    print_parts(made)
