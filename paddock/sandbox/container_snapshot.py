"""Changed files of a container: saved to an archive and restored into a fresh container.

The engine itself reads and writes the files, because programs inside may have been replaced.
"""

import json
import re
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from paddock.sandbox.container_engine import ENGINE_CWD, ContainerEngine
from paddock.sandbox.sandbox import SandboxError
from paddock.sandbox.snapshot_filter import PROGRAMS, SnapshotFilter

HEADER = "paddock.folders"  # PAX header: which directories the archive replaces or adds to
CHANGED = re.compile(r"^[ACD] /([^/\n]+(?:/[^/\n]+)?)", re.MULTILINE)
# Files that the engine itself creates.
ENGINE_FILES = ("etc/hostname", "etc/hosts", "etc/mtab", "etc/resolv.conf", "run/.containerenv",
           "run/secrets")  # fmt: skip


def save_snapshot(
    engine: ContainerEngine, name: str, keep: SnapshotFilter, mounted: Sequence[str], file: Path
) -> None:
    """Write the changed directories of a container to `file`, filtered by `keep`.

    They are saved as top-level directories; where something is mounted below one, its
    subdirectories are saved instead.
    """
    mounts = [path.strip("/") for path in mounted]
    changed = _units(CHANGED.findall(engine.run("diff", name)), mounts)
    tops = [top for top in changed if not keep.excludes(top)]
    folders = {
        "replaced": [top for top in tops if top.split("/")[0] not in keep.additions],
        "additions": [top for top in tops if top.split("/")[0] in keep.additions],
    }
    header = {HEADER: json.dumps(folders)}
    with tarfile.open(file, "w", format=tarfile.PAX_FORMAT, pax_headers=header) as archive:
        for top in tops:
            argv = [engine.program, "cp", f"{name}:/{top}", "-"]
            pipe = subprocess.PIPE
            with subprocess.Popen(
                argv, stdout=pipe, stderr=subprocess.DEVNULL, cwd=ENGINE_CWD
            ) as cp:
                assert cp.stdout is not None
                try:
                    with tarfile.open(fileobj=cp.stdout, mode="r|") as source:
                        _copy(source, archive, partial(_is_kept, keep, top))
                except tarfile.ReadError:
                    continue  # the directory was deleted


def _units(changed: list[str], mounted: list[str]) -> list[str]:
    """Directories to save, so that none contains a mount point.

    >>> _units(["app/a", "root", "root/x", "root/lib"], ["root/lib/python"])
    ['app', 'root/x']
    """
    found = set()
    for path in changed:
        top = path.split("/")[0]
        unit = path if any(f"{mount}/".startswith(f"{top}/") for mount in mounted) else top
        if not any(f"{mount}/".startswith(f"{unit}/") for mount in mounted):
            found.add(unit)
    return sorted(found)


def _is_kept(keep: SnapshotFilter, top: str, entry: tarfile.TarInfo) -> bool:
    """Whether an entry is kept. The engine's names start at the last part of `top`; fixed here."""
    parent = top.rpartition("/")[0]
    if parent:
        entry.name = f"{parent}/{entry.name}"
        entry.linkname = f"{parent}/{entry.linkname}" if entry.islnk() else entry.linkname
    return entry.name not in ENGINE_FILES and not _is_excluded(keep, entry)


def _is_excluded(keep: SnapshotFilter, entry: tarfile.TarInfo) -> bool:
    loose = "/" not in entry.name and not entry.isdir() and not keep.top_files
    # A hard link to a file that is not kept has no target.
    orphan = entry.islnk() and keep.excludes(entry.linkname)
    return loose or orphan or keep.excludes(entry.name, link=entry.issym())


def _copy(
    source: tarfile.TarFile, target: tarfile.TarFile, is_kept: Callable[[tarfile.TarInfo], bool]
) -> None:
    for entry in source:
        if is_kept(entry):
            target.addfile(entry, source.extractfile(entry) if entry.isreg() else None)


def archive_folders(file: Path) -> tuple[list[str], list[str]]:
    """The directories that an archive replaces, and those to which it adds files."""
    with tarfile.open(file) as archive:
        folders = json.loads(archive.pax_headers.get(HEADER, "{}"))
    return folders.get("replaced", []), folders.get("additions", [])


def restore_snapshot(engine: ContainerEngine, name: str, file: Path, existing: set[str]) -> None:
    """Extract an archive into a container.

    `existing` are paths that are not overwritten in directories to which the archive adds.
    Raises SandboxError if the engine refuses.
    """
    additions = {path.split("/")[0] for path in archive_folders(file)[1]}
    programs = {path.rpartition("/")[2] for path in existing if path.rpartition("/")[0] in PROGRAMS}

    def is_kept(entry: tarfile.TarInfo) -> bool:
        if entry.name.split("/")[0] not in additions or entry.isdir():
            return True
        folder, _, base = entry.name.rpartition("/")
        return entry.name not in existing and not (folder in PROGRAMS and base in programs)

    argv = [engine.program, "cp", "-", f"{name}:/"]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ENGINE_CWD
    ) as cp:
        assert cp.stdin is not None and cp.stderr is not None
        try:
            with tarfile.open(file) as source:
                # Not closed, because closing pads the archive: podman stops reading at its end and
                # fails on what follows.
                target = tarfile.open(fileobj=cp.stdin, mode="w|", format=tarfile.PAX_FORMAT)  # noqa: SIM115
                _copy(source, target, is_kept)
                assert target.fileobj is not None
                target.fileobj.write(tarfile.NUL * (2 * tarfile.BLOCKSIZE))
                target.fileobj.close()
        except BrokenPipeError:
            pass  # its stderr has the reason
        errors = cp.communicate()[1].decode(errors="replace").strip()
    if cp.returncode:
        raise SandboxError(f"the snapshot could not be restored: {errors}")
