"""The verb that measures a model in worlds."""

from pathlib import Path
from typing import Annotated

import typer

from paddock.cli.tables import print_parts, table
from paddock.config import parse_overrides
from paddock.launch.engines import open_model_folder
from paddock.launch.pipeline import SuiteSettings
from paddock.launch.suites import open_eval_engine, run_env_suite


def evaluate(  # noqa: PLR0913 (a verb has as many options as it needs)
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A checkpoint, or a run folder.")],
    worlds: Annotated[list[str], typer.Argument(metavar="WORLD...", help="See paddock env list.")],
    tasks: Annotated[int, typer.Option(min=1, help="Held-out tasks of each world.")] = 200,
    attempts: Annotated[int, typer.Option(min=1, help="At each task; for pass@k.")] = 1,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="A=B", help="Change the worlds' settings.")
    ] = None,
    thinking: Annotated[bool, typer.Option(help="Whether the model may think.")] = True,
    seed: Annotated[int, typer.Option(help="Of the sampling; tasks are always the same.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a world.")] = False,
) -> None:
    """Play held-out tasks and say how many were solved, and how sure that is."""
    import json
    from dataclasses import asdict

    changes = parse_overrides(sets or [])
    opened = open_model_folder(model, None)
    made = table("world", numbers=("score", "±", "tasks", "turns", "pass@k", "not judged"))
    with open_eval_engine(opened) as engine:
        for name in worlds:
            skill = SuiteSettings(
                name=name,
                env=name,
                args=changes,
                num_tasks=tasks,
                rollouts_per_task=attempts,
                enable_thinking=thinking,
                from_stage="",
            )
            found = run_env_suite(opened, engine, skill, seed).metrics
            if as_json:
                typer.echo(json.dumps({"world": name, **asdict(found)}))
                continue
            solved = ", ".join(f"{k}: {share:.3f}" for k, share in found.pass_at_k.items())
            lost = ", ".join(f"{count} x {why}" for why, count in found.failures.items())
            numbers = (f"{found.mean_reward:.3f}", f"{found.stderr:.3f}", f"{found.num_tasks}")
            made.add_row(name, *numbers, f"{found.mean_turns:.1f}", solved, lost)
    if not as_json:
        print_parts(made)
