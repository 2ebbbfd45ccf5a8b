"""Report of the isolation layers that this machine has, and what is lost without each."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

from paddock.sandbox import bubblewrap, cgroups, seccomp

# What holds without each cgroup controller.
CONTROLLERS = {
    "memory": "memory is limited per process (address space), not for a sandbox as a whole",
    "pids": "processes are counted over all sandboxes of this user",
    "cpu": "a sandbox may keep every core busy",
}


@dataclass(frozen=True, slots=True)
class IsolationLayer:
    name: str
    found: str | None  # how it is implemented here; None: missing
    lost: str = ""  # consequence if it is missing, and the remedy


def check_isolation() -> Iterator[IsolationLayer]:
    """The layers of bubblewrap sandboxes, tested where that is possible."""
    problem = bubblewrap.unavailable_reason()
    yield IsolationLayer(
        "namespaces",
        None
        if problem
        else "separate mounts, processes, network, IPC and host name, by bubblewrap",
        f"only containers or no isolation are available ({problem})",
    )
    problem = seccomp.unavailable_reason()
    yield IsolationLayer(
        "system-call filter",
        None if problem else "seccomp: ptrace, namespaces, io_uring, keys, sockets like AF_VSOCK",
        f"code inside can make every system call; bubblewrap is not used ({problem})",
    )
    available = {name for parent in cgroups.find_cgroup_parents() for name in parent.controllers}
    missing = [name for name in CONTROLLERS if name not in available]
    if available:
        yield IsolationLayer(
            "cgroups", ", ".join(name for name in CONTROLLERS if name in available)
        )
    for name in missing:
        remedy = "run as root, or delegate a cgroup to this user (systemd: Delegate=yes)"
        yield IsolationLayer(f"cgroup controller {name}", None, f"{CONTROLLERS[name]}; {remedy}")
    root = os.geteuid() == 0
    yield IsolationLayer(
        "separate user ids",
        f"root inside is uid {bubblewrap.FIRST_ID} outside, which owns no files" if root else None,
        "root inside is your own user outside, and there are no other users; run as root",
    )
    problem = bubblewrap.unavailable_reason(writable_root=True)
    yield IsolationLayer(
        "writable root",
        None if problem else "copy-on-write root: packages can be installed inside",
        f"the root is read-only inside, and Harbor tasks cannot be built ({problem})",
    )
