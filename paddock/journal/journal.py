"""Journal: metrics and events of a run folder, as append-only JSON lines."""

import errno
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import IO, Any, Self

from paddock.journal.jsonl import JsonlWriter

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
LEDGER_FILE = "ledger.sqlite"  # only in runs with rollouts
TASKS_FILE = "tasks.json"  # state of their tasks, replaced now and then
LOCK_FILE = "journal.lock"


class Journal:
    """Writer of a run folder's logs: numbers in metrics.jsonl, everything else in events.jsonl;
    what is too frequent for an event goes to further files such as engine.jsonl.

    All files are append-only; a resumed run continues them. A folder has one writer at a time (a
    file lock, so that two runs cannot share it by mistake) and any number of readers (`follow`).

    Whatever was written survives a killed process. A power cut loses no event, and at most the
    metrics of the last `sync_every_s` seconds: an fsync at every step would slow the run.

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
        self._lock = _lock_file(self._folder / LOCK_FILE)
        self._clock = clock
        self._sync_every_s = sync_every_s
        self._synced_at = clock()
        self._metrics = JsonlWriter(self._folder / METRICS_FILE)
        self._events = JsonlWriter(self._folder / EVENTS_FILE)
        self._rows: dict[str, JsonlWriter] = {}
        self._rows_lock = Lock()  # rows come from several threads
        self._closed = False
        for file in (self._metrics, self._events):
            self._log_repair(file)

    def log_metrics(self, step: int, **values: float) -> None:
        """Log the numbers of one step. Non-finite ones are written as strings such as "NaN"."""
        now = self._clock()
        self._metrics.append(_stamped(now, {"step": step, **values}))
        if now - self._synced_at >= self._sync_every_s:
            self._metrics.sync()
            self._synced_at = now

    def log_row(self, name: str, **fields: Any) -> None:
        """Append a line to `name`.jsonl, created on first use. It survives a killed process but not
        a power cut. Rows after `close` are dropped: a cancelled rollout may end after its run."""
        with self._rows_lock:
            if self._closed:
                return
            if name not in self._rows:
                self._rows[name] = JsonlWriter(self._folder / f"{name}.jsonl")
                self._log_repair(self._rows[name])
            self._rows[name].append(_stamped(self._clock(), fields))

    def log_event(self, kind: str, **fields: Any) -> None:
        """Log an event; it is on disk when this returns."""
        self._events.append(_stamped(self._clock(), {"kind": kind, **fields}))
        self._events.sync()

    def _log_repair(self, file: JsonlWriter) -> None:
        if file.torn_bytes:
            self.log_event("repaired", file=file.path.name, torn_bytes=file.torn_bytes)

    def close(self) -> None:
        with self._rows_lock:
            self._closed = True
            for file in (self._metrics, self._events, *self._rows.values()):
                file.close()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _lock_file(path: Path) -> IO[bytes]:
    """Open the file, locked until it is closed or this process ends; it holds the owner's pid.

    Raises BlockingIOError if another process holds the lock.
    """
    file = path.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        pid = file.read(20).decode("ascii", "replace").strip()
        file.close()
        owner = f"another process (pid {pid})" if pid else "another process"
        message = f"{path.parent} is in use by {owner}"
        raise BlockingIOError(errno.EAGAIN, message, str(path)) from None
    file.truncate(0)
    file.write(str(os.getpid()).encode())
    file.flush()
    return file


def _stamped(now: float, record: dict[str, Any]) -> dict[str, Any]:
    if "time" in record:
        raise ValueError("time: reserved, the journal sets it")
    return {"time": now, **record}
