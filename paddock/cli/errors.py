"""What the user must change, in one line; what we must change, in a traceback.

Our own kinds of ValueError (ConfigError, CheckpointError, ...) are written for the user, and so is
what the system says about a file. Any other error is a bug and is left alone.
"""

import errno
from typing import Any

import typer
from typer.core import TyperGroup

NO_ROOM = "free some space, then call the same command again"
# What a disk can do to any write: told without a traceback even where nobody knows the file.
DISK = {
    errno.ENOSPC: NO_ROOM,
    errno.EDQUOT: NO_ROOM,
    errno.EFBIG: "the file system or `ulimit -f` allows no larger files",
    errno.EIO: "the disk may be broken",
}


class UserError(ValueError):
    """A request that makes no sense; the message says what to change."""


class ErrorReportingGroup(TyperGroup):
    """Commands whose errors for the user end in `error: ...` on stderr and exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, OSError) as error:
            lines = _explained(error)
            if not lines:
                raise
            for line in lines:
                typer.echo(f"error: {line}", err=True)
            raise typer.Exit(1) from None


def _explained(error: ValueError | OSError) -> list[str]:
    """What to tell the user; nothing if the error is not theirs."""
    if isinstance(error, OSError):
        if error.filename is None and error.errno not in DISK:
            return []
        named = "" if error.filename is None else f"{error.filename}: "
        advice = f"; {DISK[error.errno]}" if error.errno in DISK else ""
        return [f"{named}{error.strerror}{advice}"]
    ours = type(error).__module__.split(".")[0] == "paddock"
    return str(error).splitlines() if ours else []
