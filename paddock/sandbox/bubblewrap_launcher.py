"""A program of its own: what must be done before bubblewrap takes over, and then bubblewrap.

`running.command` says how it is run.

It stands in a mount namespace of its own, so that nothing it mounts is seen outside and everything
is gone with its last process. It covers /sys with a file system of limited size: whatever the
sandbox writes lies there. Then it gives up its identity: inside, root is nobody of this machine.
Standard library only.
"""

from __future__ import annotations

import os

from paddock.sandbox.syscalls import (
    CLONE_NEWNS,
    CLONE_NEWUSER,
    MS_BIND,
    MS_NODEV,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    make_user_namespace,
    mount,
    mount_idmapped,
    setns,
    unshare,
)

TYPE_CHECKING = False  # the module typing takes long to load
if TYPE_CHECKING:
    from typing import Any

SCRATCH = "/sys"  # always there, and of no use inside
BYTES_PER_FILE, LEAST_FILES = 4096, 4096


def main(plan: dict[str, Any]) -> None:
    """PLAN: {first_id, ids, disk_bytes, shown: [path], parts: [part] or null, layers: [path],
    folders: [[path, mode]], bwrap: [argument]}.

    `shown` appears at SCRATCH/shown/0, 1, ... All that is written goes to SCRATCH/changes, in which
    `folders` are made. With `parts`, a root of copies-on-write appears at SCRATCH/root: a part is
    {at, from, shifted}, its layers lie in the layers' folders under `part_name(at)`. Without, what
    layers hold is copied."""
    os.chdir("/")
    if os.geteuid() == 0:
        unshare(CLONE_NEWNS)
        mount("", "/", "", MS_REC | MS_PRIVATE)
        inside = make_user_namespace(f"0 {plan['first_id']} {plan['ids']}")
        prepare(plan, owner=plan["first_id"], inside=inside)
        setns(inside, CLONE_NEWUSER)
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    else:
        enter_user_namespace(os.geteuid(), os.getegid())
        mount("", "/", "", MS_REC | MS_PRIVATE)
        prepare(plan, owner=0, inside=None)
    os.execv(plan["bwrap"][0], plan["bwrap"])


def enter_user_namespace(user: int, group: int) -> None:
    unshare(CLONE_NEWUSER | CLONE_NEWNS)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"0 {user} 1"),
        ("gid_map", f"0 {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def prepare(plan: dict[str, Any], *, owner: int, inside: int | None) -> None:
    # What is shown must be found before the scratch covers /sys, in case it lies there.
    shown = [os.open(path, os.O_PATH) for path in plan["shown"]]
    # Empty files cost memory too, which no size counts.
    inodes = max(plan["disk_bytes"] // BYTES_PER_FILE, LEAST_FILES)
    size = f"size={plan['disk_bytes']},nr_inodes={inodes},mode=0755"
    mount("tmpfs", SCRATCH, "tmpfs", MS_NOSUID | MS_NODEV, size)
    for i, fd in enumerate(shown):
        bind_mount(f"/proc/self/fd/{fd}", f"{SCRATCH}/shown/{i}")
        os.close(fd)
    make_dir("changes", 0o755, owner)
    if plan["parts"] is not None and inside is not None:
        mount_overlays(plan["parts"], plan["layers"], owner, inside)
    else:
        for layer in plan["layers"]:
            copy(f"{layer}/.", f"{SCRATCH}/changes")
    base = "root" if plan["parts"] is not None else "changes"
    for name, mode in plan["folders"]:
        if not os.path.isdir(f"{SCRATCH}/{base}/{name}"):
            make_dir(f"{base}/{name}", mode, owner)


def bind_mount(source: str, place: str) -> None:
    if os.path.isdir(source):
        os.makedirs(place)
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        open(place, "w").close()
    mount(source, place, "", MS_BIND | MS_REC)


def make_dir(name: str, mode: int, owner: int) -> None:
    """A folder of the scratch, and those above it that are missing."""
    path = SCRATCH
    for step in name.split("/"):
        path = f"{path}/{step}"
        if not os.path.isdir(path):
            os.mkdir(path, 0o755)
            os.chown(path, owner, owner)
    os.chmod(path, mode)


def copy(source: str, target: str) -> None:
    child = os.posix_spawnp("cp", ["cp", "-a", source, target], {"PATH": "/usr/bin:/bin"})
    if os.waitpid(child, 0)[1]:
        raise OSError(f"could not copy {source}")


def mount_overlays(parts: list[dict[str, Any]], layers: list[str], owner: int, inside: int) -> None:
    """Each part's source, owned by the sandbox's root, under the layers that say how it differs."""
    make_dir("root", 0o755, owner)
    for i, layer in enumerate(layers):  # short names: an overlay's options fit on one page
        bind_mount(layer, f"{SCRATCH}/layers/{i}")
    for part in parts:
        name = part_name(part["at"])
        for kind in ("changes", "work", "lower"):
            make_dir(f"{kind}/{name}", 0o755, owner)
        lower = f"{SCRATCH}/lower/{name}"
        if part["shifted"]:
            mount_idmapped(part["from"], lower, inside)
        else:
            mount(part["from"], lower, "", MS_BIND)
        stack = [f"{SCRATCH}/layers/{i}/{name}" for i in range(len(layers))]
        lowers = ":".join([*filter(os.path.isdir, stack), lower])
        data = f"lowerdir={lowers},upperdir={SCRATCH}/changes/{name},workdir={SCRATCH}/work/{name}"
        mount("overlay", f"{SCRATCH}/root/{part['at']}", "overlay", 0, data)


def part_name(at: str) -> str:
    """
    >>> part_name("var/lib/dpkg"), part_name("")
    ('var+lib+dpkg', '+')
    """
    return at.replace("/", "+") or "+"
