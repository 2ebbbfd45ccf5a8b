"""Root file system of sandboxes, made of this machine's own.

Programs and libraries are visible as they are; of /etc there is a copy of what programs need and
everybody may read; no user data. Paths that are not named here do not exist inside.
"""

import functools
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TOPS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
ETC = (
    "adduser.conf", "alternatives", "apt", "bash.bashrc", "ca-certificates", "ca-certificates.conf",
    "debconf.conf", "debian_version", "default", "deluser.conf", "dpkg", "emacs", "environment",
    "ethertypes", "fonts", "gai.conf", "groff", "host.conf", "init.d", "inputrc", "java",
    "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "libaudit.conf", "locale.alias", "locale.conf",
    "locale.gen", "localtime", "login.defs", "logrotate.d", "magic", "magic.mime", "mime.types",
    "nanorc", "nsswitch.conf", "os-release", "pam.conf", "pam.d", "perl", "pki", "profile",
    "profile.d", "protocols", "python3", "rc0.d", "rc1.d", "rc2.d", "rc3.d", "rc4.d", "rc5.d",
    "rc6.d", "rcS.d", "rpc", "security", "selinux", "services", "sgml", "shells", "skel", "ssl",
    "sysctl.d", "systemd", "terminfo", "timezone", "ucf.conf", "update-motd.d", "vim", "wgetrc",
    "X11", "xattr.conf", "xml",
)  # fmt: skip
EXCLUDED_ETC = (
    "private",
    "auth.conf",
    "auth.conf.d",
    "opasswd",
)  # never copied, even if world-readable
FOLDERS = {  # empty directories: path -> mode
    "boot": 0o755, "dev": 0o755, "home": 0o755, "media": 0o755, "mnt": 0o755, "opt": 0o755,
    "proc": 0o755, "root": 0o700, "run": 0o755, "run/lock": 0o1777, "srv": 0o755, "sys": 0o755,
    "tmp": 0o1777, "usr": 0o755, "var": 0o755, "var/backups": 0o755, "var/cache": 0o755,
    "var/cache/apt": 0o755, "var/cache/apt/archives": 0o755,
    "var/cache/apt/archives/partial": 0o755,
    "var/lib": 0o755, "var/lib/apt": 0o755, "var/lib/apt/lists": 0o755,
    "var/lib/apt/lists/partial": 0o755, "var/lib/dpkg": 0o755, "var/lib/misc": 0o755,
    "var/lib/pam": 0o755, "var/local": 0o755, "var/log": 0o755, "var/log/apt": 0o755,
    "var/mail": 0o755, "var/spool": 0o755, "var/tmp": 0o1777,
}  # fmt: skip
HOSTS = "127.0.0.1 localhost\n::1 localhost ip6-localhost\n"


@dataclass(frozen=True, slots=True)
class RootFilesystem:
    """A small root directory with everything but programs and libraries."""

    folder: Path
    links: tuple[tuple[str, str], ...]  # /bin -> usr/bin and the like
    tops: tuple[str, ...]  # real directories with programs and libraries: usr, perhaps bin, lib ...


def cache_dir() -> Path:
    """Directory in which root file systems and snapshots are cached."""
    return Path.home() / ".cache" / "paddock" / "sandbox"


@functools.cache
def python_command() -> tuple[str, tuple[str, ...]]:
    """Path of this interpreter outside its virtual environment, and the directories that it needs
    besides the system's."""
    program = os.path.realpath(sys.executable)
    if program.startswith("/usr/"):
        return program, ()
    return program, (os.path.realpath(sys.base_prefix),)


@functools.cache
def make_rootfs(cache: Path, owner: int) -> RootFilesystem:
    """A root whose files belong to `owner`, cached by the contents of /etc.

    /etc is inspected once per process.
    """
    links, tops = [], []
    for name in TOPS:
        path = Path("/", name)
        if path.is_symlink():
            links.append((name, os.readlink(path)))
        elif path.is_dir():
            tops.append(name)
    sources = list(_etc_files())
    digest = hashlib.blake2b(repr((links, tops, owner, ETC, FOLDERS)).encode(), digest_size=8)
    for path in sources:
        status = path.lstat()
        digest.update(f"{path}\0{status.st_mtime_ns}\0{status.st_size}\n".encode())
    folder = cache / f"system-{digest.hexdigest()}"
    if not folder.is_dir():
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=cache, prefix="making-"))
        _fill(made, sources, links, tops)
        _chown_tree(made, owner)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(made)
    return RootFilesystem(folder, tuple(links), tuple(tops))


def _etc_files() -> Iterator[Path]:
    """Files and links of /etc to copy, in a fixed order."""
    for name in ETC:
        top = Path("/etc", name)
        if top.is_symlink() or top.is_file():
            yield from _if_world_readable(top)
        for folder, inner, files in os.walk(top):
            inner[:] = sorted(each for each in inner if each not in EXCLUDED_ETC)
            for each in sorted((*files, *inner)):
                path = Path(folder, each)
                if each not in EXCLUDED_ETC and (path.is_symlink() or path.is_file()):
                    yield from _if_world_readable(path)


def _if_world_readable(path: Path) -> Iterator[Path]:
    if path.is_symlink() or path.stat().st_mode & 0o004:
        yield path


def _fill(made: Path, sources: list[Path], links: list[tuple[str, str]], tops: list[str]) -> None:
    made.chmod(0o755)
    for name in (*FOLDERS, *tops):
        (made / name).mkdir(exist_ok=True)
        (made / name).chmod(FOLDERS.get(name, 0o755))
    for name, target in (*links, ("var/run", "/run"), ("var/lock", "/run/lock")):
        (made / name).symlink_to(target)
    for path in sources:
        copied = made / path.relative_to("/")
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copied, follow_symlinks=False)
    etc = made / "etc"
    etc.mkdir(exist_ok=True)
    users = [row for row in _rows("/etc/passwd") if _is_system_account(row)]
    texts = {
        "passwd": "".join(f"{':'.join(_passwd_entry(row))}\n" for row in users),
        "shadow": "".join(f"{row[0]}:*:19700:0:99999:7:::\n" for row in users),
        "group": "".join(
            f"{row[0]}:x:{row[2]}:\n" for row in _rows("/etc/group") if _is_system_account(row)
        ),
        "hosts": HOSTS,
        "hostname": "sandbox\n",
        "resolv.conf": "",
        "machine-id": "",
    }
    for name, text in texts.items():
        (etc / name).write_text(text)
    (etc / "shadow").chmod(0o640)
    skel = Path("/etc/skel")
    for path in sorted(skel.iterdir()) if skel.is_dir() else ():
        if path.is_file():
            shutil.copy2(path, made / "root" / path.name)


def _rows(file: str) -> list[list[str]]:
    try:
        return [line.split(":") for line in Path(file).read_text().splitlines()]
    except OSError:
        return [["root", "x", "0", "0", "root", "/root", "/bin/sh"]]


def _is_system_account(row: list[str]) -> bool:
    """Whether an entry is a system user or group; accounts of people are not visible inside."""
    return len(row) >= 3 and row[2].isdigit() and (int(row[2]) < 1000 or int(row[2]) == 65534)


def _passwd_entry(row: list[str]) -> list[str]:
    home = "/root" if row[2] == "0" else row[5]
    return [row[0], "x", row[2], row[3], "", home, row[6]]


def _chown_tree(made: Path, owner: int) -> None:
    if os.geteuid() != 0:
        return
    for folder, inner, files in os.walk(made):
        for name in (*inner, *files):
            os.lchown(os.path.join(folder, name), owner, owner)
    os.chown(made, owner, owner)
