"""Validation of terminal-bench 1 tasks: an empty rollout fails, the reference solution passes.

    python -m benchmarks.terminal_bench [--tasks FOLDER] [--only NAME,NAME] [--workers 1]
        [--env FOLDER] [--time-factor 3]

Downloads the source package of terminal-bench 0.2.12 (105 tasks) and installs the packages that the
tests import, both into a temporary folder. Images are built on top of a copy of the host's file
system; build steps that install packages are skipped, so tasks that need them cannot pass. The 25
that can are listed here.
"""

import argparse
import asyncio
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from benchmarks.table import Claim, print_claims
from paddock.envs.harbor import HarborSettings, TaskCheckReport, TaskError, check_task, read_task

PACKAGE = "terminal-bench==0.2.12"
NEEDED = ("pytest==8.4.1", "pytest-json-ctrf==0.3.5", "numpy", "pandas", "scipy", "requests",
          "PyYAML", "pytest-asyncio")  # fmt: skip
KNOWN = [
    "aimo-airline-departures", "blind-maze-explorer-5x5", "blind-maze-explorer-algorithm",
    "classifier-debug", "cobol-modernization", "decommissioning-service-with-sensitive-data",
    "extract-elf", "extract-moves-from-video", "feal-differential-cryptanalysis",
    "feal-linear-cryptanalysis", "fix-permissions", "git-workflow-hack", "grid-pattern-transform",
    "hello-world", "heterogeneous-dates", "logistic-regression-divergence",
    "mixed-integer-programming-1", "openssl-selfsigned-cert", "password-recovery",
    "polyglot-c-py", "raman-fitting", "recover-obfuscated-files", "security-vulhub-minio",
    "sqlite-db-truncate", "vim-terminal-task",
]  # fmt: skip


def fetch(folder: Path) -> Path:
    """The tasks of the source package."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
    command = [*pip, "--ignore-requires-python", "--no-build-isolation", "-d", str(folder), PACKAGE]
    subprocess.run(command, check=False)  # may fail at metadata, after the download
    (archive,) = folder.glob("terminal_bench-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return next(folder.glob("terminal_bench-*/tasks"))


def environment(folder: Path) -> Path:
    """A virtual environment with the packages that the tests import."""
    venv = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    subprocess.run([str(venv / "bin" / "pip"), "install", "-q", *NEEDED], check=True)
    return venv


async def check(folder: Path, settings: HarborSettings) -> TaskCheckReport:
    try:
        return await check_task(read_task(folder), settings)
    except TaskError as error:
        return TaskCheckReport(task=folder.name, problems=(str(error),))


async def run(
    tasks: Path, names: list[str], settings: HarborSettings, workers: int
) -> dict[str, TaskCheckReport]:
    limit = asyncio.Semaphore(workers)
    found: dict[str, TaskCheckReport] = {}

    async def one(name: str) -> None:
        async with limit:
            start = time.monotonic()
            found[name] = report = await check(tasks / name, settings)
            result = "sound" if report.is_sound else "; ".join(report.problems)
            print(f"{name:46} {time.monotonic() - start:6.1f} s  {result}", flush=True)

    await asyncio.gather(*(one(name) for name in names))
    return found


def claims(
    tasks: Path | None = None,
    names: list[str] | None = None,
    env: Path | None = None,
    *,
    workers: int = 1,
    time_factor: float = 3.0,
) -> list[Claim]:
    with tempfile.TemporaryDirectory() as folder:
        tasks = tasks or fetch(Path(folder))
        settings = HarborSettings(
            skip_installs=True,
            allow_internet_in_build=False,
            fail_on_build_error=False,
            offline_python=str(env or environment(Path(folder))),
            timeout_multiplier=time_factor,
            verifier_sees="system",  # one solution deletes a file of /etc
        )
        reports = asyncio.run(run(tasks, names or KNOWN, settings, workers))
    sound = [name for name, report in reports.items() if report.is_sound]
    graded = [name for name, report in reports.items() if report.empty is not None]
    return [
        Claim(
            name="terminal-bench 1: empty rollout fails, solution passes",
            target=f"{len(reports)} of {len(reports)}",
            measured=f"{len(sound)} of {len(reports)}",
            holds=len(sound) == len(reports),
        ),
        Claim(name="of them, empty rollout graded", measured=f"{len(graded)}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=Path, help="folder of downloaded tasks")
    parser.add_argument("--env", type=Path, help="existing virtual environment")
    parser.add_argument("--only", help="comma-separated task names")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--time-factor", type=float, default=3.0, help="multiplies all timeouts, for a busy machine"
    )
    options = parser.parse_args()
    names = options.only.split(",") if options.only else None
    limits = {"workers": options.workers, "time_factor": options.time_factor}
    print_claims(claims(options.tasks, names, options.env, **limits))


if __name__ == "__main__":
    main()
