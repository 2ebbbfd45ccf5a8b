"""What the verifier sees of the agent's sandbox.

files      a fresh sandbox of the task's image, with the agent's files outside system directories
system     a fresh sandbox with all changes of the agent, except that existing programs and
           libraries are the image's, and without the agent's processes
processes  the agent's own sandbox with its running processes
"""

import warnings
from pathlib import PurePosixPath

from paddock.envs.harbor.offline_tools import OFFLINE_BIN
from paddock.envs.harbor.settings import LOGS, SOLUTION, TESTS, HarborSettings
from paddock.envs.harbor.task import HarborTask, TaskStep
from paddock.envs.harbor.task_config import VerifierView
from paddock.sandbox import PROGRAMS, SnapshotFilter

VIEWS_BY_RISK: tuple[VerifierView, ...] = ("files", "system", "processes")
VERIFIER_PATHS = tuple(
    path.strip("/") for path in (TESTS, SOLUTION, f"{LOGS}/verifier", OFFLINE_BIN)
)
KERNEL_PATHS = ("dev", "proc", "sys")
CODE_PATHS = ("bin", "lib", "lib32", "lib64", "libx32", "sbin", "usr")
SYSTEM_PATHS = (
    *CODE_PATHS, "boot", "etc", "run", "var/cache", "var/lib/apt", "var/lib/dpkg", "var/lock",
    "var/run",
)  # fmt: skip
DOTFILES = ("root/.*", "home/*/.*")  # read by shells, interpreters and installers
# New files that would be loaded into existing programs.
AUTOLOADED = (
    "etc/ld.so.preload",
    "usr/lib/*/glibc-hwcaps",
    "lib/*/glibc-hwcaps",
    "usr/lib/python3*/*customize.py",
    "usr/lib/python3/dist-packages/*customize.py",
    "usr/local/lib/python3*/*-packages/*customize.py",
    "root/.local/lib/python3*/site-packages/*customize.py",
    "home/*/.local/lib/python3*/site-packages/*customize.py",
)
RISKS = {
    "system": "a program or library that the agent added to the system may forge the reward",
    "processes": "replaced programs and processes in the background may forge the reward",
}


def verifier_view(task: HarborTask, step: TaskStep, settings: HarborSettings) -> VerifierView:
    """The widest view that the settings or the task request; mode `shared` requests "system"."""
    requested: list[VerifierView] = [
        settings.verifier_sees,
        task.config.paddock_metadata.verifier_sees or "files",
    ]
    if task.verifier_config(step).environment_mode == "shared":
        requested.append("system")
    return max(requested, key=VIEWS_BY_RISK.index)


def warn_forgeable(task: HarborTask, view: VerifierView) -> None:
    """Warn once per process and view that a policy can forge its reward."""
    if view in RISKS:
        text = f"Harbor tasks such as {task.name} are verified with verifier_sees = {view!r}"
        _warn_once(view, f"{text}: {RISKS[view]}")


_warned: set[VerifierView] = set()


def _warn_once(view: VerifierView, text: str) -> None:
    if view not in _warned:
        _warned.add(view)
        warnings.warn(text, stacklevel=4)


def verifier_snapshot_filter(
    view: VerifierView, task: HarborTask, step: TaskStep, workdir: str, path: str
) -> SnapshotFilter:
    """Which of the agent's changes are copied to the verifier's sandbox.

    `path` is the variable PATH of the image; programs in it are always the image's.
    """
    if view == "system":
        return SnapshotFilter(
            without=(*VERIFIER_PATHS, *KERNEL_PATHS, *AUTOLOADED), additions=CODE_PATHS
        )
    programs = tuple(folder.strip("/") for folder in path.split(":") if folder.startswith("/"))
    artifacts = [PurePosixPath(workdir, each.source) for each in task.artifacts(step)]
    spared = [str(each).strip("/") for each in artifacts]
    where = workdir.strip("/")
    if "/" in where and where not in (*programs, *PROGRAMS):
        below = [name for name in SYSTEM_PATHS if where.startswith(f"{name}/")]
        spared += [where] if below else []
    return SnapshotFilter(
        without=(*VERIFIER_PATHS, *KERNEL_PATHS, *SYSTEM_PATHS, *DOTFILES, *filter(None, programs)),
        spared=tuple(spared),
        top_files=False,
    )
