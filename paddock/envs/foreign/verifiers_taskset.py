"""Environment `verifiers`: tasksets of the verifiers package, in a Python of their own.

verifiers drives the rollout and scores it; its model requests are the policy's turns. The
conversation of a rollout must only grow: a harness that rewrites it is a failure with that reason.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from paddock.envs.datasets import row_in_epochs
from paddock.envs.env import RolloutFailed, Split
from paddock.envs.foreign.interpreter import CACHE, find_interpreter
from paddock.envs.foreign.messages import message_from_json, message_to_json, tool_from_json
from paddock.envs.foreign.process import ForeignError, ForeignProcess
from paddock.envs.qa import parse_task_id
from paddock.envs.registry import EnvError, EnvSettings
from paddock.records import Budget, FailureKind, Message, Task, ToolSpec, Verdict

_BRIDGE = Path(__file__).with_name("verifiers_bridge.py")


class VerifiersSettings(EnvSettings):
    """`taskset` is one that ships with verifiers ("textarena"), an installed package, or a file."""

    task_keys: ClassVar[tuple[str, ...]] = ("taskset", "args", "env_args", "num_test", "seed")

    taskset: str = ""
    args: dict[str, Any] = Field(default_factory=dict)  # of the taskset: its config
    env_args: dict[str, Any] = Field(default_factory=dict)  # of its environment: id, seats, limits
    # "chat": a conversation with the taskset's tools; "": the taskset's own; or one of verifiers
    harness: str = "chat"
    python: str = ""  # of an environment with verifiers; "": one is made for `requirements`
    requirements: tuple[str, ...] = ("verifiers==0.4.0",)
    venv_dir: str = str(CACHE)
    num_test: Annotated[int, Field(ge=0)] = 0  # the first tasks, which are never trained on
    seed: int = 0  # of the order after the first epoch
    max_turns: Annotated[int, Field(ge=1)] = 16
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    output_bytes: Annotated[int, Field(ge=1)] = 20_000  # of one message; the rest is cut

    def task_shape(self) -> Mapping[str, Any]:
        # By name, since a file may be moved.
        return {**super().task_shape(), "taskset": Path(self.taskset).name}

    def make_taskset(self) -> "VerifiersTaskset":
        if not self.taskset:
            raise EnvError("set 'taskset': one of verifiers, a package, or a Python file")
        if self.taskset.endswith(".py") and not Path(self.taskset).is_file():
            raise EnvError(f"taskset: there is no file {self.taskset}")
        python = find_interpreter(self.python, self.requirements, Path(self.venv_dir))
        return VerifiersTaskset(self, python)


class VerifiersTaskset:
    """Rows of the taskset; rollouts run in one process, which is started again if it ends."""

    name = "verifiers"

    def __init__(self, settings: VerifiersSettings, python: str) -> None:
        self._settings = settings
        # Not this process's path, which leads to our packages; servers of tools inherit it.
        folder = Path(settings.taskset).absolute().parent if self._is_file else Path.cwd()
        self._command = ["env", f"PYTHONPATH={folder}", python, str(_BRIDGE)]
        self._ids = count()
        self._process = self._open()

    @property
    def _is_file(self) -> bool:
        return self._settings.taskset.endswith(".py")

    def _open(self) -> ForeignProcess:
        settings = self._settings
        process = ForeignProcess(self._command)
        try:
            opened = process.call_blocking(
                "open",
                taskset=Path(settings.taskset).stem if self._is_file else settings.taskset,
                config={**settings.env_args, "taskset": settings.args},
                harness=settings.harness,
                max_turns=settings.max_turns,
            )
        except ForeignError as error:
            raise EnvError(f"taskset {settings.taskset!r}: {error}") from None
        self._size: int | None = opened["size"]
        return process

    @property
    def process(self) -> ForeignProcess:
        if self._process.ended:
            self._process = self._open()
        return self._process

    def size(self, split: Split) -> int | None:
        num_test = self._settings.num_test
        if split == "test":
            return num_test if self._size is None else min(num_test, self._size)
        return None if self._size is None else max(0, self._size - num_test)

    def task(self, index: int, split: Split = "train") -> Task:
        """The task with its prompt as the taskset has it; the harness may add to it."""
        size, settings = self.size(split), self._settings
        if size == 0:
            raise EnvError(f"taskset {settings.taskset!r} has no {split} tasks; see 'num_test'")
        row = index if size is None else row_in_epochs(settings.seed, index, size)
        found = self.process.call_blocking("task", row=self._row(split, row))
        system = (Message(role="system", content=found["system"]),) if found["system"] else ()
        prompt = found["prompt"] or "(the environment opens the conversation)"
        return Task(
            id=f"{self.name}/{settings.shape_hash}/{split}/{row}",
            env=self.name,
            messages=(*system, Message(role="user", content=prompt)),
            budget=Budget(
                turns=settings.max_turns,
                seconds=settings.timeout_s,
                output_bytes=settings.output_bytes,
            ),
        )

    def make_env(self, task: Task) -> "VerifiersEnv":
        split, row = parse_task_id(task, self.name, self._settings.shape_hash)
        return VerifiersEnv(task, self.process, next(self._ids), self._row(split, row))

    def _row(self, split: Split, row: int) -> int:
        return row if split == "test" else row + self._settings.num_test


class VerifiersEnv:
    """One episode of verifiers; its requests are the turns."""

    def __init__(self, task: Task, process: ForeignProcess, episode: int, row: int) -> None:
        self.task = task
        self.tools: tuple[ToolSpec, ...] = ()
        self._process, self._episode, self._row = process, episode, row
        self._known: list[Message] = []  # all messages so far
        self._end: dict[str, Any] | None = None

    async def reset(self) -> None:
        messages = await self._next("start", row=self._row)
        if self._end is not None:
            raise RolloutFailed("world", "start", self._end.get("error") or "it asked nothing")
        self.task = replace(self.task, messages=messages)

    async def step(self, reply: Message) -> tuple[Message, ...]:
        self._known.append(reply)
        return await self._next("reply", message=message_to_json(reply))

    async def score(self) -> Verdict:
        if self._end is None:
            raise RolloutFailed("world", "score", "the episode did not end within its turns")
        if error := self._end.get("error"):
            raise RolloutFailed(_kind(error), "verifiers", error)
        return Verdict(reward=self._end["reward"], parts=self._end["parts"])

    async def close(self) -> None:
        if not self._process.ended:
            await self._process.call("cancel", episode=self._episode)

    async def _next(self, method: str, **params: Any) -> tuple[Message, ...]:
        """The messages that the next request adds; none if the episode ended."""
        try:
            event = await self._process.call(method, episode=self._episode, **params)
        except ForeignError as error:
            raise RolloutFailed("world", "verifiers", str(error)) from None
        if "end" in event:
            self._end = event["end"]
            return ()
        self.tools = tuple(map(tool_from_json, event["tools"]))
        messages = [message_from_json(value) for value in event["messages"]]
        shown = len(self._known)
        if list(map(_gist, messages[:shown])) != list(map(_gist, self._known)):
            what = "the harness rewrote the conversation; only one that grows can be trained"
            raise RolloutFailed("world", "verifiers", what)
        self._known = [*self._known, *messages[shown:]]
        return tuple(messages[shown:])


def _gist(message: Message) -> tuple[Any, ...]:
    """What must not change of an earlier message: harnesses may drop its reasoning."""
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    return message.role, message.content.strip(), calls


def _kind(error: str) -> FailureKind:
    """Whose fault an error of verifiers is, by the boundary it crossed."""
    return "grader" if error.startswith("TaskError") and "scoring" in error else "world"
