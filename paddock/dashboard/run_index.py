"""The runs under some folders: found by looking, named by where they lie, never by a request.

A request says the name of a run; only names that were found here lead to a folder.
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

DEPTH = 4  # folders below a given one
MAX_RUNS = 2000
INSIDE = {"checkpoints", "corpora", "tokenizer"}  # of a run; none lies in there
RESCAN_INTERVAL_S = 2.0  # between two looks for new runs
POINTS = 1000  # of a curve
HEADLINE_METRICS = ("reward", "held_out", "loss", "indexer")  # the first a run has says how it does


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One line of the list of runs."""

    run: str
    stage: str
    status: str
    step: int
    of: int | None
    seconds: float
    seen: float | None  # when it last said something
    metric: str  # the number that tells most
    value: float | None
    metrics: Sequence[str]
    ledger: bool
    plan: bool


class RunIndex:
    def __init__(self, roots: Sequence[Path], *, clock: Callable[[], float] = monotonic) -> None:
        for root in roots:
            if not root.is_dir():
                raise ReportError(f"{root}: no such folder")
        self._roots, self._clock = list(roots), clock
        self._runs: dict[str, LiveRunView] = {}
        self._looked: float | None = None

    def names(self) -> list[str]:
        self._look()
        return list(self._runs)

    def run(self, name: str) -> RunView:
        return self._find(name).refresh()

    def folder(self, name: str) -> Path:
        return self._find(name).path

    def contains(self, path: Path) -> bool:
        """Whether a path lies in one of the folders that were given."""
        real = path.resolve()
        return any(real.is_relative_to(root.resolve()) for root in self._roots)

    def _find(self, name: str) -> LiveRunView:
        if name not in self._runs:
            self._look()
        if name not in self._runs:
            raise ReportError(f"there is no run called {name!r}")
        return self._runs[name]

    def _look(self) -> None:
        now = self._clock()
        if self._looked is not None and now - self._looked < RESCAN_INTERVAL_S:
            return
        self._looked = now
        found = {}
        for root in self._roots:
            for path in _runs_in(root, DEPTH):
                name = self._name(root, path)
                found[name] = self._runs.get(name) or LiveRunView(path)
                if len(found) >= MAX_RUNS:
                    break
        self._runs = dict(sorted(found.items()))

    def _name(self, root: Path, path: Path) -> str:
        """Where it lies below its root; with the root's own name where that is all or not enough.

        Two roots of one name are told apart by what stands above them.
        """
        below = path.relative_to(root).as_posix()
        name = root.resolve().name
        if len(self._roots) == 1:
            return below if below != "." else name
        if sum(other.resolve().name == name for other in self._roots) > 1:
            name = root.resolve().as_posix()
        return name if below == "." else f"{name}/{below}"


def _runs_in(folder: Path, depth: int) -> Iterator[Path]:
    """Links are not followed: what is shown lies in the folders that were given."""
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
    telling = next((metric for metric in HEADLINE_METRICS if metric in run.metrics), "")
    curve = run.curve(telling).y if telling else []
    times = [record["time"] for record in (*run.lines[-1:], *run.events[-1:]) if "time" in record]
    return RunSummary(
        run=name,
        stage=str(run.recipe.get("stage", "")),
        status=run.status(now),
        step=run.steps_done,
        of=run.steps_planned,
        seconds=sum(line.get("seconds", 0.0) for line in run.lines),
        seen=max(times, default=None),
        metric=telling,
        value=curve[-1] if curve else None,
        metrics=run.metrics,
        ledger=is_own_file(run.path / LEDGER_FILE),
        plan=any(event.get("kind") == "plan" for event in run.events),
    )


def curve_data(run: RunView, metric: str, *, smooth: float) -> Mapping[str, Any]:
    """A metric of a run as columns to draw; of many points, those that a picture shows."""
    found = run.curve(metric)
    shown = metric_display(metric)
    seen = dict(zip((line["step"] for line in run.lines), run.tokens, strict=False))
    average = smooth_ema(found.y, smooth) if smooth > 1 and not found.marks else []
    kept = downsample(found.x, found.y, POINTS // 4)
    timed = [line for line in run.lines if "time" in line]
    times = {line["step"]: line["time"] - timed[0]["time"] for line in timed}
    return {
        "title": shown.title,
        "unit": shown.unit,
        "log": shown.log,
        "step": [found.step[i] for i in kept],
        "tokens": [seen[found.step[i]] for i in kept] if seen else [],
        "seconds": [times.get(found.step[i]) for i in kept],
        "y": [found.y[i] for i in kept],
        "smooth": [average[i] for i in kept] if average else [],
        "marks": found.marks,
    }
