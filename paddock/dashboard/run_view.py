"""A run folder as read from disk: metrics, events and recipe, also of damaged runs."""

import json
import os
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import copysign, inf
from pathlib import Path
from statistics import median
from typing import Any

from paddock.dashboard import old_names
from paddock.dashboard.old_names import metric_name, rename_event, rename_keys
from paddock.dashboard.series import MetricSeries
from paddock.journal import EVENTS_FILE, METRICS_FILE, follow

RECIPE = "recipe.toml"
PROGRESS = {"step", "time", "tokens", "step_time_s"}  # columns of metrics.jsonl without a curve


class ReportError(ValueError):
    """A run cannot be read; the message says why."""


@dataclass(frozen=True, kw_only=True)
class RunView:
    """What a run recorded.

    `lines` are its steps in order. Where a run resumed from a checkpoint, the steps after that
    checkpoint were recomputed and only the later record counts. `warnings` say what is unreadable.
    """

    path: Path
    recipe_text: str
    recipe: Mapping[str, Any]
    lines: tuple[Mapping[str, float], ...]
    events: tuple[Mapping[str, Any], ...]
    warnings: tuple[str, ...]

    @property
    def name(self) -> str:
        """The last two parts of the path: recipe and stage."""
        return " / ".join(self.path.resolve().parts[-2:])

    @property
    def steps_done(self) -> int:
        return int(self.lines[-1]["step"]) if self.lines else 0

    @property
    def steps_planned(self) -> int | None:
        planned = parse_number_or_none(
            self.latest_event_value("started", "of")
        ) or parse_number_or_none(self.recipe.get("steps"))
        return int(planned) if planned and _is_valid("step", planned) else None

    @cached_property
    def tokens(self) -> list[float]:
        """Cumulative tokens after each step; empty if the run does not record them."""
        total, found = 0.0, []
        for line in self.lines:
            if "tokens" not in line:
                return []
            total += line["tokens"]
            found.append(total)
        return found

    @cached_property
    def progress(self) -> tuple[str, list[float]]:
        """The x-axis of curves and its values: tokens, or steps if those are not recorded.

        In RL it is steps: the number of sampled tokens says little about training progress.
        """
        steps = [line["step"] for line in self.lines]
        if "policy_loss" in self.metrics or "reward" in self.metrics:
            return "steps", steps
        return ("tokens", self.tokens) if self.tokens else ("steps", steps)

    @cached_property
    def metrics(self) -> list[str]:
        """Names of the metrics, in order of first appearance."""
        return [
            name
            for name in dict.fromkeys(n for line in self.lines for n in line)
            if name not in PROGRESS
        ]

    def curve(self, metric: str, name: str | None = None) -> MetricSeries:
        """A metric over the run's progress, with marks if less than half of the steps have it."""
        steps = zip(self.progress[1], self.lines, strict=True)
        found = [(x, line) for x, line in steps if metric in line]
        return MetricSeries(
            name=name or metric.replace("_", " "),
            x=[x for x, _ in found],
            y=[line[metric] for _, line in found],
            step=[line["step"] for _, line in found],
            marks=2 * len(found) < len(self.lines),
        )

    def latest_event_value(self, kind: str, field: str) -> Any:
        """The newest value of a field of such an event; None if there is none."""
        found = [e[field] for e in self.events if e.get("kind") == kind and field in e]
        return found[-1] if found else None

    def latest_positive_value(self, kind: str, field: str) -> float | None:
        """As `latest_event_value`, but None unless it is a finite number above zero."""
        value = parse_number_or_none(self.latest_event_value(kind, field))
        return value if value is not None and 0 < value < inf else None

    def status(self, now: float) -> str:
        """'finished', 'running' or 'stopped'.

        A run without updates for much longer than its steps take is considered stopped.
        """
        starts, ends = ("started", "pipeline_started"), ("finished", "pipeline_finished")
        kinds = [e.get("kind") for e in self.events if e.get("kind") in (*starts, *ends)]
        planned = self.steps_planned
        if kinds and kinds[-1] in ends:
            return "finished"
        if not kinds and planned is not None and self.steps_done >= planned:
            return "finished"  # events.jsonl is lost, metrics.jsonl is not
        last = max((record.get("time", 0.0) for record in (*self.lines, *self.events)), default=0.0)
        if "pipeline_started" in kinds:  # only the run of its current stage is updated
            stages = (_stamp(file) for file in self.path.glob(f"*/{METRICS_FILE}"))
            last = max([last, *(stamp[2] / 1e9 for stamp in stages if stamp is not None)])
        seconds = [line["step_time_s"] for line in self.lines[-50:] if "step_time_s" in line]
        timeout = max(120.0, 20 * median(seconds) if seconds else 600.0)
        return "running" if now - last < timeout else "stopped"


def read_run(path: str | Path) -> RunView:
    """Read a run folder. Raises ReportError if there is none."""
    folder = Path(path)
    if not folder.is_dir():
        raise ReportError(f"{folder}: folder not found")
    if not any(is_own_file(folder / name) for name in (METRICS_FILE, EVENTS_FILE)):
        raise ReportError(
            f"{folder}: not a run folder, it holds neither {METRICS_FILE} nor {EVENTS_FILE}"
            f"{_nested_runs(folder)}"
        )
    return LiveRunView(folder).refresh()


Stamp = tuple[int, int, int] | None  # inode, size, time of modification


