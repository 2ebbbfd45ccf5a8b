"""Worlds that end in a verdict: tasks, tools and graders for reasoning and for agents.

answers.py   the answer in a reply
ask.py       worlds that ask one question
code/        functions to write, hidden tests in a sandbox
context.py   what of a long conversation is still shown
gym.py       every generator of reasoning-gym
harbor/      Harbor's tasks: read, run, graded
logic/       puzzles with one solution
math/        mathematics, generated or of a file
nano/        three worlds for a model of under a million parameters
problems.py  where problems come from
python.py    a Python interpreter as a tool
registry.py  every world, by name
rewards/     rules, outcome models and judges with weights
rows.py      rows of a data file
sandbox/     small machines of one's own in which anything may be run
schema.py    JSON values against JSON schemas
search/      pages, an index, questions of several look-ups
service/     a help desk whose tools change a database
talk.py      an environment that is a conversation
terminal/    a shell: tasks of folders, and small ones made by chance
tools.py     tools that a world lends
worker.py    functions of others in a process that may be killed
world.py     what a world is, and how one episode in it is played
"""

from paddock.envs.registry import (
    KINDS,
    Kind,
    WorldError,
    WorldSettings,
    kind_of,
    open_world,
    world_settings,
)
from paddock.envs.tools import Tool, ToolRefused, answer_calls
from paddock.envs.world import (
    Env,
    Episode,
    Policy,
    Solvable,
    Split,
    Stopped,
    World,
    blaming,
    cut,
    play,
    scripted,
)

__all__ = [
    "KINDS",
    "Env",
    "Episode",
    "Kind",
    "Policy",
    "Solvable",
    "Split",
    "Stopped",
    "Tool",
    "ToolRefused",
    "World",
    "WorldError",
    "WorldSettings",
    "answer_calls",
    "blaming",
    "cut",
    "kind_of",
    "open_world",
    "play",
    "scripted",
    "world_settings",
]
