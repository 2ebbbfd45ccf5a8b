"""Processes inside a sandbox: how one begins, and how it ends with all it started. Standard library
only: `runner` runs this file's text outside the package."""

from __future__ import annotations

import contextlib
import os
import resource
import signal

from paddock.sandbox.syscalls import CLONE_NEWUSER, load_filter, setns

TYPE_CHECKING = False  # the module typing takes long to load
if TYPE_CHECKING:
    from typing import Any


def exec_job(
    pipes: list[int], settings: dict[str, Any], userns: int | None, how: dict[str, Any]
) -> None:
    """The rest of a child's life in this program: it turns into the one that was asked for."""
    try:
        os.setsid()
        for number, fd in enumerate(pipes):
            os.dup2(fd, number)
        for fd in settings["cgroups"]:
            os.write(fd, b"0")
        user, group, home = resolve_user(how["user"])
        if userns is not None:
            setns(userns, CLONE_NEWUSER)
            with contextlib.suppress(PermissionError):  # with a single id there are no others
                os.setgroups([])
            os.setresgid(group, group, group)
            os.setresuid(user, user, user)
        elif user:
            raise ValueError("without a sandbox nobody can become another user")
        os.umask(0o022)
        for name, value in settings["rlimits"].items():
            kind = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(kind)[1]
            most = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (most, most))
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(how["cwd"])
        if settings["filter"]:
            load_filter(settings["filter"])
        os.execvpe(how["argv"][0], how["argv"], {"HOME": home, **how["env"]})
    except (OSError, ValueError, KeyError) as error:
        os.write(2, f"cannot run {how['argv'][0]}: {error}\n".encode())
    finally:
        os._exit(127)


def resolve_user(user: str | int | None) -> tuple[int, int, str]:
    """User, group and home; by the sandbox's /etc/passwd, read without asking anyone else."""
    rows = []
    with contextlib.suppress(OSError), open("/etc/passwd", encoding="utf-8") as file:
        rows = [line.rstrip("\n").split(":") for line in file]
    wanted = "0" if user is None else str(user)
    for row in rows:
        if len(row) >= 6 and wanted in (row[0], row[2]):
            return int(row[2]), int(row[3]), row[5]
    if wanted.isdigit():
        return int(wanted), int(wanted), "/root" if wanted == "0" else "/"
    raise ValueError(f"there is no user {wanted!r}")


def descendants(roots: set[int]) -> set[int]:
    """Everything that these processes started and that has not moved away from them, and whatever
    is in a session of theirs; without themselves."""
    parents: dict[int, tuple[int, int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                parents[int(name)] = int(fields[1]), int(fields[3])
    found = set(roots)
    while True:
        more = {
            pid
            for pid, (parent, session) in parents.items()
            if pid not in found and (parent in found or session in roots)
        }
        if not more:
            return found - roots
        found |= more


def kill_tree(roots: set[int], *, spared: set[int]) -> None:
    """Kill processes and all they started. Each is stopped first, so that none forks away."""
    seen: set[int] = set()
    while new := (descendants(roots) | roots) - seen - spared:
        for pid in new:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGSTOP)
        seen |= new
    for pid in seen:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
