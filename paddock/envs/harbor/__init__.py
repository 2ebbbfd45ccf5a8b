"""Harbor's tasks: read as published, run by its contract, graded by its reward files.

image.py           a task's environment, made ready once and kept
check.py           whether a task is sound
task_config.py     task.toml
dockerfile.py      a Dockerfile as a list of steps
failures.py        what went wrong, and whether a reward may be trusted
task.py            a task's folder
network.py         who a task may talk to
results.py         what a trial leaves on disk
reward.py          reward files
verifier_view.py   what the tests see of an attempt
settings.py        how tasks are run here
offline_tools.py   stand-ins for programs that fetch things
terminal_bench.py  tasks of terminal-bench 1, converted
trial.py           one attempt at a task
"""

from paddock.envs.harbor.check import TaskCheckReport, check_task
from paddock.envs.harbor.results import write_results
from paddock.envs.harbor.reward import scalar_reward
from paddock.envs.harbor.settings import HarborSettings
from paddock.envs.harbor.task import HarborTask, TaskStep, find_task_folders, read_task
from paddock.envs.harbor.task_config import TaskConfig, TaskError, read_config
from paddock.envs.harbor.trial import Trial

__all__ = [
    "HarborSettings",
    "HarborTask",
    "TaskCheckReport",
    "TaskConfig",
    "TaskError",
    "TaskStep",
    "Trial",
    "check_task",
    "find_task_folders",
    "read_config",
    "read_task",
    "scalar_reward",
    "write_results",
]
