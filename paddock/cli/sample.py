"""`paddock sample`: rejection sampling into a file of dialogues for fine-tuning."""

import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from paddock import launch
from paddock.cli.tables import print_parts, table
from paddock.config import parse_overrides

OUTCOMES = ("accepted", "duplicate", "rejected", "policy failure", "failed")


def sample(  # noqa: PLR0913  one option each
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint or run; with --base-url a name.")
    ],
    env: Annotated[str, typer.Argument(metavar="ENV", help="The environment of the tasks.")],
    out: Annotated[Path, typer.Option(help="JSONL of the accepted dialogues.")],
    n: Annotated[int, typer.Option(min=1, help="Completions per task.")] = 4,
    num_tasks: Annotated[int, typer.Option(min=1, help="Tasks.")] = 100,
    min_reward: Annotated[float, typer.Option(help="Lowest reward that is accepted.")] = 1.0,
    split: Annotated[Literal["train", "test"], typer.Option(help="Of the tasks.")] = "train",
    base_url: Annotated[
        str | None, typer.Option(help="An OpenAI-compatible server; else MODEL runs here.")
    ] = None,
    thinking: Annotated[
        Literal["interleaved", "preserved", "off"], typer.Option(help="Thinking mode.")
    ] = "interleaved",
    temperature: Annotated[float, typer.Option(min=0.0)] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Max tokens of a reply.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    max_concurrent: Annotated[int, typer.Option(min=1, help="Rollouts at a time.")] = 32,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A=B", help="Override the environment's settings."),
    ] = None,
) -> None:
    """Sample N completions per task and write those of at least MIN_REWARD as dialogues for
    fine-tuning, each with its origin.

    Run it again to resume: nothing is sampled or written twice. A higher --num-tasks or --n adds to
    the file.
    """
    progress = RejectionSamplingProgress()
    counts = launch.sample(
        model,
        env,
        out=out,
        n=n,
        num_tasks=num_tasks,
        min_reward=min_reward,
        split=split,
        base_url=base_url,
        thinking=thinking,
        temperature=temperature,
        max_tokens=max_tokens,
        seed=seed,
        max_concurrent=max_concurrent,
        args=parse_overrides(sets or []),
        on_start=progress.start,
        on_update=progress.update,
    )
    made = table("completions", numbers=("", "share"))
    for outcome in OUTCOMES:
        share = counts[outcome] / max(1, n * num_tasks)
        made.add_row(outcome, f"{counts[outcome]:,}", f"{share:.1%}")
    print_parts(made, f"dialogues: {out}")
    if counts["failed"]:
        raise launch.UserError(
            f"{counts['failed']} rollouts failed; run the same command to repeat them"
        )


class RejectionSamplingProgress:
    """A line from time to time, on stderr."""

    def __init__(self) -> None:
        self._total = self._seen = 0
        self._console = Console(stderr=True)
        self._started = self._printed_at = time.monotonic()

    def start(self, total: int) -> None:
        self._total = total
        self._started = self._printed_at = time.monotonic()

    def update(self, counts: Counter[str]) -> None:
        self._seen += 1
        now = time.monotonic()
        pause = 0.2 if self._console.is_terminal else 5
        if now - self._printed_at < pause and self._seen < self._total:
            return
        self._printed_at = now
        rate = self._seen / max(1e-9, now - self._started)
        remaining = (self._total - self._seen) / rate
        outcomes = ", ".join(f"{name} {number}" for name, number in sorted(counts.items()))
        text = (
            f"{self._seen}/{self._total} completions, {outcomes}; {rate:.1f}/s, "
            f"{remaining:.0f} s remaining"
        )
        end = "\r" if self._console.is_terminal and self._seen < self._total else "\n"
        self._console.print(text, end=end, highlight=False, soft_wrap=True)
