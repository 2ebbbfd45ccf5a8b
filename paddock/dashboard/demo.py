"""Demo runs that come with the package.

They were made by `python -m benchmarks.dash demo`: real runs of the nano model, cut down to their
newest groups. A ledger is stored as SQL text and becomes a database file when it is written.
"""

import sqlite3
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from paddock.journal import LEDGER_FILE

LEDGER_SQL = "ledger.sql"


def write_demo_runs(folder: Path) -> Path:
    """Write the demo runs to `folder`/demo; returns that path."""
    runs = folder / "demo"
    _copy(files("paddock.dashboard").joinpath("demo"), runs)
    return runs


def _copy(source: Traversable, to: Path) -> None:
    to.mkdir(parents=True)
    for entry in source.iterdir():
        if entry.is_dir():
            _copy(entry, to / entry.name)
        elif entry.name == LEDGER_SQL:
            with sqlite3.connect(to / LEDGER_FILE) as database:
                database.executescript(entry.read_text("utf-8"))
            database.close()
        else:
            (to / entry.name).write_bytes(entry.read_bytes())
