"""`paddock sample`: completions into dialogues for fine-tuning, or tasks by their pass rate."""

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
VERDICTS = ("kept", "too easy", "too hard", "not solved by either", "incomplete")


def sample(  # noqa: PLR0913  one option each
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint or run; with --base-url a name.")
    ],
    env: Annotated[str, typer.Argument(metavar="ENV", help="The environment of the tasks.")],
    out: Annotated[Path, typer.Option(help="JSONL of the accepted dialogues, or of the tasks.")],
    n: Annotated[int, typer.Option(min=1, help="Completions per task.")] = 4,
    num_tasks: Annotated[int, typer.Option(min=1, help="Tasks.")] = 100,
    min_reward: Annotated[float, typer.Option(help="Lowest reward that is accepted.")] = 1.0,
    pass_rate: Annotated[
        str | None,
        typer.Option(metavar="LO:HI", help="Write the tasks of such a pass rate, no dialogues."),
    ] = None,
    stronger_url: Annotated[
        str | None,
        typer.Option(help="An OpenAI-compatible server whose model must solve them sometimes."),
    ] = None,
    stronger_model: Annotated[
        str | None, typer.Option(help="Its name there; else the first that the server lists.")
    ] = None,
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

    With --pass-rate write the tasks that the model solves in such a share of its N completions.

    Run it again to resume: nothing is sampled or written twice. A higher --num-tasks or --n adds to
    the file.
    """
    if stronger_url is not None and pass_rate is None:
        raise launch.UserError("--stronger-url needs --pass-rate")
    progress = RejectionSamplingProgress()
    counts = launch.sample(
        model,
        env,
        out=out,
        n=n,
        num_tasks=num_tasks,
        min_reward=min_reward,
        pass_rate=None if pass_rate is None else parse_range(pass_rate),
        stronger_url=stronger_url,
        stronger_model=stronger_model,
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
    kind, shown = ("completions", OUTCOMES) if pass_rate is None else ("tasks", VERDICTS)
    made = table(kind, numbers=("", "share"))
    # Of the tasks all are counted; of the completions those of an earlier, larger N too.
    total = n * num_tasks if pass_rate is None else sum(counts[name] for name in VERDICTS)
    for name in shown:
        made.add_row(name, f"{counts[name]:,}", f"{counts[name] / max(1, total):.1%}")
    print_parts(made, f"{'dialogues' if pass_rate is None else 'tasks'}: {out}")
    if counts["failed"]:
        raise launch.UserError(
            f"{counts['failed']} rollouts failed; run the same command to repeat them"
        )


def parse_range(text: str) -> tuple[float, float]:
    """The lowest and highest pass rate of LO:HI.

    >>> parse_range("0.1:0.9")
    (0.1, 0.9)
    """
    try:
        low, high = map(float, text.split(":"))
    except ValueError:
        low, high = 1.0, 0.0
    if not 0 <= low <= high <= 1:
        raise launch.UserError(f"--pass-rate must be LO:HI with 0 <= LO <= HI <= 1, got {text!r}")
    return low, high


class RejectionSamplingProgress:
    """A line from time to time, on stderr."""

    def __init__(self) -> None:
        self._total = self._seen = 0
        self._console = Console(stderr=True)
        self._started = self._printed_at = time.monotonic()

    def start(self, total: int) -> None:
        self._total, self._seen = total, 0
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
