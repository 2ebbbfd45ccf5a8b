"""Program that prepares mounts and user ids and then executes bubblewrap.

Started by `supervised.guest_command`.

It runs in its own mount namespace, so that nothing it mounts is visible outside and everything is
gone with its last process. It mounts a tmpfs of limited size over /sys, which holds all that the
sandbox writes. Then it drops its identity: root inside is an unused user id of this machine.
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

TYPE_CHECKING = False  # importing typing would slow the start down
if TYPE_CHECKING:
    from typing import Any

SCRATCH = "/sys"  # exists everywhere, and the sandbox does not need the original
BYTES_PER_FILE, MIN_FILES = 4096, 4096


def main(config: dict[str, Any]) -> None:
    """Set up the mounts and execute bubblewrap. Does not return.

    `config`: {first_id, ids, disk_bytes, binds: [path], overlays: [overlay] or null,
    layers: [path], dirs: [[path, mode]], bwrap: [argument]}.

    `binds` are mounted at SCRATCH/binds/0, 1, ... All that is written goes to SCRATCH/changes, in
    which `dirs` are created. With `overlays`, a copy-on-write root is assembled at SCRATCH/root: an
    overlay is {at, source, idmapped}, and each layer has its changes in the subdirectory
    `part_name(at)`. Without overlays, the contents of the layers are copied.
    """
    os.chdir("/")
    if os.geteuid() == 0:
        unshare(CLONE_NEWNS)
        mount("", "/", "", MS_REC | MS_PRIVATE)
        userns = make_user_namespace(f"0 {config['first_id']} {config['ids']}")
        prepare(config, owner=config["first_id"], userns=userns)
        setns(userns, CLONE_NEWUSER)
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    else:
        enter_user_namespace(os.geteuid(), os.getegid())
        mount("", "/", "", MS_REC | MS_PRIVATE)
        prepare(config, owner=0, userns=None)
    os.execv(config["bwrap"][0], config["bwrap"])


def enter_user_namespace(user: int, group: int) -> None:
    """Enter a user namespace in which this user and group are root."""
    unshare(CLONE_NEWUSER | CLONE_NEWNS)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"0 {user} 1"),
        ("gid_map", f"0 {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def prepare(config: dict[str, Any], *, owner: int, userns: int | None) -> None:
    # Opened before the tmpfs covers /sys, because a bind source may be below /sys.
    binds = [os.open(path, os.O_PATH) for path in config["binds"]]
    # Empty files use memory that the tmpfs size does not count, so inodes are limited too.
    inodes = max(config["disk_bytes"] // BYTES_PER_FILE, MIN_FILES)
    size = f"size={config['disk_bytes']},nr_inodes={inodes},mode=0755"
    mount("tmpfs", SCRATCH, "tmpfs", MS_NOSUID | MS_NODEV, size)
    for i, fd in enumerate(binds):
        bind_mount(f"/proc/self/fd/{fd}", f"{SCRATCH}/binds/{i}")
        os.close(fd)
    make_dir("changes", 0o755, owner)
    if config["overlays"] is not None and userns is not None:
        mount_overlays(config["overlays"], config["layers"], owner, userns)
    else:
        for layer in config["layers"]:
            copy(f"{layer}/.", f"{SCRATCH}/changes")
    base = "root" if config["overlays"] is not None else "changes"
    for name, mode in config["dirs"]:
        if not os.path.isdir(f"{SCRATCH}/{base}/{name}"):
            make_dir(f"{base}/{name}", mode, owner)


def bind_mount(source: str, target: str) -> None:
    """Bind-mount a file or directory at a target that does not exist yet."""
    if os.path.isdir(source):
        os.makedirs(target)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        open(target, "w").close()
    mount(source, target, "", MS_BIND | MS_REC)


def make_dir(name: str, mode: int, owner: int) -> None:
    """Create a directory below SCRATCH with its missing parents."""
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
        raise OSError(f"cp -a {source} failed")


def mount_overlays(
    overlays: list[dict[str, Any]], layers: list[str], owner: int, userns: int
) -> None:
    """Mount each overlay: its source, owned by the sandbox's root, below the snapshot layers."""
    make_dir("root", 0o755, owner)
    for i, layer in enumerate(layers):  # short paths: mount options must fit into one page
        bind_mount(layer, f"{SCRATCH}/layers/{i}")
    for overlay in overlays:
        name = part_name(overlay["at"])
        for kind in ("changes", "work", "lower"):
            make_dir(f"{kind}/{name}", 0o755, owner)
        lower = f"{SCRATCH}/lower/{name}"
        if overlay["idmapped"]:
            mount_idmapped(overlay["source"], lower, userns)
        else:
            mount(overlay["source"], lower, "", MS_BIND)
        stack = [f"{SCRATCH}/layers/{i}/{name}" for i in range(len(layers))]
        lowers = ":".join([*filter(os.path.isdir, stack), lower])
        data = f"lowerdir={lowers},upperdir={SCRATCH}/changes/{name},workdir={SCRATCH}/work/{name}"
        mount("overlay", f"{SCRATCH}/root/{overlay['at']}", "overlay", 0, data)


def part_name(at: str) -> str:
    """Name of the directory that holds the changes of one mount point.

    >>> part_name("var/lib/dpkg"), part_name("")
    ('var+lib+dpkg', '+')
    """
    return at.replace("/", "+") or "+"
