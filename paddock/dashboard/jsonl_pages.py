"""Rows that a run writes as it goes: rollouts, the engine, the network. Newest first, a page at a
time: a file is read from its end, so its length does not matter."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paddock.dashboard.run_view import is_own_file, parse_number_or_none

ROLLOUTS, ENGINE, NETWORK = "rollouts.jsonl", "engine.jsonl", "network.jsonl"
PAGE_BYTES = 512 * 1024  # read at once
ROW_BYTES = 32 << 20  # of one row at most
Row = Mapping[str, Any]


def read_page(path: Path, before: int | None = None) -> tuple[list[Row], int]:
    """Whole rows that end before byte `before` (the end, if None), at most `PAGE_BYTES` of them
    unless one alone is longer, and where the page before this one ends; 0: this one begins the
    file. Lines that are no rows are left out."""
    if not is_own_file(path):
        return [], 0
    size = os.stat(path).st_size
    end = size if before is None else min(before, size)
    length = PAGE_BYTES
    start, data = _end_of(path, end, length)
    # A row may be longer than a page: the indexer's picks in a long text are megabytes.
    while start > 0 and data.find(b"\n") == data.rfind(b"\n") and length < ROW_BYTES:
        length *= 2
        start, data = _end_of(path, end, length)
    if start > 0:  # begins in the middle of a line, most likely
        cut = data.find(b"\n") + 1
        start, data = (start + cut, data[cut:]) if cut else (end, b"")
    whole = data[: data.rfind(b"\n") + 1]
    return [row for line in whole.splitlines() if (row := _row(line)) is not None], start


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


def timeline(path: Path, before: int | None, steps: Sequence[Mapping[str, float]]) -> Row:
    """Rollouts as bars in as few lanes as hold them, how many ran at any time, the gaps in which
    none did, and when the trainer worked."""
    rows, start = read_page(path, before)
    spans = sorted(span for row in rows if (span := _span(row)) is not None)
    bars = [{**dict(row), "began": began, "ended": ended} for began, ended, _, row in spans]
    for bar, lane in zip(bars, lanes([(b["began"], b["ended"]) for b in bars]), strict=True):
        bar["lane"] = lane
    low = min((bar["began"] for bar in bars), default=0.0)
    high = max((bar["ended"] for bar in bars), default=0.0)
    return {
        "bars": bars,
        "running": concurrency_over_time([(b["began"], b["ended"]) for b in bars]),
        "gaps": idle_spans([(b["began"], b["ended"]) for b in bars]),
        "updates": [
            {"step": line["step"], "ended": line["time"], "idle": line.get("trainer_idle")}
            for line in steps
            if "time" in line and low <= line["time"] <= high
        ],
        "before": start or None,
    }


def _span(row: Row) -> tuple[float, float, int, Row] | None:
    began, ended = parse_number_or_none(row.get("began")), parse_number_or_none(row.get("time"))
    if began is None or ended is None or not 0 <= began <= ended < 1e11:
        return None
    return began, ended, id(row), row  # rows themselves have no order


Span = tuple[float, float]


def lanes(spans: Sequence[Span]) -> list[int]:
    """The lowest free lane for each, in the order in which they begin.

    >>> lanes([(0, 5), (1, 2), (3, 9), (5, 6)])
    [0, 1, 1, 0]
    """
    free: list[float] = []  # when each lane is
    found = []
    for began, ended in spans:
        lane = next((i for i, at in enumerate(free) if at <= began), len(free))
        if lane == len(free):
            free.append(ended)
        else:
            free[lane] = ended
        found.append(lane)
    return found


def concurrency_over_time(spans: Sequence[Span]) -> list[tuple[float, int]]:
    """How many run from each moment on at which that changes.

    >>> concurrency_over_time([(0, 5), (1, 2)])
    [(0, 1), (1, 2), (2, 1), (5, 0)]
    """
    changes: dict[float, int] = {}
    for began, ended in spans:
        changes[began] = changes.get(began, 0) + 1
        changes[ended] = changes.get(ended, 0) - 1
    count, found = 0, []
    for moment in sorted(changes):
        count += changes[moment]
        found.append((moment, count))
    return found


def idle_spans(spans: Sequence[Span]) -> list[Span]:
    """When none ran, between the first and the last.

    >>> idle_spans([(0, 2), (1, 3), (5, 6)])
    [(3, 5)]
    """
    found: list[Span] = []
    reach: float | None = None
    for began, ended in sorted(spans):
        if reach is not None and began > reach:
            found.append((reach, began))
        reach = ended if reach is None else max(reach, ended)
    return found
