"""What the tests see of an attempt.

files      a fresh sandbox of the task's own image, with the agent's files outside system folders
system     a fresh sandbox with all that the agent has changed; what was there of programs and
           libraries is the image's again, and none of the agent's processes is there
processes  the agent's own sandbox with all that runs in it
"""

import warnings
from pathlib import PurePosixPath

from paddock.envs.harbor.offline_tools import OFFLINE_BIN
from paddock.envs.harbor.settings import LOGS, SOLUTION, TESTS, HarborSettings
from paddock.envs.harbor.task import HarborTask, TaskStep
from paddock.envs.harbor.task_config import VerifierView
from paddock.sandbox import PROGRAMS, SnapshotFilter

VIEWS_BY_RISK: tuple[VerifierView, ...] = ("files", "system", "processes")
OURS = tuple(path.strip("/") for path in (TESTS, SOLUTION, f"{LOGS}/verifier", OFFLINE_BIN))
KERNELS = ("dev", "proc", "sys")
CODE = ("bin", "lib", "lib32", "lib64", "libx32", "sbin", "usr")
SYSTEM = (*CODE, "boot", "etc", "run", "var/cache", "var/lib/apt", "var/lib/dpkg", "var/lock",
          "var/run")  # fmt: skip
SETTINGS = ("root/.*", "home/*/.*")  # of programs: shells, interpreters and installers read them
# Additions that are loaded into programs which did not ask for them.
LOADED = ("etc/ld.so.preload", "usr/lib/*/glibc-hwcaps", "lib/*/glibc-hwcaps",
          "usr/lib/python3*/*customize.py", "usr/lib/python3/dist-packages/*customize.py",
          "usr/local/lib/python3*/*-packages/*customize.py",
          "root/.local/lib/python3*/site-packages/*customize.py",
          "home/*/.local/lib/python3*/site-packages/*customize.py")  # fmt: skip
RISK = {
    "system": "a program or library that the agent has added to the system may forge the reward",
    "processes": "replaced programs and processes in the background may forge the reward",
}


def verifier_view(task: HarborTask, step: TaskStep, settings: HarborSettings) -> VerifierView:
    """The most that the settings or the task ask for; `shared` asks for the system."""
    asked: list[VerifierView] = [
        settings.verifier_sees,
        task.config.paddock_metadata.verifier_sees or "files",
    ]
    if task.verifier_config(step).environment_mode == "shared":
        asked.append("system")
    return max(asked, key=VIEWS_BY_RISK.index)


def warn_forgeable(task: HarborTask, seen: VerifierView) -> None:
    """Once a process for each degree, however many tasks there are."""
    if seen in RISK:
        text = f"Harbor tasks such as {task.name} are graded with verifier_sees = {seen!r}"
        _once(seen, f"{text}: {RISK[seen]}")


_warned: set[VerifierView] = set()


def _once(seen: VerifierView, text: str) -> None:
    if seen not in _warned:
        _warned.add(seen)
        warnings.warn(text, stacklevel=4)


def verifier_snapshot_filter(
    seen: VerifierView, task: HarborTask, step: TaskStep, workdir: str, path: str
) -> SnapshotFilter:
    """Which of the agent's changes go into the sandbox of the tests. `path`: the variable PATH of
    the image; programs found there are always the image's."""
    if seen == "system":
        return SnapshotFilter(without=(*OURS, *KERNELS, *LOADED), additions=CODE)
    programs = tuple(folder.strip("/") for folder in path.split(":") if folder.startswith("/"))
    artifacts = [PurePosixPath(workdir, each.source) for each in task.artifacts(step)]
    spared = [str(each).strip("/") for each in artifacts]
    where = workdir.strip("/")
    if "/" in where and where not in (*programs, *PROGRAMS):
        below = [name for name in SYSTEM if where.startswith(f"{name}/")]
        spared += [where] if below else []
    return SnapshotFilter(
        without=(*OURS, *KERNELS, *SYSTEM, *SETTINGS, *filter(None, programs)),
        spared=tuple(spared),
        top_files=False,
    )
