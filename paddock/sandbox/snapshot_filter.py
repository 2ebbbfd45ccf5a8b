"""Filter of the changes that a snapshot contains."""

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

# Directories of a default PATH.
PROGRAMS = ("usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin", "sbin", "bin")


@dataclass(frozen=True, slots=True)
class SnapshotFilter:
    """Which changes are kept. Paths are relative to the root; `*` and `?` match within a name.

    `without`: files, and directories with their contents, that are dropped. A symbolic link in
    place of a parent of one is dropped too, because it would redirect the path.
    `spared`: exceptions, which are kept.
    `additions`: directories of which only new files are kept. Existing files stay unchanged, and
    no new program may have the name of an existing one.
    """

    without: tuple[str, ...] = ()
    spared: tuple[str, ...] = ()
    additions: tuple[str, ...] = ()
    top_files: bool = True  # keep files and links directly below the root

    def excludes(self, path: str, *, link: bool = False) -> bool:
        """Whether a path is dropped.

        >>> keep = SnapshotFilter(without=("usr", "home/*/.*"), spared=("usr/src/app",))
        >>> paths = ("usr/bin/ls", "usr/src/app/x", "home/me/.a", "home/me")
        >>> [keep.excludes(path) for path in paths]
        [True, False, True, False]
        >>> keep.excludes("home", link=True), keep.excludes("usr/src")
        (True, False)
        """
        parts = path.split("/")
        if any(self._contains(path, each) or self._contains(each, path) for each in self.spared):
            return False
        for pattern in self.without:
            names = pattern.split("/")
            if all(map(fnmatchcase, parts, names)) and (link or len(parts) >= len(names)):
                return True
        return False

    @staticmethod
    def _contains(upper: str, path: str) -> bool:
        return path == upper or path.startswith(f"{upper}/")


KEEP_ALL = SnapshotFilter()


def apply_filter(keep: SnapshotFilter, parts: Sequence[tuple[str, Path, Sequence[Path]]]) -> None:
    """Delete from a copy of changes what is not kept.

    A part is its mount point, the directory with its changes, and the lower layers, newest first.
    """
    programs = set(_programs(parts)) if keep.additions else set()
    for at, folder, lowers in parts:
        _prune(keep, at, folder)
        if at.split("/")[0] in keep.additions:
            _only_additions(folder, lowers)
        for name in PROGRAMS if keep.additions else ():
            if at and name.startswith(f"{at}/"):
                _remove_named(folder / name.removeprefix(f"{at}/"), programs)


def _prune(keep: SnapshotFilter, at: str, folder: Path) -> None:
    for child in _children(folder):
        path = f"{at}/{child.name}" if at else child.name
        linked = child.is_symlink()
        loose = not at and (linked or child.is_file()) and not keep.top_files
        if loose or keep.excludes(path, link=linked):
            _remove(child)
        elif child.is_dir() and not linked and _has_patterns_below(keep, path):
            _prune(keep, path, child)


def _has_patterns_below(keep: SnapshotFilter, path: str) -> bool:
    """Whether something below a directory that is kept may be dropped."""
    parts = path.split("/")
    patterns = [pattern.split("/") for pattern in keep.without]
    return any(all(map(fnmatchcase, parts, names)) for names in patterns)


def _only_additions(folder: Path, lowers: Sequence[Path]) -> None:
    for child in _children(folder):
        existing = [lower / child.name for lower in lowers if os.path.lexists(lower / child.name)]
        below = [path for path in existing if path.is_dir() and not path.is_symlink()]
        if below and child.is_dir() and not child.is_symlink() and not _is_opaque(child):
            _only_additions(child, below)
        elif existing:
            _remove(child)


def _programs(parts: Sequence[tuple[str, Path, Sequence[Path]]]) -> Iterator[str]:
    for at, _, lowers in parts:
        for name in PROGRAMS:
            if at and name.startswith(f"{at}/"):
                for lower in lowers:
                    yield from (each.name for each in _children(lower / name[len(at) + 1 :]))


def _remove_named(folder: Path, names: Iterable[str]) -> None:
    if not folder.is_symlink():
        for child in _children(folder):
            if child.name in names:
                _remove(child)


def _children(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _is_opaque(folder: Path) -> bool:
    """Whether overlayfs hides the lower layers of this directory."""
    with contextlib.suppress(OSError):
        return os.getxattr(folder, "trusted.overlay.opaque") == b"y"
    return False


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
