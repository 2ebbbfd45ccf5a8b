"""Environment interfaces and the rollout loop.

A `Taskset` creates tasks and makes an `Env` for each rollout. An `Env` exchanges messages with the
policy and never sees tokens. A rollout ends in a `Verdict`, or in a `Failure` that says which side
caused it: a broken environment is never recorded as reward 0.
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

Split = Literal["train", "test"]  # disjoint
CLOSE_S = 120.0  # container engines are slow to close; beyond this they hang


class Taskset(Protocol):
    """A source of tasks, stateless across rollouts: an index always gives the same task, and
    `make_env` needs nothing but the task id."""

    @property
    def name(self) -> str: ...

    def size(self, split: Split) -> int | None:
        """Number of distinct tasks; None if they are generated without end."""

    def task(self, index: int, split: Split = "train") -> Task:
        """The task at an index >= 0. A finite taskset repeats its tasks in another order."""

    def make_env(self, task: Task) -> "Env":
        """A new environment for one rollout. Cheap: the work is done in `reset`."""


class Env(Protocol):
    """One rollout of one task, used once: reset, step until it is over, score, close.

    Each method may raise `RolloutFailed` to name the cause. Any other exception, SystemExit
    included, is a failure of the environment, or of the verifier if `score` raised it.
    """

    @property
    def task(self) -> Task:
        """The task. Its messages are final once `reset` is done."""

    @property
    def tools(self) -> tuple[ToolSpec, ...]: ...

    async def reset(self) -> None:
        """Set up what the task needs."""

    async def step(self, reply: Message) -> tuple[Message, ...]:
        """Messages that follow a reply: tool results or a user message. Empty: it is over."""

    async def score(self) -> Verdict:
        """The verdict on the rollout."""

    async def close(self) -> None:
        """Release all resources. Called exactly once, also if `reset` did not finish."""


class Policy(Protocol):
    """What generates the replies: a model, a person, a script."""

    async def __call__(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message:
        """The next reply to a conversation that only grows. Raises `RolloutFailed` if there is
        none."""


class SolvableTaskset(Protocol):
    """An environment with a solver: for soundness tests, demonstrations and SFT."""

    def solver(self, task: Task) -> Policy:
        """A policy for this task that always gets full reward."""


def scripted_policy(*replies: Message) -> Policy:
    """A policy that gives these replies, one per turn, whatever the messages are."""

    async def reply(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message:  # noqa: ARG001
        turn = sum(message.role == "assistant" for message in messages)
        if turn >= len(replies):
            raise RolloutFailed("policy", "script", f"no reply is left after {len(replies)}")
        return replies[turn]

    return reply


class RolloutFailed(Exception):
    """Ends a rollout with a failure whose cause is known where it is raised.

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
    """Convert exceptions of the block into `RolloutFailed`: environment code must not exit the
    process (SystemExit) or look like a cancellation that was not requested (CancelledError). Only
    KeyboardInterrupt and a real cancellation of the running task pass through."""
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
    """Whether cancellation of the running task was requested."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTrace:
    """One rollout as the environment saw it."""

    task: Task
    messages: tuple[Message, ...]  # including those of the task
    outcome: Outcome
    turns: int
    seconds: float
    leak: str = ""  # error while closing the environment, if any


async def run_rollout(
    env: Env,
    policy: Policy,
    *,
    clock: Callable[[], float] = time.monotonic,
    close_s: float = CLOSE_S,
    trouble: Callable[[], str] = lambda: "",
) -> RolloutTrace:
    """Run one rollout from reset to verdict within the task's budget.

    The environment is always closed, also on cancellation, with a timeout of `close_s`. The reply
    of the last turn is still scored. `trouble` returns why the policy cannot be served at the
    moment, or "": a timeout meanwhile is an infrastructure failure, not the policy's.
    """
    rollout = _Rollout(env, policy, trouble)
    started = clock()
    leak = ""
    try:
        outcome = await rollout.run()
    finally:
        try:
            async with asyncio.timeout(close_s) as closing:
                await asyncio.shield(_close(env))
        except RolloutFailed as stop:
            leak = stop.failure.what
        except TimeoutError:
            assert closing.expired()
            leak = f"over {close_s:g} s to close"
    return RolloutTrace(
        task=env.task,
        messages=tuple(rollout.messages),
        outcome=outcome,
        turns=rollout.turns,
        seconds=clock() - started,
        leak=leak,
    )


async def _close(env: Env) -> None:
    # Runs as a separate task, in which SystemExit would end the event loop.
    with convert_errors("world", "close"):
        await env.close()


class _Rollout:
    def __init__(self, env: Env, policy: Policy, trouble: Callable[[], str]) -> None:
        self.env, self.policy, self.trouble = env, policy, trouble
        self.messages: list[Message] = []
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
        self.messages += [_encodable(message) for message in env.task.messages]
        while self.turns < limits.turns:
            with self._at("tools"):
                tools = env.tools
            # A bug in a policy is our own and ends the run, so it is not caught here.
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
    """Type check at run time: environments may be third-party code without type checking."""
    return isinstance(answers, tuple | list) and all(isinstance(a, Message) for a in answers)


def truncate_message(message: Message, max_bytes: int) -> Message:
    """The message with at most `max_bytes` bytes of content; the middle is replaced by a note.

    >>> truncate_message(Message(role="user", content="x" * 100), 50).content
    'xxxxxxxxxxx\\n... 78 bytes left out ...\\nxxxxxxxxxxx'
    """
    message = _encodable(message)
    raw = message.content.encode()
    if len(raw) <= max_bytes:
        return message
    spare = len("\n...  bytes left out ...\n") + len(str(len(raw)))
    half = max(0, max_bytes - spare) // 2
    ends = raw[:half].decode(errors="ignore"), raw[len(raw) - half :].decode(errors="ignore")
    lost = len(raw) - sum(len(end.encode()) for end in ends)
    return replace(message, content=f"{ends[0]}\n... {lost} bytes left out ...\n{ends[1]}")


def _encodable(message: Message) -> Message:
    """Without lone surrogates, which file names and JSON may contain but UTF-8 may not."""
    text = json_codec.replace_lone_surrogates(message.content)
    return message if text == message.content else replace(message, content=text)


def describe_error(error: BaseException) -> str:
    """One-line description of an error.

    >>> describe_error(KeyError("colour")), describe_error(SystemExit())
    ("KeyError: 'colour'", 'SystemExit')
    """
    text = json_codec.replace_lone_surrogates(str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
