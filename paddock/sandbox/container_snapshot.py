"""What a container has changed, out of it and into a fresh one.

The engine itself reads and writes the files: no program inside is asked, since whoever worked there
may have replaced it.
"""

import json
import re
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from paddock.sandbox.container_engine import NOWHERE, ContainerEngine
from paddock.sandbox.sandbox import SandboxError
from paddock.sandbox.snapshot_filter import PROGRAMS, SnapshotFilter

HEADER = "paddock.folders"  # in an archive's own header: which folders it replaces or adds to
CHANGED = re.compile(r"^[ACD] /([^/\n]+(?:/[^/\n]+)?)", re.MULTILINE)
# Laid by the engine itself.
ENGINES = ("etc/hostname", "etc/hosts", "etc/mtab", "etc/resolv.conf", "run/.containerenv",
           "run/secrets")  # fmt: skip


def save_snapshot(
    engine: ContainerEngine, name: str, keep: SnapshotFilter, mounted: Sequence[str], file: Path
) -> None:
    """Write the folders that a container has changed, as far as they are kept: those at the root,
    or where something is mounted below one, those in it."""
    places = [path.strip("/") for path in mounted]
    changed = _units(CHANGED.findall(engine.run("diff", name)), places)
    tops = [top for top in changed if not keep.excludes(top)]
    folders = {
        "replaced": [top for top in tops if top.split("/")[0] not in keep.additions],
        "additions": [top for top in tops if top.split("/")[0] in keep.additions],
    }
    header = {HEADER: json.dumps(folders)}
    with tarfile.open(file, "w", format=tarfile.PAX_FORMAT, pax_headers=header) as archive:
        for top in tops:
            words = [engine.program, "cp", f"{name}:/{top}", "-"]
            pipe = subprocess.PIPE
            with subprocess.Popen(words, stdout=pipe, stderr=subprocess.DEVNULL, cwd=NOWHERE) as cp:
                assert cp.stdout is not None
                try:
                    with tarfile.open(fileobj=cp.stdout, mode="r|") as source:
                        _copy(source, archive, partial(_kept, keep, top))
                except tarfile.ReadError:
                    continue  # it was deleted


def _units(changed: list[str], mounted: list[str]) -> list[str]:
    """
    >>> _units(["app/a", "root", "root/x", "root/lib"], ["root/lib/python"])
    ['app', 'root/x']
    """
    found = set()
    for path in changed:
        top = path.split("/")[0]
        unit = path if any(f"{place}/".startswith(f"{top}/") for place in mounted) else top
        if not any(f"{place}/".startswith(f"{unit}/") for place in mounted):
            found.add(unit)
    return sorted(found)


def _kept(keep: SnapshotFilter, top: str, entry: tarfile.TarInfo) -> bool:
    """Whether an entry is kept, whose name the engine began at the last part of `top`."""
    parent = top.rpartition("/")[0]
    if parent:
        entry.name = f"{parent}/{entry.name}"
        entry.linkname = f"{parent}/{entry.linkname}" if entry.islnk() else entry.linkname
    return entry.name not in ENGINES and not _dropped(keep, entry)


def _dropped(keep: SnapshotFilter, entry: tarfile.TarInfo) -> bool:
    loose = "/" not in entry.name and not entry.isdir() and not keep.top_files
    # A second name of a file that is not kept has nothing to be linked to.
    orphan = entry.islnk() and keep.excludes(entry.linkname)
    return loose or orphan or keep.excludes(entry.name, link=entry.issym())


def _copy(
    source: tarfile.TarFile, target: tarfile.TarFile, wanted: Callable[[tarfile.TarInfo], bool]
) -> None:
    for entry in source:
        if wanted(entry):
            target.addfile(entry, source.extractfile(entry) if entry.isreg() else None)


def archive_folders(file: Path) -> tuple[list[str], list[str]]:
    """Which folders an archive replaces, and to which it adds."""
    with tarfile.open(file) as archive:
        said = json.loads(archive.pax_headers.get(HEADER, "{}"))
    return said.get("replaced", []), said.get("additions", [])


def restore_snapshot(engine: ContainerEngine, name: str, file: Path, there: set[str]) -> None:
    """Lay an archive into a container. `there`: paths that stay as they are in folders to which it
    adds."""
    additions = {path.split("/")[0] for path in archive_folders(file)[1]}
    programs = {path.rpartition("/")[2] for path in there if path.rpartition("/")[0] in PROGRAMS}

    def wanted(entry: tarfile.TarInfo) -> bool:
        if entry.name.split("/")[0] not in additions or entry.isdir():
            return True
        folder, _, base = entry.name.rpartition("/")
        return entry.name not in there and not (folder in PROGRAMS and base in programs)

    words = [engine.program, "cp", "-", f"{name}:/"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, cwd=NOWHERE) as cp:
        assert cp.stdin is not None and cp.stderr is not None
        try:
            with tarfile.open(file) as source:
                # Never closed, which would pad the end: podman stops reading there, and what comes
                # after is an error to it.
                target = tarfile.open(fileobj=cp.stdin, mode="w|", format=tarfile.PAX_FORMAT)  # noqa: SIM115
                _copy(source, target, wanted)
                assert target.fileobj is not None
                target.fileobj.write(tarfile.NUL * (2 * tarfile.BLOCKSIZE))
                target.fileobj.close()
        except BrokenPipeError:
            pass  # what it says is the reason
        said = cp.communicate()[1].decode(errors="replace").strip()
    if cp.returncode:
        raise SandboxError(f"no snapshot to start from: {said}")
