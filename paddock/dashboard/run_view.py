"""A run folder as it lies on disk: read, never written, and never trusted to be whole."""

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

from paddock.dashboard.series import MetricSeries
from paddock.journal import EVENTS_FILE, METRICS_FILE, follow

RECIPE = "recipe.toml"
PROGRESS = {"step", "time", "tokens", "seconds"}  # of a line of metrics, not curves of their own


class ReportError(ValueError):
    """What cannot be reported, and why."""


@dataclass(frozen=True, kw_only=True)
class RunView:
    """What a run wrote down.

    `lines` are the steps that count, in order: where a run went back to a checkpoint, what it had
    done beyond it is forgotten, as the run itself forgot it. `complaints` says what was unreadable.
    """

    path: Path
    recipe_text: str
    recipe: Mapping[str, Any]
    lines: tuple[Mapping[str, float], ...]
    events: tuple[Mapping[str, Any], ...]
    warnings: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its recipe and its stage."""
        return " / ".join(self.path.resolve().parts[-2:])

    @property
    def steps_done(self) -> int:
        return int(self.lines[-1]["step"]) if self.lines else 0

    @property
    def steps_planned(self) -> int | None:
        planned = parse_number_or_none(
            self.latest_event_value("started", "of")
        ) or parse_number_or_none(self.recipe.get("steps"))
        return int(planned) if planned and _counts("step", planned) else None

    @cached_property
    def tokens(self) -> list[float]:
        """Seen after each step; empty where the run does not count them."""
        total, found = 0.0, []
        for line in self.lines:
            if "tokens" not in line:
                return []
            total += line["tokens"]
            found.append(total)
        return found

    @cached_property
    def progress(self) -> tuple[str, list[float]]:
        """What curves are drawn over, and how far each line has come: tokens, or steps where those
        are not counted. Of reinforcement, updates: long replies are no sign of much learning."""
        steps = [line["step"] for line in self.lines]
        if "policy_loss" in self.metrics or "reward" in self.metrics:
            return "updates", steps
        return ("tokens", self.tokens) if self.tokens else ("steps", steps)

    @cached_property
    def metrics(self) -> list[str]:
        """Names of the curves, in the order in which they first appear."""
        return [
            name
            for name in dict.fromkeys(n for line in self.lines for n in line)
            if name not in PROGRESS
        ]

    def curve(self, metric: str, name: str | None = None) -> MetricSeries:
        """A metric over the run's progress. It has marks where it was measured now and then
        only."""
        along = zip(self.progress[1], self.lines, strict=True)
        found = [(x, line) for x, line in along if metric in line]
        return MetricSeries(
            name=name or metric.replace("_", " "),
            x=[x for x, _ in found],
            y=[line[metric] for _, line in found],
            step=[line["step"] for _, line in found],
            marks=2 * len(found) < len(self.lines),
        )

    def latest_event_value(self, kind: str, field: str) -> Any:
        """The newest value of an event's field; None where it was never written."""
        found = [e[field] for e in self.events if e.get("kind") == kind and field in e]
        return found[-1] if found else None

    def latest_positive_value(self, kind: str, field: str) -> float | None:
        """The same, where it must be a number above zero to be of use."""
        value = parse_number_or_none(self.latest_event_value(kind, field))
        return value if value is not None and 0 < value < inf else None

    def status(self, now: float) -> str:
        """'finished', 'running' or 'stopped': a run that has been silent for far longer than its
        steps take does not run."""
        begins, ends = ("started", "plan"), ("finished", "plan_done")
        kinds = [e.get("kind") for e in self.events if e.get("kind") in (*begins, *ends)]
        planned = self.steps_planned
        if kinds and kinds[-1] in ends:
            return "finished"
        if not kinds and planned is not None and self.steps_done >= planned:
            return "finished"  # its events are lost, its steps are not
        last = max((record.get("time", 0.0) for record in (*self.lines, *self.events)), default=0.0)
        if "plan" in kinds:  # it is silent while a stage goes on, and the stage is not
            stages = (_stamp(file) for file in self.path.glob(f"*/{METRICS_FILE}"))
            last = max([last, *(stamp[2] / 1e9 for stamp in stages if stamp is not None)])
        seconds = [line["seconds"] for line in self.lines[-50:] if "seconds" in line]
        patience = max(120.0, 20 * median(seconds) if seconds else 600.0)
        return "running" if now - last < patience else "stopped"


def read_run(path: str | Path) -> RunView:
    folder = Path(path)
    if not folder.is_dir():
        raise ReportError(f"{folder}: no such folder")
    if not any(is_own_file(folder / name) for name in (METRICS_FILE, EVENTS_FILE)):
        raise ReportError(
            f"{folder}: no run folder, it holds neither {METRICS_FILE} nor {EVENTS_FILE}{_near(folder)}"
        )
    return LiveRunView(folder).refresh()


Stamp = tuple[int, int, int] | None  # which file, how long, when


