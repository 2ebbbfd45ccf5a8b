"""System calls that Python does not offer, by ctypes.

Standard library only: the launcher and the supervisor run this file's source outside the package.
"""

import ctypes
import os

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 22, 36, 38
_SECCOMP_MODE_FILTER, _BPF_BYTES = 2, 8
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442  # the same on every architecture
_AT_FDCWD, _AT_EMPTY_PATH, _OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH = -100, 0x1000, 1, 4
_MOUNT_ATTR_IDMAP = 0x00100000

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def _checked(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    _checked(_libc.setns(fd, kind), "setns")


def prctl(option: int, value: int) -> None:
    _checked(_libc.prctl(option, value, 0, 0, 0), "prctl")


def load_filter(program: bytes) -> None:
    """Load a seccomp filter for this process and all its future children."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    buffer = ctypes.create_string_buffer(program, len(program))
    filter_program = _Program(len(program) // _BPF_BYTES, ctypes.addressof(buffer))
    result = _libc.prctl(PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filter_program), 0, 0)
    _checked(result, "load the system-call filter")


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    parts = [part.encode() or None for part in (source, target, kind)]
    result = _libc.mount(*parts, ctypes.c_ulong(flags), data.encode() or None)
    _checked(result, f"mount {kind or source} on {target}")


def mount_idmapped(source: str, target: str, userns: int) -> None:
    """Bind-mount `source` with owners mapped by a user namespace (Linux 5.12 or newer)."""
    path, flags = source.encode(), _OPEN_TREE_CLONE | os.O_CLOEXEC
    tree = _checked(_libc.syscall(_OPEN_TREE, _AT_FDCWD, path, flags), f"open_tree {source}")
    attr = _MountAttr(_MOUNT_ATTR_IDMAP, 0, 0, userns)
    size = ctypes.c_size_t(ctypes.sizeof(attr))
    result = _libc.syscall(_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, ctypes.byref(attr), size)
    _checked(result, f"mount_setattr {source}")
    to = target.encode()
    result = _libc.syscall(_MOVE_MOUNT, tree, b"", _AT_FDCWD, to, _MOVE_MOUNT_F_EMPTY_PATH)
    _checked(result, f"move_mount to {target}")
    os.close(tree)


def make_user_namespace(maps: str) -> int:
    """A new user namespace with this map of users and groups, as a file descriptor.

    The caller must be allowed to write the map: root, or the owner of the ids in its own namespace.
    """
    ready_r, ready_w = os.pipe()
    hold_r, hold_w = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(hold_w)
            unshare(CLONE_NEWUSER)
            os.write(ready_w, b"1")
            os.read(hold_r, 1)
        finally:
            os._exit(0)
    os.close(ready_w)
    try:
        if not os.read(ready_r, 1):
            raise OSError(1, "user namespaces are not allowed on this machine")
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{child}/{name}", "w") as file:
                file.write(maps)
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY)
    finally:
        for fd in (ready_r, hold_r, hold_w):
            os.close(fd)
        os.waitpid(child, 0)
