"""`paddock eval`: a model in environments, on held-out tasks."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paddock import launch
from paddock.cli.options import QuantOption
from paddock.cli.tables import print_parts, table
from paddock.config import parse_overrides

if TYPE_CHECKING:
    from paddock.evals import EvalResult


def evaluate(  # noqa: PLR0913  one option each
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A checkpoint or a run folder.")],
    envs: Annotated[list[str], typer.Argument(metavar="ENV...", help="See paddock env list.")],
    num_tasks: Annotated[int, typer.Option(min=1, help="Held-out tasks per environment.")] = 200,
    rollouts_per_task: Annotated[int, typer.Option(min=1, help="For pass@k.")] = 1,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A=B", help="Override the environments' settings."),
    ] = None,
    enable_thinking: Annotated[bool, typer.Option(help="Let the model reason first.")] = True,
    context_management: Annotated[
        list[str] | None,
        typer.Option(
            "--context-management",
            metavar="A=B",
            help="How long conversations are shortened: strategy, recent_turns, max_tokens.",
        ),
    ] = None,
    context_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompt and reply; else the model's.")
    ] = None,
    quant: QuantOption = None,
    seed: Annotated[int, typer.Option(help="Of the sampling; tasks are always the same.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per environment.")
    ] = False,
) -> None:
    """Run rollouts on held-out tasks; print the mean reward with its standard error."""
    import json
    from dataclasses import asdict

    made = table("env", numbers=("reward", "± SE", "tasks", "mean turns", "pass@k", "not scored"))

    def on_result(name: str, result: "EvalResult") -> None:
        found = result.metrics
        if as_json:
            typer.echo(json.dumps({"env": name, **asdict(found)}))
            return
        passed = ", ".join(f"{k}: {share:.3f}" for k, share in found.pass_at_k.items())
        failed = ", ".join(f"{count} x {why}" for why, count in found.failures.items())
        numbers = (f"{found.mean_reward:.3f}", f"{found.stderr:.3f}", f"{found.num_tasks}")
        made.add_row(name, *numbers, f"{found.mean_turns:.1f}", passed, failed)

    launch.evaluate(
        model,
        envs,
        num_tasks=num_tasks,
        rollouts_per_task=rollouts_per_task,
        args=parse_overrides(sets or []),
        enable_thinking=enable_thinking,
        context_management=parse_overrides(context_management or []),
        context_length=context_length,
        quant=quant,
        seed=seed,
        on_result=on_result,
    )
    if not as_json:
        print_parts(made)
