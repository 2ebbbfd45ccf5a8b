"""What a world is, and how one episode in it is played.

A world makes tasks and opens an environment for each attempt. An environment reads messages and
answers with messages; it never sees a token. An attempt ends in a verdict, or in a failure that
says whose doing it was: a broken world is never a reward of zero.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from paddock.records import (
    Failure,
    FailureKind,
    Message,
    Outcome,
    Task,
    ToolSpec,
    Verdict,
    json_codec,
)

Split = Literal["train", "test"]  # no task of one is a task of the other
CLOSE_S = 120.0  # a container engine takes its time; what takes longer hangs


class Taskset(Protocol):
    """A source of tasks. Keeps no state between attempts: the same index is always the same task,
    and `open` finds what belongs to a task by its id alone."""

    @property
    def name(self) -> str: ...

    def size(self, split: Split) -> int | None:
        """How many different tasks there are; None where they are generated without end."""

    def task(self, index: int, split: Split = "train") -> Task:
        """The task at an index, from 0 without end: a finite world begins again, in another
        order."""

    def make_env(self, task: Task) -> "Env":
        """A fresh environment for one attempt. Cheap: work is done in `start`."""


class Env(Protocol):
    """One attempt at one task, used once: start, respond until it is over, grade, close.

    Each method may raise `Stopped` to say what went wrong; whatever else it raises, SystemExit
    included, is a failure of the world, or of the grader if `grade` raised it.
    """

    @property
    def task(self) -> Task: ...

    @property
    def tools(self) -> tuple[ToolSpec, ...]: ...

    async def reset(self) -> None:
        """Set up what the task needs."""

    async def step(self, reply: Message) -> tuple[Message, ...]:
        """What follows a reply: a result for each call, or what a user says. Nothing: it is
        over."""

    async def score(self) -> Verdict:
        """What the attempt was worth."""

    async def close(self) -> None:
        """Let everything go. Called exactly once, whatever happened, also before `start` ended."""


class Policy(Protocol):
    """Who plays: a model, a person, a script."""

    async def __call__(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message:
        """The next reply to a conversation that only ever grows. Raises `Stopped` if there will be
        none."""


class SolvableTaskset(Protocol):
    """A world that knows how its tasks are solved: for soundness tests, demonstrations and SFT."""

    def solver(self, task: Task) -> Policy:
        """A player of that one task whose every attempt is worth full reward."""


def scripted_policy(*replies: Message) -> Policy:
    """A player that says these, one a turn, whatever it hears."""

    async def speak(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message:  # noqa: ARG001
        turn = sum(message.role == "assistant" for message in messages)
        if turn >= len(replies):
            raise RolloutFailed("policy", "script", f"no reply is left after {len(replies)}")
        return replies[turn]

    return speak


class RolloutFailed(Exception):
    """An attempt that cannot go on, for a reason known where it is raised.

    >>> RolloutFailed("policy", "context", "no room for another turn").failure.is_policy_failure
    True
    """

    def __init__(self, kind: FailureKind, where: str, what: str) -> None:
        super().__init__(f"{where}: {what}")
        self.failure = Failure(
            kind=kind, where=where, what=json_codec.replace_lone_surrogates(what)
        )


@contextmanager
def convert_errors(kind: FailureKind, where: str) -> Iterator[None]:
    """Turns whatever the block raises into `Stopped`: code of an environment must not end the
    process (SystemExit) or pass for a cancellation that nobody asked for (CancelledError). Only
    KeyboardInterrupt and a real cancellation of the running task get through."""
    try:
        yield
    except (RolloutFailed, KeyboardInterrupt):
        raise
    except TimeoutError as error:
        raise RolloutFailed("time", where, describe_error(error)) from error
    except asyncio.CancelledError as error:
        if _is_cancelled():
            raise
        raise RolloutFailed(kind, where, describe_error(error)) from error
    except BaseException as error:
        raise RolloutFailed(kind, where, describe_error(error)) from error


def _is_cancelled() -> bool:
    """Whether somebody has asked the running task to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTrace:
    """One attempt as the world saw it."""

    task: Task
    messages: tuple[Message, ...]  # with those of the task
    outcome: Outcome
    turns: int
    seconds: float
    leak: str = ""  # what closing the environment complained about, if it did


