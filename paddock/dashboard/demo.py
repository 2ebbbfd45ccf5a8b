"""A small run that comes with the package, for a first look.

It was made by `python -m benchmarks.dash demo`, a real run on nano cut down to its newest groups. A
ledger is kept as text (SQL) and becomes a file again when it is laid out.
"""

import sqlite3
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from paddock.journal import LEDGER_FILE

TEXT = "ledger.sql"


def write_demo_runs(folder: Path) -> Path:
    """Write the runs below a folder; returns where they are."""
    runs = folder / "demo"
    _copy(files("paddock.dashboard").joinpath("demo"), runs)
    return runs


def _copy(given: Traversable, to: Path) -> None:
    to.mkdir(parents=True)
    for entry in given.iterdir():
        if entry.is_dir():
            _copy(entry, to / entry.name)
        elif entry.name == TEXT:
            with sqlite3.connect(to / LEDGER_FILE) as base:
                base.executescript(entry.read_text("utf-8"))
            base.close()
        else:
            (to / entry.name).write_bytes(entry.read_bytes())
