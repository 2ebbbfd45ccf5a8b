"""`paddock distill`: earlier stages' checkpoints teach the last one."""

from pathlib import Path
from typing import Annotated

import typer

from paddock import launch
from paddock.cli.rl import run_rl


def distill(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="A TOML recipe whose stage is 'distill'.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Run folder. Default: runs/RECIPE'S FOLDER/NAME.")
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override one setting.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved recipe, and stop.")
    ] = False,
) -> None:
    """Distil teachers from earlier stages into one student, on the student's own rollouts."""
    launch.settings.check_distill_recipe(recipe, sets or [])
    run_rl(recipe, out, sets or [], dry_run=dry_run)
