"""Metrics and events of a run folder."""

import errno
import fcntl
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import IO, Any, Self

from paddock.journal.jsonl import JsonlWriter

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
LEDGER_FILE = "ledger.sqlite"  # of a run that rolls out
LOCK_FILE = "journal.lock"


class Journal:
    """What happens in a run: numbers in metrics.jsonl, all else in events.jsonl; what is too
    frequent for an event in further files, such as engine.jsonl.

    All only grow, and a run that resumes goes on in the same files. A folder has one writer at a
    time, so that two runs cannot share it by mistake; readers come and go (`follow`).

    Whatever was written outlives a killed process. A power cut loses no event, and metrics of
    `sync_every_s` at most: steps are frequent, and waiting for the disk at each would slow the run.

    >>> from tempfile import TemporaryDirectory
    >>> from paddock.journal import follow
    >>> with TemporaryDirectory() as folder, Journal(folder, clock=lambda: 9.5) as journal:
    ...     journal.log_metrics(3, loss=2.5, grad_norm=float("inf"))
    ...     journal.log_event("weights", version=4)
    ...     [record for record, _ in follow(f"{folder}/metrics.jsonl")]
    ...     [record for record, _ in follow(f"{folder}/events.jsonl")]
    [{'time': 9.5, 'step': 3, 'loss': 2.5, 'grad_norm': 'Infinity'}]
    [{'time': 9.5, 'kind': 'weights', 'version': 4}]
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        clock: Callable[[], float] = time.time,
        sync_every_s: float = 5.0,
    ) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(Path(folder) / LOCK_FILE)
        self._clock = clock
        self._sync_every_s = sync_every_s
        self._synced_at = clock()
        self._metrics = JsonlWriter(Path(folder) / METRICS_FILE)
        self._events = JsonlWriter(Path(folder) / EVENTS_FILE)
        self._rows: dict[str, JsonlWriter] = {}
        self._door = Lock()  # rows come from several threads
        self._closed = False
        for file in (self._metrics, self._events):
            self._tell_repair(file)

    def log_metrics(self, step: int, **values: float) -> None:
        """Numbers of one step. Those that are not finite are written as text, such as "NaN"."""
        now = self._clock()
        self._metrics.append(_stamped(now, {"step": step, **values}))
        if now - self._synced_at >= self._sync_every_s:
            self._metrics.sync()
            self._synced_at = now

    def log_row(self, name: str, **fields: Any) -> None:
        """A line of `name`.jsonl, which is made when it is first written to. It outlives a killed
        process, not a power cut. What comes after the end is dropped: an attempt that is broken
        off may outlive its run."""
        with self._door:
            if self._closed:
                return
            if name not in self._rows:
                self._rows[name] = JsonlWriter(self._folder / f"{name}.jsonl")
                self._tell_repair(self._rows[name])
            self._rows[name].append(_stamped(self._clock(), fields))

    def log_event(self, kind: str, **fields: Any) -> None:
        """Something that happened, on disk when this returns."""
        self._events.append(_stamped(self._clock(), {"kind": kind, **fields}))
        self._events.sync()

    def _tell_repair(self, file: JsonlWriter) -> None:
        if file.torn_bytes:
            self.log_event("repaired", file=file.path.name, torn_bytes=file.torn_bytes)

    def close(self) -> None:
        with self._door:
            self._closed = True
            for file in (self._metrics, self._events, *self._rows.values()):
                file.close()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _locked(path: Path) -> IO[bytes]:
    """The file, locked until it is closed or this process ends."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise BlockingIOError(errno.EAGAIN, "another writer has this run", str(path)) from None
    return file


def _stamped(now: float, record: dict[str, Any]) -> dict[str, Any]:
    if "time" in record:
        raise ValueError("time: set by the journal itself")
    return {"time": now, **record}
