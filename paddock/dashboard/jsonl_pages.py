"""Rows of rollouts.jsonl, engine.jsonl and network.jsonl, read a page at a time from the end; and
the state of a run's tasks.

The length of a file does not matter: only the page is read.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paddock.dashboard import old_names
from paddock.dashboard.run_view import is_own_file, parse_number_or_none
from paddock.records import Failure

ROLLOUTS, ENGINE, NETWORK = "rollouts.jsonl", "engine.jsonl", "network.jsonl"
OLD_COLUMNS = {
    ROLLOUTS: old_names.ROLLOUTS,
    ENGINE: old_names.ENGINE,
    NETWORK: old_names.NETWORK,
}
PAGE_BYTES = 512 * 1024
ROW_BYTES = 32 << 20  # of the longest row that is read
Row = Mapping[str, Any]


def read_page(path: Path, before: int | None = None) -> tuple[list[Row], int]:
    """The rows of the page that ends at byte `before` (None: the end), and where that page starts.

    A page has at most PAGE_BYTES, unless a single row is longer. A start of 0 is the beginning of
    the file. Lines that are not JSON objects are left out; old column names are translated.
    """
    if not is_own_file(path):
        return [], 0
    size = os.stat(path).st_size
    end = size if before is None else min(before, size)
    length = PAGE_BYTES
    start, data = _end_of(path, end, length)
    # A row may be longer than a page: top-k selections of a long text are megabytes.
    while start > 0 and data.find(b"\n") == data.rfind(b"\n") and length < ROW_BYTES:
        length *= 2
        start, data = _end_of(path, end, length)
    if start > 0:  # most likely in the middle of a line
        cut = data.find(b"\n") + 1
        start, data = (start + cut, data[cut:]) if cut else (end, b"")
    whole = data[: data.rfind(b"\n") + 1]
    names = OLD_COLUMNS.get(path.name, {})
    rows = [row for line in whole.splitlines() if (row := _row(line)) is not None]
    return [old_names.rename_keys(row, names) for row in rows], start


def _end_of(path: Path, end: int, length: int) -> tuple[int, bytes]:
    start = max(0, end - length)
    with path.open("rb") as file:
        file.seek(start)
        return start, file.read(end - start)


def _row(line: bytes) -> Row | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def read_task_states(path: Path) -> Row:
    """The state of a run's tasks, as it was written last; without tasks if there is none."""
    nothing: Row = {"time": None, "tasks": {}, "stragglers": []}
    if not is_own_file(path) or os.stat(path).st_size > ROW_BYTES:
        return nothing
    found = _row(path.read_bytes()) or {}
    kinds_right = isinstance(found.get("tasks"), dict) and isinstance(found.get("stragglers"), list)
    return found if kinds_right and isinstance(found.get("time"), float) else nothing


def timeline(path: Path, before: int | None, steps: Sequence[Mapping[str, float]]) -> Row:
    """Rollouts as bars in lanes, concurrency over time, idle spans and the ends of steps."""
    rows, start = read_page(path, before)
    spans = sorted(span for row in rows if (span := _span(row)) is not None)
    bars = [
        {**row, "started": started, "finished": finished, "failure": _failure(row)}
        for started, finished, _, row in spans
    ]
    times = [(bar["started"], bar["finished"]) for bar in bars]
    for bar, lane in zip(bars, lanes(times), strict=True):
        bar["lane"] = lane
    low = min((bar["started"] for bar in bars), default=0.0)
    high = max((bar["finished"] for bar in bars), default=0.0)
    return {
        "bars": bars,
        "concurrency": concurrency_over_time(times),
        "idle": idle_spans(times),
        "steps": [
            {
                "step": line["step"],
                "finished": line["time"],
                "trainer_idle": line.get("trainer_idle"),
            }
            for line in steps
            if "time" in line and low <= line["time"] <= high
        ],
        "before": start or None,
    }


def _span(row: Row) -> tuple[float, float, int, Row] | None:
    started = parse_number_or_none(row.get("started"))
    finished = parse_number_or_none(row.get("time"))
    if started is None or finished is None or not 0 <= started <= finished < 1e11:
        return None
    return started, finished, id(row), row  # the id, because rows cannot be compared


def _failure(row: Row) -> str:
    """Why the rollout failed, with the kind as it is shown; empty if it did not.

    >>> _failure({"failure": "time at start"}), _failure({"reward": 1})
    ('timeout at start', '')
    """
    kind, _, rest = str(row.get("failure") or "").partition(" ")
    return f"{Failure.kind_label(kind)} {rest}".strip()


Span = tuple[float, float]


def lanes(spans: Sequence[Span]) -> list[int]:
    """The lowest free lane for each span, in order of start.

    >>> lanes([(0, 5), (1, 2), (3, 9), (5, 6)])
    [0, 1, 1, 0]
    """
    free: list[float] = []  # from when on each lane is free
    found = []
    for started, finished in spans:
        lane = next((i for i, at in enumerate(free) if at <= started), len(free))
        if lane == len(free):
            free.append(finished)
        else:
            free[lane] = finished
        found.append(lane)
    return found


def concurrency_over_time(spans: Sequence[Span]) -> list[tuple[float, int]]:
    """(time, count) at each change of the number of running spans.

    >>> concurrency_over_time([(0, 5), (1, 2)])
    [(0, 1), (1, 2), (2, 1), (5, 0)]
    """
    changes: dict[float, int] = {}
    for started, finished in spans:
        changes[started] = changes.get(started, 0) + 1
        changes[finished] = changes.get(finished, 0) - 1
    count, found = 0, []
    for time in sorted(changes):
        count += changes[time]
        found.append((time, count))
    return found


def idle_spans(spans: Sequence[Span]) -> list[Span]:
    """Times in which nothing ran, between the first start and the last end.

    >>> idle_spans([(0, 2), (1, 3), (5, 6)])
    [(3, 5)]
    """
    found: list[Span] = []
    busy_until: float | None = None
    for started, finished in sorted(spans):
        if busy_until is not None and started > busy_until:
            found.append((busy_until, started))
        busy_until = finished if busy_until is None else max(busy_until, finished)
    return found