class LiveRunView:
    """A run that may still be written: each refresh reads what was added since the last."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamps: tuple[Stamp, ...] = ()
        self._reset()

    def _reset(self) -> None:
        self._metrics, self._events = (
            JsonlReader(self.path / METRICS_FILE),
            JsonlReader(self.path / EVENTS_FILE),
        )
        self._lines: list[dict[str, float]] = []
        self._seen_events: list[Mapping[str, Any]] = []
        self._run: RunView | None = None

    def refresh(self) -> RunView:
        """The run as it is now. Raises ReportError if its files are gone."""
        stamps = tuple(_stamp(self.path / name) for name in (METRICS_FILE, EVENTS_FILE, RECIPE))
        if not any(stamps[:2]):
            raise ReportError(f"{self.path}: run not found")
        if self._run is not None and stamps == self._stamps:
            return self._run
        if any(map(_rewritten, self._stamps[:2], stamps)):
            self._reset()
        for record in self._metrics.read_new():
            append_step(self._lines, record)
        self._seen_events += [
            with_valid_time(rename_event(event)) for event in self._events.read_new()
        ]
        text, recipe, warning = read_recipe(self.path / RECIPE)
        warnings = (warning, self._metrics.warning, self._events.warning)
        self._run = RunView(
            path=self.path,
            recipe_text=text,
            recipe=recipe,
            lines=tuple(self._lines),
            events=tuple(self._seen_events),
            warnings=tuple(filter(None, warnings)),
        )
        self._stamps = stamps
        return self._run


def is_own_file(path: Path) -> bool:
    """Whether the path is a regular file and not a link.

    A run could link to files elsewhere, which the dashboard must not show.
    """
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def missing_file_note(path: Path) -> str:
    return f"{path.name} is {'a link, which is not followed' if path.is_symlink() else 'missing'}"


def _stamp(path: Path) -> Stamp:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _rewritten(before: Stamp, now: Stamp) -> bool:
    """Whether a file was replaced or truncated since it was read."""
    if before is None:
        return False
    return now is None or now[0] != before[0] or now[1] < before[1]


def append_step(lines: list[dict[str, float]], record: Mapping[str, Any]) -> None:
    """Add a record of metrics.jsonl, replacing earlier records of the same and later steps.

    Values that are not numbers are left out, and so are records without a step.
    """
    read = {metric_name(name): parse_number_or_none(value) for name, value in record.items()}
    line = {name: v for name, v in read.items() if v is not None and _is_valid(name, v)}
    if "step" not in line:
        return
    while lines and lines[-1]["step"] >= line["step"]:
        lines.pop()
    lines.append(line)


def with_valid_time(event: dict[str, Any]) -> dict[str, Any]:
    """The event, without its time if that is not a valid one."""
    when = parse_number_or_none(event.get("time"))
    rest = {name: value for name, value in event.items() if name != "time"}
    return rest if when is None or not _is_valid("time", when) else {"time": when, **rest}


def _nested_runs(folder: Path) -> str:
    inside = sorted(file.parent.name for file in folder.glob(f"*/{METRICS_FILE}"))
    return f"; runs in it: {', '.join(inside[:8])}" if inside else ""


class JsonlReader:
    """Reads new records of a growing JSONL file, up to the first damaged line."""

    def __init__(self, path: Path) -> None:
        self.path, self.warning = path, ""
        self._offset = self._count = 0
        self._damaged = False

    def read_new(self) -> list[dict[str, Any]]:
        """Records added since the last call. Sets `warning` if the file is missing or damaged."""
        found: list[dict[str, Any]] = []
        if not self._damaged:
            self.warning = "" if is_own_file(self.path) else missing_file_note(self.path)
            if self.warning:
                return found
        try:
            for record, offset in () if self._damaged else follow(self.path, self._offset):
                if not isinstance(record, dict):
                    raise ValueError
                found.append(record)
                self._offset, self._count = offset, self._count + 1
        except ValueError:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
            self._damaged = True
            where = f"{self.path.name}: line {self._count + 1}"
            self.warning = f"{where} is damaged; the rest of the file is ignored"
        return found


def read_recipe(path: Path) -> tuple[str, dict[str, Any], str]:
    """The text, settings and warning of a recipe; keys of older runs are translated."""
    if not is_own_file(path):
        return "", {}, missing_file_note(path)
    text = path.read_text("utf-8", errors="replace")
    try:
        return text, _with_current_keys(tomllib.loads(text)), ""
    except tomllib.TOMLDecodeError as error:
        return text, {}, f"{path.name}: {error}"


def _with_current_keys(recipe: dict[str, Any]) -> dict[str, Any]:
    """
    >>> _with_current_keys({"steps": 2, "start": {"folder": "runs/sft"}})
    {'steps': 2, 'init': {'checkpoint': 'runs/sft'}}
    """
    for section in ("start", "machine"):
        if isinstance(recipe.get(section), dict):
            recipe |= rename_keys({section: recipe.pop(section)}, old_names.RECIPE)
    return recipe


def parse_number_or_none(value: object) -> float | None:
    """A number of the journal, which writes non-finite ones as text; None for anything else.

    Magnitudes beyond 1e100 become infinite, below 1e-100 zero: they cannot be drawn.

    >>> [parse_number_or_none(value) for value in (0.5, "NaN", -1e300, 10**400, True, "x")]
    [0.5, nan, -inf, inf, None, None]
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except OverflowError:  # an integer too large for a float
        return inf
    except ValueError:
        return None
    if abs(found) > 1e100:
        return copysign(inf, found)
    return 0.0 if abs(found) < 1e-100 else found


def _is_valid(name: str, value: float) -> bool:
    """Whether a value of a progress column is possible; metrics may have any value."""
    if name == "step":
        return 0 <= value < 1e15 and value == int(value)
    return name not in PROGRESS or 0 <= value < (1e11 if name == "time" else 1e15)


def format_setting(value: object) -> str:
    """A setting as text: strings as they are, others as JSON."""
    return value if isinstance(value, str) else json.dumps(value)
