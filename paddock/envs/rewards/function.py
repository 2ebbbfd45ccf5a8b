"""Reward functions written for TRL: `func(prompts, completions, **columns) -> list[float | None]`.

They run in a worker process, isolated where bubblewrap works: one that hangs, crashes or raises is
a failure of the grader, never a reward.
"""

import asyncio
import inspect
import sys
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from math import isfinite
from pathlib import Path
from typing import Any

from paddock.envs.env import RolloutFailed
from paddock.envs.foreign.messages import message_to_json
from paddock.envs.registry import EnvError
from paddock.envs.rewards.reward import RewardScore, Submission
from paddock.envs.worker_pool import WorkerError, shared_pool

_HERE = "paddock.envs.rewards.function"
_NUM_WORKERS = 4


class RewardFunction:
    """The function `name` ("file.py:function" or "module:function"). EnvError if there is none.

    It is called for one rollout at a time, so all lists have one entry. It gets no `completion_ids`
    and no `trainer_state`: an environment sees neither tokens nor the trainer.
    """

    def __init__(self, name: str, *, seconds: float, network: bool = False) -> None:
        file = function_file(name)
        self._name = f"{Path(file).absolute()}:{name.rpartition(':')[2]}" if file else name
        self._seconds = seconds
        self._workers = shared_pool(
            f"{_HERE}:call_function",
            count=_NUM_WORKERS,
            preload=(f"{_HERE}:load_function", self._name),
            network=network,
        )
        try:
            self._workers.call_blocking(self._name, None, seconds=seconds)
        except WorkerError as error:
            raise EnvError(f"reward function {name!r}: {_reason(error)}") from None

    async def __call__(self, submission: Submission) -> RewardScore:
        try:
            found = await self._workers.call(
                self._name, function_arguments(submission), seconds=self._seconds
            )
        except WorkerError as error:
            raise RolloutFailed("grader", self._name.rpartition(":")[2], _reason(error)) from None
        return RewardScore(0.0, applies=False) if found is None else RewardScore(found)


def function_file(name: str) -> str:
    """The file of "file.py:function"; "" for "module:function"."""
    file = name.rpartition(":")[0]
    return file if file.endswith(".py") else ""


def _reason(error: WorkerError) -> str:
    return str(error).removeprefix(f"{_HERE}:call_function: ")


def function_arguments(submission: Submission) -> dict[str, list[Any]]:
    """The keyword arguments of a call: messages where the prompt is a list of messages, else text.

    >>> from paddock.records import Message
    >>> messages = (Message(role="user", content="2 + 2?"), Message(role="assistant", content="4"))
    >>> function_arguments(Submission(messages=messages, columns={"prompt": "2 + 2?", "level": 1}))
    {'level': [1], 'prompts': ['2 + 2?'], 'completions': ['4']}
    """
    columns = dict(submission.columns)
    prompt = columns.pop("prompt", submission.question)
    replies = submission.messages[submission.prompt_length :]
    completion = (
        submission.reply
        if isinstance(prompt, str)
        else [message_to_json(m, parsed_arguments=True) for m in replies]
    )
    lists = {name: [value] for name, value in columns.items()}
    return {**lists, "prompts": [prompt], "completions": [completion]}


# --- in the worker --------------------------------------------------------------------------------


@cache
def load_function(name: str) -> Any:
    """Import the function; a file may import its neighbours."""
    module_name, _, function_name = name.rpartition(":")
    if module_name.endswith(".py"):
        file = Path(module_name)
        sys.path.insert(0, str(file.parent))
        spec = spec_from_file_location(file.stem, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} is not a Python file")
        module = module_from_spec(spec)
        sys.modules[file.stem] = module
        spec.loader.exec_module(module)
    else:
        module = import_module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ImportError(f"there is no function {function_name!r} in {module_name}")
    return function


def call_function(name: str, arguments: dict[str, Any] | None) -> float | None:
    """Call the function, awaiting it if it is async; without arguments it is only loaded."""
    function = load_function(name)
    if arguments is None:
        return None
    found = function(**arguments)
    if inspect.isawaitable(found):
        found = asyncio.run(_result(found))
    rewards = list(found)
    if len(rewards) != 1:
        raise ValueError(f"returned {len(rewards)} rewards for one completion")
    if rewards[0] is None:
        return None
    reward = float(rewards[0])
    if not isfinite(reward):
        raise ValueError(f"returned {reward}")
    return reward


async def _result(found: Any) -> Any:
    return await found
