"""A SQLite connection whose errors say which file is damaged or has no room, and what to do."""

import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

Found = TypeVar("Found")


class LedgerError(ValueError):
    """A move that the ledger does not allow, or a file that is damaged or not this run's."""


_NO_ROOM = "free some space, then call the same command again: it goes on"
_DAMAGED = (
    "the file is damaged; put a copy of it back, see what `sqlite3 FILE .recover` can read of it,"
    " or begin in another folder (--out)"
)
# What the disk, or another process, did to the file. All other errors are bugs and stay as they
# are. The low byte of SQLite's code is the kind of error.
_REMEDIES = {
    sqlite3.SQLITE_FULL: _NO_ROOM,
    sqlite3.SQLITE_IOERR: f"the disk may be full or broken; {_NO_ROOM}",
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: _DAMAGED,
    sqlite3.SQLITE_CANTOPEN: "its folder must exist, and be one that may be written to",
    sqlite3.SQLITE_READONLY: "it may only be read",
    sqlite3.SQLITE_BUSY: "another process is writing to it",
}


class _Cursor(sqlite3.Cursor):
    def execute(self, *args: Any) -> Any:
        return self._explained(super().execute, *args)

    def executemany(self, *args: Any) -> Any:
        return self._explained(super().executemany, *args)

    def executescript(self, *args: Any) -> Any:
        return self._explained(super().executescript, *args)

    def fetchone(self) -> Any:
        return self._explained(super().fetchone)

    def fetchall(self) -> list[Any]:
        return self._explained(super().fetchall)

    def __next__(self) -> Any:
        return self._explained(super().__next__)

    def _explained(self, call: Callable[..., Found], *args: Any) -> Found:
        try:
            return call(*args)
        except UnicodeDecodeError as error:  # the damage is in what SQLite would complain about
            raise LedgerError(f"{self.connection}: {error}: {_DAMAGED}") from None
        except sqlite3.Error as error:
            _explain(error, self.connection)
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
    """A connection that leaves transactions to its user. A damaged file, a full disk and the like
    are a LedgerError about `name`, whichever statement meets them."""
    try:
        opened = sqlite3.connect(
            database, timeout=timeout, uri=uri, isolation_level=None, factory=_Connection
        )
    except sqlite3.Error as error:
        _explain(error, name)
        raise
    opened.name = str(name)
    return opened


def rollback(base: sqlite3.Connection) -> None:
    """Leave a transaction that failed; a full disk has ended it already."""
    if base.in_transaction:
        with suppress(LedgerError):  # what failed before it is what counts
            base.execute("ROLLBACK")


def check_integrity(base: sqlite3.Connection) -> None:
    """Read the whole file once and raise a LedgerError if its pages do not fit together: seconds a
    gigabyte, before a run goes on rather than in the middle of it. What SQLite cannot notice is
    another number in a row; tokens have a checksum of their own."""
    found = base.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise LedgerError(f"{base}: {found.splitlines()[-1]}: {_DAMAGED}")


def _explain(error: sqlite3.Error, name: object) -> None:
    """Raise a LedgerError, unless the error is a bug of ours."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None and isinstance(error, sqlite3.OperationalError):  # text that is not UTF-8
        code = sqlite3.SQLITE_CORRUPT
    if code is not None and (remedy := _REMEDIES.get(code & 0xFF)):
        raise LedgerError(f"{name}: {error}: {remedy}") from None
