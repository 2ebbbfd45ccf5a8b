"""Harbor's tasks: read as published, run by its contract, graded by its reward files.

build.py           a task's environment, made ready once and kept
check.py           whether a task is sound
config.py          task.toml
dockerfile.py      a Dockerfile as a list of steps
failures.py        what went wrong, and whether a reward may be trusted
folder.py          a task's folder
network.py         who a task may talk to
results.py         what a trial leaves on disk
reward.py          reward files
seen.py            what the tests see of an attempt
settings.py        how tasks are run here
stand_ins.py       stand-ins for programs that fetch things
terminal_bench.py  tasks of terminal-bench 1, converted
trial.py           one attempt at a task
"""

from paddock.envs.harbor.check import Report, check
from paddock.envs.harbor.config import TaskConfig, TaskError, read_config
from paddock.envs.harbor.folder import HarborTask, Step, read_task, task_folders
from paddock.envs.harbor.results import write_results
from paddock.envs.harbor.settings import HarborSettings
from paddock.envs.harbor.trial import Trial

__all__ = [
    "HarborSettings",
    "HarborTask",
    "Report",
    "Step",
    "TaskConfig",
    "TaskError",
    "Trial",
    "check",
    "read_config",
    "read_task",
    "task_folders",
    "write_results",
]
