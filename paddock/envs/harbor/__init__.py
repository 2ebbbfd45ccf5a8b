"""Harbor tasks: read in the published format, run and verified by Harbor's contract.

settings.py        settings of trials, and sandbox settings of a task
task.py            task folders
task_config.py     task.toml
terminal_bench.py  conversion of terminal-bench 1 tasks
dockerfile.py      Dockerfile parser
image.py           environment images, built once and cached
offline_tools.py   replacements of package installers for offline use
network.py         network modes and host lists
trial.py           one trial of a task: environment, agent, verifier, rewards
verifier_view.py   what the verifier sees of the agent's sandbox
reward.py          reward files
failures.py        failure causes and what they mean for training
results.py         result files of a trial
check.py           soundness check of a task
"""

from paddock.envs.harbor.check import TaskCheckReport, check_task
from paddock.envs.harbor.results import write_results
from paddock.envs.harbor.reward import scalar_reward
from paddock.envs.harbor.settings import SOLUTION, HarborSettings
from paddock.envs.harbor.task import HarborTask, TaskStep, find_task_folders, read_task
from paddock.envs.harbor.task_config import TaskConfig, TaskError, read_config
from paddock.envs.harbor.trial import Trial

__all__ = [
    "SOLUTION",
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
