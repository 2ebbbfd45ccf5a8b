"""`paddock report`: a page of a run, or one that compares several."""

from glob import glob
from pathlib import Path
from typing import Annotated

import typer

from paddock.launch import UserError


def report(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help="Run folders; with --compare also NAME=RUN,RUN,..."),
    ],
    compare: Annotated[
        bool, typer.Option("--compare", help="One page that compares them, one arm each.")
    ] = False,
    metric: Annotated[
        str | None, typer.Option(help="Metric of the comparison. Default: validation loss.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The page. Default: report.html in the run, or ./comparison.html."),
    ] = None,
) -> None:
    """Write report.html: curves, evaluations, recipe and timing of a run, finished or not.

    An ablation: paddock report --compare "split=runs/split-*" adamw=runs/adamw-0,runs/adamw-1
    """
    from paddock.dashboard import write_comparison, write_report

    if compare:
        page = write_comparison(_arms(runs), out or Path("comparison.html"), metric=metric)
        typer.echo(f"comparison: {page}")
        return
    if metric is not None:
        raise UserError("--metric needs --compare")
    if out is not None and len(runs) > 1:
        raise UserError(f"--out names one page, but {len(runs)} runs were given")
    for run in runs:
        typer.echo(f"report: {write_report(run, out)}")


def _arms(words: list[str]) -> dict[str, list[str]]:
    """Arms by name; an unnamed folder is an arm of its own name.

    >>> _arms(["split=a,b", "runs/adamw"])
    {'split': ['a', 'b'], 'adamw': ['runs/adamw']}
    """
    arms: dict[str, list[str]] = {}
    for word in words:
        name, sign, folders = word.partition("=")
        parts = [part for part in folders.split(",") if part]
        if not sign or Path(word).is_dir():  # a folder's own name may contain them
            name, parts = Path(word).resolve().name, [word]
        if not name or not parts:
            raise UserError(f"'{word}' is not an arm such as NAME=RUN,RUN")
        if name in arms:
            raise UserError(f"two arms are called '{name}'; give them names: NAME=RUN,RUN")
        arms[name] = [found for part in parts for found in _expand(part)]
    return arms


def _expand(pattern: str) -> list[str]:
    """A folder, or those that a pattern matches."""
    if Path(pattern).exists() or not any(sign in pattern for sign in "*?["):
        return [pattern]
    found = sorted(path for path in glob(pattern) if Path(path).is_dir())
    if not found:
        raise UserError(f"'{pattern}' matches no folder")
    return found
