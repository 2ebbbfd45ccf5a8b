"""A program of its own: what holds of a workspace, inside a sandbox of the grader's own.

    cd WORKSPACE && python3 check_inside.py EXPECTS.json      (-: standard input)

prints {part: whether it holds}. Standard library only.
"""

import contextlib
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
    return trimmed(_read(path)) == trimmed(value)


def lines(path: str, value: Any) -> bool:
    """The file has these lines, in any order."""
    return sorted(trimmed(_read(path))) == sorted(trimmed(value))


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
        if done.returncode or trimmed(done.stdout) != trimmed(wanted):
            return False
    return True


def archive(path: str, value: Any) -> bool:
    """The archive holds exactly these files with these texts; folders do not count."""
    if not os.path.isfile(path):  # to open a pipe would last for ever
        return False
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
    _disarm(path)
    for branch, subjects in value.items():
        said = _git(path, "log", "--format=%s", branch)
        if said.splitlines() != subjects:
            return False
    return not _git(path, "status", "--porcelain").strip()


def _disarm(path: str) -> None:
    """Settings name programs that git runs by itself, as the player's: they are not its own."""
    inner = os.path.join(path, ".git")
    if os.path.islink(inner) or not os.path.isdir(inner):
        raise NotADirectoryError(inner)
    for name in ("config", "config.worktree", "commondir", "info/attributes"):
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(inner, name))
    with open(os.path.join(inner, "config"), "x") as file:
        file.write("[core]\n\trepositoryformatversion = 0\n\tbare = false\n")


def _git(path: str, *words: str) -> str:
    command = ["git", "-c", f"safe.directory={os.path.abspath(path)}", "-C", path, *words]
    alone = {
        "PATH": os.defpath, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"
    }  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=RUN_S, check=True,
        env=alone,
    )  # fmt: skip
    return done.stdout


def _read(path: str) -> str:
    if not os.path.isfile(path):
        raise FileNotFoundError(path)
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(MOST_BYTES)


def trimmed(whole: str) -> list[str]:
    return [line.rstrip() for line in whole.rstrip().splitlines()]


CHECKS: dict[str, Callable[[str, Any], bool]] = {
    "text": text, "lines": lines, "absent": absent, "mode": mode, "runs": runs,
    "archive": archive, "link": link, "tree": tree, "commits": commits,
}  # fmt: skip


def check_expectation(expect: dict[str, Any]) -> bool:
    """What the player left may be anything: whatever it makes go wrong, it does not hold."""
    try:
        return CHECKS[expect["how"]](expect["path"], expect["value"])
    except Exception:  # also what tar's helpers raise of damaged data, each its own kind
        return False


def main(file: str) -> None:
    with open(0 if file == "-" else file) as said:
        expects = json.load(said)
    found = {
        f"{i} {each['how']} {each['path']}": check_expectation(each)
        for i, each in enumerate(expects, 1)
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
