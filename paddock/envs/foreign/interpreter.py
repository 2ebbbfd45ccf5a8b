"""The Python that an environment runs in: one that is named, or a virtual environment."""

import fcntl
import logging
import shutil
import subprocess
import sys
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from paddock.envs.registry import EnvError

CACHE = Path.home() / ".cache" / "paddock" / "venvs"
_LOG = logging.getLogger(__name__)
_MAX_REASON_CHARS = 1500


def find_interpreter(python: str, requirements: Sequence[str], cache: Path = CACHE) -> str:
    """The path of `python`; if it is empty, of a virtual environment with these requirements,
    which is made in `cache` on first use, by one process at a time. EnvError if it fails."""
    if python:
        found = shutil.which(python)
        if not found:
            raise EnvError(f"python: {python!r} is not a program")
        return found
    folder = venv_folder(requirements, cache)
    cache.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".ready").exists():
            _make(folder, requirements)
    return str(folder / "bin" / "python")


def venv_folder(requirements: Sequence[str], cache: Path = CACHE) -> Path:
    """Where the environment with these requirements is, or will be; it has a file `.ready`."""
    key = "\n".join([sys.version, *requirements])
    return cache / blake2b(key.encode(), digest_size=8).hexdigest()


def _make(folder: Path, requirements: Sequence[str]) -> None:
    listed = ", ".join(requirements)
    _LOG.warning("installing %s into %s, once; this takes minutes", listed, folder)
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted one
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        # -I: what is on this process's PYTHONPATH does not count as installed.
        [str(folder / "bin" / "python"), "-I", "-m", "pip", "install", "-q", *requirements],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr or done.stdout).strip()[-_MAX_REASON_CHARS:]
            raise EnvError(f"installing {listed} into {folder} failed: {reason}")
    (folder / ".ready").touch()
