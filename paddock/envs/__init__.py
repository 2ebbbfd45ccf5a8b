"""Worlds that end in a verdict: tasks, tools and graders for reasoning and for agents.

answer_format.py  the answer in a reply
qa.py        worlds that ask one question
code/        functions to write, hidden tests in a sandbox
context.py   what of a long conversation is still shown
reasoning_gym.py  every generator of reasoning-gym
harbor/      Harbor's tasks: read, run, graded
logic/       puzzles with one solution
math/        mathematics, generated or of a file
nano/        three worlds for a model of under a million parameters
datasets.py  where problems come from
python_tool.py  a Python interpreter as a tool
registry.py  every world, by name
rewards/     rules, outcome models and judges with weights
jsonl.py     rows of a data file
sandbox/     small machines of one's own in which anything may be run
json_schema.py  JSON values against JSON schemas
search/      pages, an index, questions of several look-ups
service/     a help desk whose tools change a database
chat_env.py  an environment that is a conversation
terminal/    a shell: tasks of folders, and small ones made by chance
tools.py     tools that a world lends
worker_pool.py  functions of others in a process that may be killed
env.py       what a world is, and how one episode in it is played
"""

from paddock.envs import context, harbor, nano
from paddock.envs.env import (
    Policy,
    RolloutFailed,
    RolloutTrace,
    Split,
    Taskset,
    convert_errors,
    run_rollout,
)
from paddock.envs.nano.demonstrations import DemonstrationTaskset
from paddock.envs.registry import REGISTRY, EnvError, EnvSettings, get_spec, load_env_settings, make

__all__ = [
    "REGISTRY",
    "DemonstrationTaskset",
    "EnvError",
    "EnvSettings",
    "Policy",
    "RolloutFailed",
    "RolloutTrace",
    "Split",
    "Taskset",
    "context",
    "convert_errors",
    "get_spec",
    "harbor",
    "load_env_settings",
    "make",
    "nano",
    "run_rollout",
]
