"""The verb that brings back what later stages forgot: earlier models teach the last one."""

from pathlib import Path
from typing import Annotated

import typer

from paddock.cli.errors import UserError
from paddock.cli.rl import run_rl


def distill(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="A TOML recipe whose stage is 'distill'.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Run folder. Default: runs/RECIPE'S FOLDER/NAME.")
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change one setting.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved recipe, and stop.")
    ] = False,
) -> None:
    """Distil teachers from earlier stages into one student, on what the student itself writes."""
    from paddock.config import load_recipe

    stage = load_recipe(recipe, sets or []).values.get("stage")
    if stage != "distill":
        raise UserError(f"{recipe}: its stage is {stage!r}, not 'distill'; see paddock rl")
    run_rl(recipe, out, sets or [], dry_run=dry_run)
