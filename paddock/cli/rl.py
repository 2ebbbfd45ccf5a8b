"""`paddock rl`: reinforcement learning from one recipe, its estimate and its progress."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from paddock import launch
from paddock.cli.rl_progress import RLProgress
from paddock.cli.tables import print_parts, table

if TYPE_CHECKING:
    from paddock.rl import RLSettings

Debug = Literal["rollout-only", "train-only"]


def rl(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A TOML recipe of an RL stage.")],
    out: Annotated[
        Path | None, typer.Option(help="Run folder. Default: runs/RECIPE'S FOLDER/NAME.")
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override one setting.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved recipe, and stop.")
    ] = False,
    debug: Annotated[
        Debug | None,
        typer.Option(help="rollout-only: nothing is trained. train-only: from --replay."),
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="A run folder whose recorded batches are trained again.")
    ] = None,
) -> None:
    """Train by reinforcement; run the same command to resume from the newest checkpoint.

    Rollouts are kept in the run folder and can be trained again without engines:
    paddock rl RECIPE --debug train-only --replay RUN --out OTHER
    """
    run_rl(recipe, out, sets or [], dry_run=dry_run, debug=debug, replay=replay)


def run_rl(
    recipe: Path,
    out: Path | None,
    sets: Sequence[str],
    *,
    dry_run: bool = False,
    debug: Debug | None = None,
    replay: Path | None = None,
) -> None:
    """What the commands `rl` and `distill` do."""
    from paddock.dashboard import write_report

    if dry_run:
        _dry_run(launch.settings.load_rl_settings(recipe, sets))
        return
    folder = out or launch.settings.default_run_dir(recipe)
    try:
        with RLProgress() as progress:
            launch.rl(
                recipe, out=folder, overrides=sets, debug=debug, replay=replay, callbacks=progress
            )
    except KeyboardInterrupt:
        typer.echo(
            f"interrupted; run the same command to resume from the last checkpoint in {folder}"
        )
        raise typer.Exit(130) from None
    print_parts(f"done: {folder / 'checkpoints'}\nreport: {write_report(folder)}")


def _dry_run(settings: "RLSettings") -> None:
    from paddock.config import dump_toml

    launch.dry_run.check_environments(settings)
    print_parts(dump_toml(settings).rstrip(), _estimate_table(settings))
    required = launch.dry_run.rl_data_files(settings)
    for line in launch.dry_run.missing_files(("", file) for file in required):
        print_parts(line)


def _estimate_table(settings: "RLSettings") -> Table:
    """Groups and rollouts of the run, task by task."""
    rollout = settings.rollout
    ratios = sum(task.ratio for task in settings.tasks.values())
    made = table("task", "env", "teacher", numbers=("groups/batch", "group size"))
    rollouts = 0.0
    for name, task in settings.tasks.items():
        groups = rollout.groups_per_batch * task.ratio / ratios
        rollouts += groups * task.group_size
        made.add_row(name, task.env, task.teacher or "", f"{groups:.3g}", str(task.group_size))
    batches = settings.steps // rollout.updates_per_batch
    total = launch.units.format_count(int(batches * rollouts))
    made.add_row("total", f"{batches} batches", "", "", f"at least {total} rollouts")
    return made
