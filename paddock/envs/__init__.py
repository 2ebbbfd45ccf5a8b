"""Environments: tasks, tools, verifiers and rewards for reasoning and for agents.

env.py       the Taskset and Env interfaces, and how one rollout is run
registry.py  all environments, by name
qa.py        environments that ask one question and verify the answer
chat_env.py  an Env for one conversation with tools
answer_format.py  answer extraction: boxed, tagged, last number, last line
data_file.py  prompts from JSONL or Parquet, with your reward functions
datasets.py  example datasets, generated or listed
http_tasks.py  tasks for agents elsewhere
jsonl.py     rows of JSONL, JSON and Parquet files
json_schema.py  JSON Schema validation
mcp_server.py  the tools of MCP servers
task_selection.py  some tasks of an environment
tools.py     tools that an environment provides
python_tool.py  a Python interpreter as a tool
worker_pool.py  third-party functions in processes that can be killed
rewards/     reward functions: rules, reward models, LLM judges
math/        mathematics, generated or from files
logic/       logic puzzles with one solution
code/        programming tasks with hidden tests in a sandbox
reasoning_gym.py  the generators of reasoning-gym
openenv.py   servers that speak OpenEnv's protocol
search/      multi-hop questions over pages with search tools
service/     customer service with tools on a database
terminal/    shell tasks, from folders or generated
foreign/     environments in another Python: tasksets of verifiers
harbor/      Harbor tasks: loading, running, verification
nano/        three environments for models of under a million parameters
"""

from paddock.envs import harbor, nano
from paddock.envs.chat_env import ChatEnv
from paddock.envs.env import (
    Env,
    Policy,
    RolloutFailed,
    RolloutTrace,
    Split,
    Taskset,
    convert_errors,
    run_rollout,
    scripted_policy,
)
from paddock.envs.nano.demonstrations import DemonstrationTaskset
from paddock.envs.registry import REGISTRY, EnvError, EnvSettings, get_spec, load_env_settings, make
from paddock.envs.task_selection import SelectedTaskset, read_task_indices
from paddock.envs.tools import Tool, ToolError

__all__ = [
    "REGISTRY",
    "ChatEnv",
    "DemonstrationTaskset",
    "Env",
    "EnvError",
    "EnvSettings",
    "Policy",
    "RolloutFailed",
    "RolloutTrace",
    "SelectedTaskset",
    "Split",
    "Taskset",
    "Tool",
    "ToolError",
    "convert_errors",
    "get_spec",
    "harbor",
    "load_env_settings",
    "make",
    "nano",
    "read_task_indices",
    "run_rollout",
    "scripted_policy",
]