class LiveRunView:
    """The run in a folder that may still grow: each look reads what was added since the last."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamps: tuple[Stamp, ...] = ()
        self._begin()

    def _begin(self) -> None:
        self._metrics, self._events = (
            JsonlReader(self.path / METRICS_FILE),
            JsonlReader(self.path / EVENTS_FILE),
        )
        self._lines: list[dict[str, float]] = []
        self._told: list[Mapping[str, Any]] = []
        self._run: RunView | None = None

    def refresh(self) -> RunView:
        stamps = tuple(_stamp(self.path / name) for name in (METRICS_FILE, EVENTS_FILE, RECIPE))
        if not any(stamps[:2]):
            raise ReportError(f"{self.path}: the run is gone")
        if self._run is not None and stamps == self._stamps:
            return self._run
        if any(map(_begun_anew, self._stamps[:2], stamps)):
            self._begin()
        for record in self._metrics.read_new():
            append_step(self._lines, record)
        self._told += [with_valid_time(event) for event in self._events.read_new()]
        text, recipe, wrong = read_recipe(self.path / RECIPE)
        complaints = (wrong, self._metrics.complaint, self._events.complaint)
        self._run = RunView(
            path=self.path,
            recipe_text=text,
            recipe=recipe,
            lines=tuple(self._lines),
            events=tuple(self._told),
            warnings=tuple(filter(None, complaints)),
        )
        self._stamps = stamps
        return self._run


def is_own_file(path: Path) -> bool:
    """Whether it is a file and not a link to one: whoever can write into a run must not be able to
    show other files to, and by, whoever looks at it."""
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


def _begun_anew(before: Stamp, now: Stamp) -> bool:
    """Whether what was read of a file is no longer its beginning: it was replaced or shortened."""
    if before is None:
        return False
    return now is None or now[0] != before[0] or now[1] < before[1]


def append_step(lines: list[dict[str, float]], record: Mapping[str, Any]) -> None:
    """One more line of metrics, if it is one; what a run did beyond it before is forgotten."""
    read = {name: parse_number_or_none(value) for name, value in record.items()}
    line = {name: v for name, v in read.items() if v is not None and _counts(name, v)}
    if "step" not in line:
        return
    while lines and lines[-1]["step"] >= line["step"]:
        lines.pop()
    lines.append(line)


def with_valid_time(event: dict[str, Any]) -> dict[str, Any]:
    """The event with a time that is one, or with none."""
    when = parse_number_or_none(event.get("time"))
    rest = {name: value for name, value in event.items() if name != "time"}
    return rest if when is None or not _counts("time", when) else {"time": when, **rest}


def _near(folder: Path) -> str:
    inside = sorted(file.parent.name for file in folder.glob(f"*/{METRICS_FILE}"))
    return f"; runs in it: {', '.join(inside[:8])}" if inside else ""


class JsonlReader:
    """A file of records, read as it grows, up to the first line that is none: what follows a
    damaged line cannot be trusted."""

    def __init__(self, path: Path) -> None:
        self.path, self.complaint = path, ""
        self._offset = self._count = 0
        self._damaged = False

    def read_new(self) -> list[dict[str, Any]]:
        """What was added since the last call."""
        found: list[dict[str, Any]] = []
        if not self._damaged:
            self.complaint = "" if is_own_file(self.path) else missing_file_note(self.path)
            if self.complaint:
                return found
        try:
            for record, offset in () if self._damaged else follow(self.path, self._offset):
                if not isinstance(record, dict):
                    raise ValueError
                found.append(record)
                self._offset, self._count = offset, self._count + 1
        except ValueError:  # JSON's own error is one, and so is text that is not UTF-8
            self._damaged = True
            where = f"{self.path.name}: line {self._count + 1}"
            self.complaint = f"{where} is damaged; what follows is left out"
        return found


def read_recipe(path: Path) -> tuple[str, dict[str, Any], str]:
    """Its text, what it says, and what is wrong with it."""
    if not is_own_file(path):
        return "", {}, missing_file_note(path)
    text = path.read_text("utf-8", errors="replace")
    try:
        return text, tomllib.loads(text), ""
    except tomllib.TOMLDecodeError as error:
        return text, {}, f"{path.name}: {error}"


def parse_number_or_none(value: object) -> float | None:
    """What a journal means by a number: also the text that stands for one that is not finite. One
    too large or too small to draw beside others is infinite or zero.

    >>> parse_number_or_none(0.5), parse_number_or_none("NaN"), parse_number_or_none(-1e300), parse_number_or_none(10**400), parse_number_or_none(True), parse_number_or_none("x")
    (0.5, nan, -inf, inf, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except OverflowError:  # an integer beyond all floats
        return inf
    except ValueError:
        return None
    if abs(found) > 1e100:
        return copysign(inf, found)
    return 0.0 if abs(found) < 1e-100 else found


def _counts(name: str, value: float) -> bool:
    """Whether a measure of progress can be one; curves may hold anything."""
    if name == "step":
        return 0 <= value < 1e15 and value == int(value)
    return name not in PROGRESS or 0 <= value < (1e11 if name == "time" else 1e15)


def format_setting(value: object) -> str:
    """A setting as a recipe writes it."""
    return value if isinstance(value, str) else json.dumps(value)
