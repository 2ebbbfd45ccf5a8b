"""Start and kill processes inside a sandbox, with all their descendants.

Standard library only: the supervisor runs this file's source outside the package.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal

from paddock.sandbox.syscalls import CLONE_NEWUSER, load_filter, setns

TYPE_CHECKING = False  # importing typing would slow the start down
if TYPE_CHECKING:
    from typing import Any


def exec_job(
    pipes: list[int], settings: dict[str, Any], userns: int | None, request: dict[str, Any]
) -> None:
    """In a forked child: set up identity, limits and filter, then execute the requested program.

    `request` has argv, cwd, env and user. Does not return.
    """
    try:
        os.setsid()
        for number, fd in enumerate(pipes):
            os.dup2(fd, number)
        for fd in settings["cgroups"]:
            os.write(fd, b"0")
        user, group, home = resolve_user(request["user"])
        if userns is not None:
            setns(userns, CLONE_NEWUSER)
            # Not permitted with a single mapped id, where there are no other groups anyway.
            with contextlib.suppress(PermissionError):
                os.setgroups([])
            os.setresgid(group, group, group)
            os.setresuid(user, user, user)
        elif user:
            raise ValueError("user must be unset without a sandbox")
        os.umask(0o022)
        for name, value in settings["rlimits"].items():
            kind = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(kind)[1]
            limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (limit, limit))
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(request["cwd"])
        if settings["filter"]:
            load_filter(settings["filter"])
        os.execvpe(request["argv"][0], request["argv"], {"HOME": home, **request["env"]})
    except (OSError, ValueError, KeyError) as error:
        os.write(2, f"cannot run {request['argv'][0]}: {error}\n".encode())
    finally:
        os._exit(127)


def resolve_user(user: str | int | None) -> tuple[int, int, str]:
    """Uid, gid and home of a name or uid, from the sandbox's /etc/passwd without NSS."""
    rows = []
    with contextlib.suppress(OSError), open("/etc/passwd", encoding="utf-8") as file:
        rows = [line.rstrip("\n").split(":") for line in file]
    name = "0" if user is None else str(user)
    for row in rows:
        if len(row) >= 6 and name in (row[0], row[2]):
            return int(row[2]), int(row[3]), row[5]
    if name.isdigit():
        return int(name), int(name), "/root" if name == "0" else "/"
    raise ValueError(f"user {name!r} not found")


def descendants(roots: set[int]) -> set[int]:
    """All descendants of these processes and all members of their sessions, without themselves."""
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
    """Kill processes and their descendants. Each is stopped first, so that none can fork away."""
    seen: set[int] = set()
    while new := (descendants(roots) | roots) - seen - spared:
        for pid in new:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGSTOP)
        seen |= new
    for pid in seen:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
