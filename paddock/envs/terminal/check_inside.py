"""A program of its own: what holds of a workspace, inside a sandbox of the grader's own.

    cd WORKSPACE && python3 check_inside.py EXPECTS.json

prints {part: whether it holds}. Standard library only.
"""

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from typing import Any

RUN_S = 20
MOST_BYTES = 1 << 22  # of what is read; no puzzle asks for so much


def text(path: str, value: Any) -> bool:
    """The file has this text; blanks at the end of lines and of the file do not count."""
    return _trimmed(_read(path)) == _trimmed(value)


def lines(path: str, value: Any) -> bool:
    """The file has these lines, in any order."""
    return sorted(_trimmed(_read(path))) == sorted(_trimmed(value))


def absent(path: str, _: Any) -> bool:
    return not os.path.lexists(path)


def mode(path: str, value: Any) -> bool:
    """The permission bits are exactly these."""
    return not os.path.islink(path) and os.stat(path).st_mode & 0o7777 == value


def runs(path: str, value: Any) -> bool:
    """Run with each input, the program says what it should: [[arguments, input, output], ...]."""
    for arguments, given, wanted in value:
        done = subprocess.run(
            [os.path.abspath(path), *arguments], input=given, capture_output=True, text=True,
            timeout=RUN_S, check=False, cwd=os.path.dirname(os.path.abspath(path)),
        )  # fmt: skip
        if done.returncode or _trimmed(done.stdout) != _trimmed(wanted):
            return False
    return True


def archive(path: str, value: Any) -> bool:
    """The archive holds exactly these files with these texts; folders do not count."""
    with tarfile.open(path) as packed:
        files = [entry for entry in packed.getmembers() if entry.isfile()]
        if sum(entry.size for entry in files) > MOST_BYTES:  # packed, they may have been few
            return False
        found = {os.path.normpath(f.name): packed.extractfile(f).read().decode() for f in files}  # type: ignore[union-attr]
    return found == value


def link(path: str, value: Any) -> bool:
    """A symbolic link that leads to the same file as this path does."""
    return os.path.islink(path) and os.path.realpath(path) == os.path.realpath(value)


def tree(path: str, value: Any) -> bool:
    """Below the folder there are exactly these files."""
    found = []
    for folder, inner, files in os.walk(path):
        inner[:] = [name for name in inner if name != ".git"]
        found += [os.path.relpath(os.path.join(folder, name), path) for name in files]
    return sorted(found) == sorted(value)


def commits(path: str, value: Any) -> bool:
    """The repository's branch has these subjects, newest first, and nothing is left to commit:
    {branch: [subject, ...]}."""
    for branch, subjects in value.items():
        said = _git(path, "log", "--format=%s", branch)
        if said.splitlines() != subjects:
            return False
    return not _git(path, "status", "--porcelain").strip()


def _git(path: str, *words: str) -> str:
    command = ["git", "-c", f"safe.directory={os.path.abspath(path)}", "-C", path, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=True)
    return done.stdout


def _read(path: str) -> str:
    if not os.path.isfile(path):
        raise FileNotFoundError(path)
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(MOST_BYTES)


def _trimmed(whole: str) -> list[str]:
    return [line.rstrip() for line in whole.rstrip().splitlines()]


HOW: dict[str, Callable[[str, Any], bool]] = {
    "text": text, "lines": lines, "absent": absent, "mode": mode, "runs": runs,
    "archive": archive, "link": link, "tree": tree, "commits": commits,
}  # fmt: skip


def holds(expect: dict[str, Any]) -> bool:
    """What the player left may be anything: whatever it makes go wrong, it does not hold."""
    try:
        return HOW[expect["how"]](expect["path"], expect["value"])
    except Exception:  # also what tar's helpers raise of damaged data, each its own kind
        return False


def main(file: str) -> None:
    with open(file) as said:
        expects = json.load(said)
    found = {f"{i} {each['how']} {each['path']}": holds(each) for i, each in enumerate(expects, 1)}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
