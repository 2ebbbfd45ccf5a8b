"""Errors for the user as one line on stderr; bugs as a traceback.

Our own kinds of ValueError (UserError, ConfigError, CheckpointError, ...) are messages to the user,
and so are the system's errors about files. Any other error is a bug and is raised.
"""

import errno
from typing import Any

import typer
from typer.core import TyperGroup

from paddock.launch import UserError

__all__ = ["ErrorReportingGroup", "UserError"]

NO_SPACE = "free some space, then run the same command again"
# Errors of any write to a disk: reported without a traceback even if the file is unknown.
DISK = {
    errno.ENOSPC: NO_SPACE,
    errno.EDQUOT: NO_SPACE,
    errno.EFBIG: "the file system or `ulimit -f` allows no larger files",
    errno.EIO: "the disk may be broken",
}


class ErrorReportingGroup(TyperGroup):
    """Commands whose errors for the user end in `error: ...` on stderr and exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, OSError) as error:
            lines = _message_lines(error)
            if not lines:
                raise
            for line in lines:
                typer.echo(f"error: {line}", err=True)
            raise typer.Exit(1) from None


def _message_lines(error: ValueError | OSError) -> list[str]:
    """The message for the user; empty if the error is a bug."""
    if isinstance(error, OSError):
        if error.filename is None and error.errno not in DISK:
            return []
        prefix = "" if error.filename is None else f"{error.filename}: "
        advice = f"; {DISK[error.errno]}" if error.errno in DISK else ""
        return [f"{prefix}{error.strerror}{advice}"]
    ours = type(error).__module__.split(".")[0] == "paddock"
    return str(error).splitlines() if ours else []
