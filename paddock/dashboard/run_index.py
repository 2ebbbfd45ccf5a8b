"""Index of the runs below some folders, found by scanning.

A request names a run; only names found by the scan lead to a folder, never a path from a request.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from paddock.dashboard.metrics import metric_display
from paddock.dashboard.run_view import LiveRunView, ReportError, RunView, is_own_file
from paddock.dashboard.series import downsample, smooth_ema
from paddock.journal import EVENTS_FILE, LEDGER_FILE, METRICS_FILE

DEPTH = 4  # of folders below a root
MAX_RUNS = 2000
INSIDE = {"checkpoints", "corpora", "tokenizer"}  # subfolders of a run that hold no runs
RESCAN_INTERVAL_S = 2.0
POINTS = 1000  # of a downsampled curve
HEADLINE_METRICS = ("reward", "val_loss", "loss", "indexer_loss")  # the first that a run has


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One row of the list of runs."""

    run: str
    stage: str
    status: str
    step: int
    of: int | None
    seconds: float
    last_update: float | None
    metric: str  # headline metric
    value: float | None
    metrics: Sequence[str]
    ledger: bool
    pipeline: bool


class RunIndex:
    """The runs below `roots`, rescanned every RESCAN_INTERVAL_S at most."""

    def __init__(self, roots: Sequence[Path], *, clock: Callable[[], float] = monotonic) -> None:
        for root in roots:
            if not root.is_dir():
                raise ReportError(f"{root}: folder not found")
        self._roots, self._clock = list(roots), clock
        self._runs: dict[str, LiveRunView] = {}
        self._scanned: float | None = None

    def names(self) -> list[str]:
        self._scan()
        return list(self._runs)

    def run(self, name: str) -> RunView:
        """The run with what was written since the last call. Raises ReportError if unknown."""
        return self._find(name).refresh()

    def folder(self, name: str) -> Path:
        return self._find(name).path

    def contains(self, path: Path) -> bool:
        """Whether a path lies below one of the roots, with symbolic links resolved."""
        real = path.resolve()
        return any(real.is_relative_to(root.resolve()) for root in self._roots)

    def _find(self, name: str) -> LiveRunView:
        if name not in self._runs:
            self._scan()
        if name not in self._runs:
            raise ReportError(f"run {name!r} not found")
        return self._runs[name]

    def _scan(self) -> None:
        now = self._clock()
        if self._scanned is not None and now - self._scanned < RESCAN_INTERVAL_S:
            return
        self._scanned = now
        found = {}
        for root in self._roots:
            for path in _runs_in(root, DEPTH):
                name = self._name(root, path)
                found[name] = self._runs.get(name) or LiveRunView(path)
                if len(found) >= MAX_RUNS:
                    break
        self._runs = dict(sorted(found.items()))

    def _name(self, root: Path, path: Path) -> str:
        """Path of a run below its root, prefixed by the root's name if there are several roots.

        Roots of the same name are shown with their full path.
        """
        below = path.relative_to(root).as_posix()
        name = root.resolve().name
        if len(self._roots) == 1:
            return below if below != "." else name
        if sum(other.resolve().name == name for other in self._roots) > 1:
            name = root.resolve().as_posix()
        return name if below == "." else f"{name}/{below}"


def _runs_in(folder: Path, depth: int) -> Iterator[Path]:
    """Run folders below `folder`. Symbolic links are not followed: they may lead elsewhere."""
    with os.scandir(folder) as entries:
        every = sorted(entries, key=lambda entry: entry.name)
    names = {entry.name for entry in every}
    if METRICS_FILE in names or EVENTS_FILE in names:
        yield folder
    if depth == 0:
        return
    for entry in every:
        hidden = entry.name.startswith(".") or entry.name in INSIDE
        if not hidden and entry.is_dir(follow_symlinks=False):
            yield from _runs_in(Path(entry.path), depth - 1)


def summarize_run(name: str, run: RunView, now: float) -> RunSummary:
    """The row of a run in the list of runs."""
    headline = next((metric for metric in HEADLINE_METRICS if metric in run.metrics), "")
    curve = run.curve(headline).y if headline else []
    times = [record["time"] for record in (*run.lines[-1:], *run.events[-1:]) if "time" in record]
    return RunSummary(
        run=name,
        stage=str(run.recipe.get("stage", "")),
        status=run.status(now),
        step=run.steps_done,
        of=run.steps_planned,
        seconds=sum(line.get("step_time_s", 0.0) for line in run.lines),
        last_update=max(times, default=None),
        metric=headline,
        value=curve[-1] if curve else None,
        metrics=run.metrics,
        ledger=is_own_file(run.path / LEDGER_FILE),
        pipeline=any(event.get("kind") == "pipeline_started" for event in run.events),
    )


def curve_data(run: RunView, metric: str, *, smooth: float) -> Mapping[str, Any]:
    """A metric of a run as columns to draw, downsampled, with its moving average.

    `smooth` is the window of the average in points; at most 1: none.
    """
    found = run.curve(metric)
    shown = metric_display(metric)
    tokens = dict(zip((line["step"] for line in run.lines), run.tokens, strict=False))
    average = smooth_ema(found.y, smooth) if smooth > 1 and not found.marks else []
    kept = downsample(found.x, found.y, POINTS // 4)
    timed = [line for line in run.lines if "time" in line]
    times = {line["step"]: line["time"] - timed[0]["time"] for line in timed}
    return {
        "title": shown.title,
        "unit": shown.unit,
        "log": shown.log,
        "step": [found.step[i] for i in kept],
        "tokens": [tokens[found.step[i]] for i in kept] if tokens else [],
        "seconds": [times.get(found.step[i]) for i in kept],
        "y": [found.y[i] for i in kept],
        "smooth": [average[i] for i in kept] if average else [],
        "marks": found.marks,
    }
