"""The layers between code in a sandbox and this machine: which there are, and what is lost without
one."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

from paddock.sandbox import bubblewrap, cgroups, seccomp

# What each controller of control groups limits, and what remains without it.
CONTROLLERS = {
    "memory": "memory is limited per process (address space), not for a sandbox as a whole",
    "pids": "processes are counted over all sandboxes of this user",
    "cpu": "a sandbox may keep every core busy",
}


@dataclass(frozen=True, slots=True)
class IsolationLayer:
    name: str
    found: str | None  # how it is done here; None: it is missing
    lost: str = ""  # what is lost without it, and how to get it


def check_isolation() -> Iterator[IsolationLayer]:
    """The layers of bubblewrap sandboxes, each tried where that is possible."""
    problem = bubblewrap.unavailable_reason()
    yield IsolationLayer(
        "namespaces",
        None if problem else "own mounts, processes, network, IPC and host name, by bubblewrap",
        f"no sandbox but a container, or none at all ({problem})",
    )
    problem = seccomp.unavailable_reason()
    yield IsolationLayer(
        "system-call filter",
        None if problem else "seccomp: ptrace, namespaces, io_uring, keys, sockets like AF_VSOCK",
        f"code inside reaches all of the kernel; bubblewrap is not used ({problem})",
    )
    there = {name for parent in cgroups.find_cgroup_parents() for name in parent.controllers}
    missing = [name for name in CONTROLLERS if name not in there]
    if there:
        yield IsolationLayer(
            "control groups", ", ".join(name for name in CONTROLLERS if name in there)
        )
    for name in missing:
        remedy = "run as root, or delegate a control group to this user (systemd: Delegate=yes)"
        yield IsolationLayer(f"control group of {name}", None, f"{CONTROLLERS[name]}; {remedy}")
    root = os.geteuid() == 0
    yield IsolationLayer(
        "user ids of their own",
        f"root inside is user {bubblewrap.FIRST_ID} outside, who owns nothing" if root else None,
        "root inside is you outside, and there are no other users inside; run as root",
    )
    problem = bubblewrap.unavailable_reason(writable_system=True)
    yield IsolationLayer(
        "a system of their own",
        None if problem else "a copy-on-write system: packages can be installed inside",
        f"the system is read-only inside, and Harbor tasks cannot be built ({problem})",
    )
