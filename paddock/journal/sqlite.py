"""SQLite connection whose errors name the file and the remedy."""

import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class LedgerError(ValueError):
    """A transition that the ledger does not allow, or a file that is damaged or of another run."""


_DISK_FULL = "free some disk space, then run the same command again: it resumes"
_DAMAGED = (
    "the file is damaged; restore a copy, try `sqlite3 FILE .recover`,"
    " or start in another folder (--out)"
)
# Errors caused by the disk or another process. All others are bugs and are not translated.
# The low byte of SQLite's code is the primary error code.
_REMEDIES = {
    sqlite3.SQLITE_FULL: _DISK_FULL,
    sqlite3.SQLITE_IOERR: f"the disk may be full or broken; {_DISK_FULL}",
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: _DAMAGED,
    sqlite3.SQLITE_CANTOPEN: "its folder must exist and be writable",
    sqlite3.SQLITE_READONLY: "the file is read-only",
    sqlite3.SQLITE_BUSY: "another process is writing to it",
}


class _Cursor(sqlite3.Cursor):
    def execute(self, *args: Any) -> Any:
        return self._translated(super().execute, *args)

    def executemany(self, *args: Any) -> Any:
        return self._translated(super().executemany, *args)

    def executescript(self, *args: Any) -> Any:
        return self._translated(super().executescript, *args)

    def fetchone(self) -> Any:
        return self._translated(super().fetchone)

    def fetchall(self) -> list[Any]:
        return self._translated(super().fetchall)

    def __next__(self) -> Any:
        return self._translated(super().__next__)

    def _translated(self, call: Callable[..., T], *args: Any) -> T:
        try:
            return call(*args)
        except UnicodeDecodeError as error:  # the damage is inside SQLite's own error text
            raise LedgerError(f"{self.connection}: {error}: {_DAMAGED}") from None
        except sqlite3.Error as error:
            _raise_explained(error, self.connection)
            raise


class _Connection(sqlite3.Connection):
    name = ""  # for messages

    def execute(self, *args: Any) -> sqlite3.Cursor:
        return self.cursor(_Cursor).execute(*args)

    def executemany(self, *args: Any) -> sqlite3.Cursor:
        return self.cursor(_Cursor).executemany(*args)

    def executescript(self, *args: Any) -> sqlite3.Cursor:
        return self.cursor(_Cursor).executescript(*args)

    def __str__(self) -> str:
        return self.name


def connect(
    database: str | Path, *, name: str | Path, timeout: float = 30.0, uri: bool = False
) -> sqlite3.Connection:
    """Open a connection in autocommit mode. A damaged file, a full disk and the like raise a
    LedgerError about `name` from any statement."""
    try:
        opened = sqlite3.connect(
            database, timeout=timeout, uri=uri, isolation_level=None, factory=_Connection
        )
    except sqlite3.Error as error:
        _raise_explained(error, name)
        raise
    opened.name = str(name)
    return opened


def rollback(db: sqlite3.Connection) -> None:
    """Roll back a failed transaction; a full disk has ended it already."""
    if db.in_transaction:
        with suppress(LedgerError):  # report the error that caused the rollback
            db.execute("ROLLBACK")


def check_integrity(db: sqlite3.Connection) -> None:
    """Read the whole file and raise a LedgerError if it is damaged.

    Takes seconds per gigabyte, but before a run resumes instead of in the middle of it. SQLite
    cannot detect a changed value within a row; tokens have their own checksum.
    """
    found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise LedgerError(f"{db}: {found.splitlines()[-1]}: {_DAMAGED}")


def _raise_explained(error: sqlite3.Error, name: object) -> None:
    """Raise a LedgerError with the remedy, unless the error is a bug."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None and isinstance(error, sqlite3.OperationalError):  # text that is not UTF-8
        code = sqlite3.SQLITE_CORRUPT
    if code is not None and (remedy := _REMEDIES.get(code & 0xFF)):
        raise LedgerError(f"{name}: {error}: {remedy}") from None
