"""`paddock run`: a pipeline, stage after stage, and the table of its suites."""

from pathlib import Path
from typing import Annotated

import typer

from paddock import launch
from paddock.cli.tables import print_parts, table


def run(
    pipeline: Annotated[
        Path,
        typer.Argument(metavar="PIPELINE", help="A folder with pipeline.toml, or such a file."),
    ],
    out: Annotated[Path | None, typer.Option(help="Default: runs/PIPELINE'S FOLDER.")] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A=B", help="Override the pipeline: seed=1"),
    ] = None,
    until: Annotated[str | None, typer.Option(help="The last stage to run.")] = None,
    restart_from: Annotated[
        str | None, typer.Option(help="Delete this stage and those after it first.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print stages, commands and estimates, and stop.")
    ] = False,
) -> None:
    """Run every stage of a recipe: from nothing to an agent. Run it again to resume.

    Finished stages are skipped; after each stage the same suites run on held-out tasks.
    """
    from paddock.dashboard import write_pipeline_report

    if dry_run:
        opened = launch.open_pipeline(pipeline, out=out, overrides=sets or [])
        _dry_run(opened, until, restart_from)
        return
    folder = launch.run_pipeline(
        pipeline,
        out=out,
        overrides=sets or [],
        until=until,
        restart_from=restart_from,
        callbacks=PipelineProgress(),
        execute=_execute,
    )
    _print_report(folder)
    print_parts(f"report: {write_pipeline_report(folder)}")


class PipelineProgress(launch.PipelineCallbacks):
    """A line for every stage and suite."""

    def on_estimate(self, seconds: float, *, first: bool) -> None:
        from paddock.dashboard import format_duration

        span = format_duration(seconds)
        if first:
            print_parts(f"estimated time: {span} on this machine")
        else:
            print_parts(f"      about {span} remaining")

    def on_stage_start(self, stage: launch.PipelineStage, number: int, total: int) -> None:
        print_parts(
            f"[{number}/{total}] {stage.stage.name}: {stage.stage.description}\n"
            f"      {stage.command_line}"
        )

    def on_stage_skipped(self, stage: launch.PipelineStage, number: int, total: int) -> None:
        print_parts(f"[{number}/{total}] {stage.stage.name}: already finished")

    def on_stage_end(
        self, stage: launch.PipelineStage, seconds: float, number: int, total: int
    ) -> None:
        from paddock.dashboard import format_duration

        print_parts(f"[{number}/{total}] {stage.stage.name}: {format_duration(seconds)}")

    def on_stage_failed(self, stage: launch.PipelineStage) -> None:
        typer.echo(f"stage {stage.stage.name} failed; run the same command to resume it", err=True)

    def on_suite_result(self, stage: launch.PipelineStage, result: object) -> None:  # noqa: ARG002
        print_parts(f"      {result}")


def _execute(stage: launch.PipelineStage) -> None:
    """The stage's command as it would run alone, with its progress and its report."""
    from paddock.cli.distill import distill
    from paddock.cli.quantize import quantize
    from paddock.cli.rl import rl
    from paddock.cli.train import train

    sets = list(stage.overrides)
    if stage.stage.command == "quantize":
        recipe, runs = str(stage.recipe), stage.calibration_runs
        # No needles: the suites of the pipeline evaluate every stage.
        quantize(stage.model, stage.out, recipe, sets, calibration_data=runs, needles=0)
    elif stage.stage.command == "rl":
        rl(stage.recipe, out=stage.out, sets=sets)
    elif stage.stage.command == "distill":
        distill(stage.recipe, out=stage.out, sets=sets)
    else:
        train(stage.recipe, out=stage.out, sets=sets)


def _dry_run(pipeline: launch.PipelineRun, until: str | None, restart_from: str | None) -> None:
    todo = pipeline.until(until)
    reset = {step.stage.name for step in pipeline.starting_at(restart_from)}
    done = pipeline.finished()
    for number, step in enumerate(todo, start=1):
        name = step.stage.name
        state = "done" if name not in reset and done.get(name) == step.digest else "to do"
        print_parts(f"[{number}/{len(todo)}] {name}: {step.stage.description} ({state})")
        print_parts(f"      {step.command_line}")
        for line in launch.dry_run.describe_stage(step, pipeline.settings.resources):
            print_parts(f"      {line}")
    for line in launch.dry_run.missing_pipeline_data(pipeline.settings, todo):
        print_parts(line)


def _print_report(folder: Path) -> None:
    from paddock.dashboard import format_duration, read_pipeline_report

    report = read_pipeline_report(folder)
    made = table("stage", numbers=(*report.metrics, "time"))
    for stage in report.stages:
        cells = ["" if (s := stage.scores.get(k)) is None else f"{s:.3f}" for k in report.metrics]
        made.add_row(stage.name, *cells, format_duration(stage.seconds))
    made.add_row("retained (last/best)", *(report.retained(m) for m in report.metrics), "")
    print_parts(made)