async def run_rollout(
    env: Env,
    policy: Policy,
    *,
    clock: Callable[[], float] = time.monotonic,
    close_s: float = CLOSE_S,
    trouble: Callable[[], str] = lambda: "",
) -> RolloutTrace:
    """One attempt, from start to verdict, within the task's limits. The environment is closed in
    the end, also if the caller gives up; whoever waits for the verdict waits no longer for that
    than `close_s`. A reply after which no turn is left is still graded. `trouble` says why nobody
    could play for the policy just now, if so: time that runs out meanwhile is not its own."""
    attempt = _Attempt(env, policy, trouble)
    began = clock()
    leak = ""
    try:
        outcome = await attempt.run()
    finally:
        try:
            async with asyncio.timeout(close_s) as closing:
                await asyncio.shield(_closed(env))
        except RolloutFailed as stop:
            leak = stop.failure.what
        except TimeoutError:
            assert closing.expired()
            leak = f"over {close_s:g} s to close"
    return RolloutTrace(
        task=env.task,
        messages=tuple(attempt.messages),
        outcome=outcome,
        turns=attempt.turns,
        seconds=clock() - began,
        leak=leak,
    )


async def _closed(env: Env) -> None:
    # In a task of its own, from which SystemExit would end the event loop.
    with convert_errors("world", "close"):
        await env.close()


class _Attempt:
    def __init__(self, env: Env, policy: Policy, trouble: Callable[[], str]) -> None:
        self.env, self.policy, self.trouble = env, policy, trouble
        self.messages = [_writable(message) for message in env.task.messages]
        self.turns = 0
        self.where = "start"

    async def run(self) -> Outcome:
        seconds = self.env.task.budget.seconds
        try:
            async with asyncio.timeout(seconds) as deadline:
                return await self._verdict()
        except RolloutFailed as stop:
            return stop.failure
        except TimeoutError as error:
            what = f"over {seconds:g} s in all" if deadline.expired() else describe_error(error)
            if self.where == "policy" and (why := self.trouble()):
                return Failure(kind="infrastructure", where="engine", what=f"{what}: {why}")
            return Failure(kind="time", where=self.where, what=what)

    async def _verdict(self) -> Outcome:
        env, limits = self.env, self.env.task.budget
        with self._at("start"):
            await env.reset()
        while self.turns < limits.turns:
            with self._at("tools"):
                tools = env.tools
            # A bug in a policy is ours and ends the run; it is not caught here.
            self.where = "policy"
            reply = await self.policy(self.messages, tools)
            self.turns += 1
            self.messages.append(reply)
            with self._at("respond"):
                answers = await env.step(reply)
            if not answers:
                break
            if not _are_messages(answers):
                raise RolloutFailed("world", "respond", f"it gave {answers!r:.80}, not messages")
            self.messages += [truncate_message(answer, limits.output_bytes) for answer in answers]
        with self._at("grade", "grader"):
            verdict: object = await env.score()
        if not isinstance(verdict, Verdict):
            raise RolloutFailed("grader", "grade", f"it gave {verdict!r:.80}, not a Verdict")
        return verdict

    def _at(self, where: str, kind: FailureKind = "world") -> AbstractContextManager[None]:
        self.where = where
        return convert_errors(kind, where)


def _are_messages(answers: object) -> bool:
    """Worlds are written by many, not all of whom check types: what they give is looked at."""
    return isinstance(answers, tuple | list) and all(isinstance(a, Message) for a in answers)


def truncate_message(message: Message, most: int) -> Message:
    """A message of at most `most` bytes, beginning and end kept, and said so where it was cut.

    >>> truncate_message(Message(role="user", content="x" * 100), 50).content
    'xxxxxxxxxxx\\n... 78 bytes left out ...\\nxxxxxxxxxxx'
    """
    message = _writable(message)
    raw = message.content.encode()
    if len(raw) <= most:
        return message
    spare = len("\n...  bytes left out ...\n") + len(str(len(raw)))
    half = max(0, most - spare) // 2
    ends = raw[:half].decode(errors="ignore"), raw[len(raw) - half :].decode(errors="ignore")
    lost = len(raw) - sum(len(end.encode()) for end in ends)
    return replace(message, content=f"{ends[0]}\n... {lost} bytes left out ...\n{ends[1]}")


def _writable(message: Message) -> Message:
    """As every tokenizer and ledger takes it: names of files and JSON hold half surrogate pairs."""
    text = json_codec.replace_lone_surrogates(message.content)
    return message if text == message.content else replace(message, content=text)


def describe_error(error: BaseException) -> str:
    """An error as one line of a reason.

    >>> describe_error(KeyError("colour")), describe_error(SystemExit())
    ("KeyError: 'colour'", 'SystemExit')
    """
    text = json_codec.replace_lone_surrogates(str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
