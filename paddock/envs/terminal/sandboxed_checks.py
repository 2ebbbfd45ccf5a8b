"""Program that runs inside the verifier's sandbox: checks the state of a workspace.

    cd WORKSPACE && python3 sandboxed_checks.py CHECKS.json      (-: standard input)

prints {check: whether it passes}. Standard library only.
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
MAX_BYTES = 1 << 22  # of a file or archive; no task needs more


def text(path: str, value: Any) -> bool:
    """The file has this text, ignoring whitespace at the end of lines and of the file."""
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
    """The program prints the expected output: [[arguments, input, output], ...]."""
    for arguments, stdin, expected in value:
        done = subprocess.run(
            [os.path.abspath(path), *arguments], input=stdin, capture_output=True, text=True,
            timeout=RUN_S, check=False, cwd=os.path.dirname(os.path.abspath(path)),
        )  # fmt: skip
        if done.returncode or trimmed(done.stdout) != trimmed(expected):
            return False
    return True


def archive(path: str, value: Any) -> bool:
    """The archive holds exactly these files with these texts; directories are ignored."""
    if not os.path.isfile(path):  # opening a pipe would block for ever
        return False
    with tarfile.open(path) as packed:
        files = [entry for entry in packed.getmembers() if entry.isfile()]
        if sum(entry.size for entry in files) > MAX_BYTES:  # the archive itself may be small
            return False
        found = {os.path.normpath(f.name): packed.extractfile(f).read().decode() for f in files}  # type: ignore[union-attr]
    return found == value


def link(path: str, value: Any) -> bool:
    """A symbolic link to the same file as this path."""
    return os.path.islink(path) and os.path.realpath(path) == os.path.realpath(value)


def tree(path: str, value: Any) -> bool:
    """The directory contains exactly these files, at any depth."""
    found = []
    for folder, inner, files in os.walk(path):
        inner[:] = [name for name in inner if name != ".git"]
        found += [os.path.relpath(os.path.join(folder, name), path) for name in files]
    return sorted(found) == sorted(value)


def commits(path: str, value: Any) -> bool:
    """The branches have these commits, newest first, and the work tree is clean:
    {branch: [subject, ...]}."""
    _remove_git_config(path)
    for branch, subjects in value.items():
        log = _git(path, "log", "--format=%s", branch)
        if log.splitlines() != subjects:
            return False
    return not _git(path, "status", "--porcelain").strip()


def _remove_git_config(path: str) -> None:
    """Remove the policy's git settings, which can name programs that git runs."""
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
    env = {
        "PATH": os.defpath, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"
    }  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=RUN_S, check=True,
        env=env,
    )  # fmt: skip
    return done.stdout


def _read(path: str) -> str:
    if not os.path.isfile(path):
        raise FileNotFoundError(path)
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(MAX_BYTES)


def trimmed(content: str) -> list[str]:
    """Lines without trailing whitespace."""
    return [line.rstrip() for line in content.rstrip().splitlines()]


CHECKS: dict[str, Callable[[str, Any], bool]] = {
    "text": text, "lines": lines, "absent": absent, "mode": mode, "runs": runs,
    "archive": archive, "link": link, "tree": tree, "commits": commits,
}  # fmt: skip


def check_expectation(expect: dict[str, Any]) -> bool:
    """Whether a check passes. Any error is a failure, because the files may be arbitrary."""
    try:
        return CHECKS[expect["how"]](expect["path"], expect["value"])
    except Exception:  # tarfile's decompressors each raise their own errors
        return False


def main(file: str) -> None:
    with open(0 if file == "-" else file) as opened:
        checks = json.load(opened)
    results = {
        f"{i} {each['how']} {each['path']}": check_expectation(each)
        for i, each in enumerate(checks, 1)
    }
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
