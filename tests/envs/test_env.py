import asyncio
from dataclasses import replace

import pytest

from paddock.envs import EnvError, RolloutFailed, make, run_rollout
from paddock.envs.tools import Tool, ToolError, execute_tool_calls
from paddock.records import Budget, Failure, Message, Task, ToolCall, ToolSpec, Verdict

LIMITS = Budget(turns=3, seconds=5, output_bytes=100)
ASK = Message(role="user", content="Go.")
SPEC = ToolSpec(
    name="look",
    description="",
    parameters={
        "type": "object",
        "properties": {"key": {"type": "string"}, "deep": {"type": "integer"}},
        "required": ["key"],
    },
)


class Scripted:
    """An environment with scripted steps."""

    def __init__(self, limits=LIMITS, **steps):
        self.task = Task(id="t/0", env="t", messages=(ASK,), budget=limits)
        self.tools = (SPEC,)
        self.steps, self.closed = steps, 0

    async def _do(self, name, otherwise):
        found = self.steps.get(name, otherwise)
        if isinstance(found, BaseException):
            raise found
        return await found() if callable(found) else found

    async def reset(self):
        await self._do("start", None)

    async def step(self, reply):
        return await self._do("respond", ())

    async def score(self):
        return await self._do("grade", Verdict(reward=1.0))

    async def close(self):
        self.closed += 1
        await self._do("close", None)


async def say(messages, tools):
    return Message(role="assistant", content=f"turn {len(messages)}")


def run(env, policy=say):
    rollout = asyncio.run(run_rollout(env, policy))
    assert env.closed == 1
    return rollout


def test_a_rollout_ends_when_the_environment_returns_no_messages():
    rollout = run(Scripted())
    assert [m.content for m in rollout.messages] == ["Go.", "turn 1"]
    assert rollout.outcome == Verdict(reward=1.0)
    assert rollout.turns == 1


def test_the_last_turn_is_scored_too():
    rollout = run(Scripted(respond=(Message(role="user", content="More."),)))
    assert rollout.turns == LIMITS.turns
    assert rollout.outcome == Verdict(reward=1.0)


def test_environment_messages_are_cut_to_the_budget():
    rollout = run(Scripted(respond=(Message(role="user", content="é" * 1000),)))
    answer = rollout.messages[2].content
    assert len(answer.encode()) <= LIMITS.output_bytes
    assert "bytes left out" in answer
    assert answer.startswith("é")
    assert answer.endswith("é")


HALF = "caf\udce9"  # os.listdir of a Latin-1 name


def test_lone_surrogates_are_replaced():
    env = Scripted(respond=(Message(role="user", content=HALF),), grade=OSError(HALF))
    env.task = replace(env.task, messages=(Message(role="user", content=HALF),))
    rollout = run(env)
    assert {m.content for m in rollout.messages if m.role == "user"} == {"caf\ufffd"}
    assert rollout.outcome == Failure(kind="grader", where="grade", what="OSError: caf\ufffd")
    for step in (RolloutFailed("world", "disk", HALF), TimeoutError(HALF)):
        outcome = run(Scripted(respond=step)).outcome
        assert outcome.what.encode().endswith("caf\ufffd".encode())


@pytest.mark.parametrize(
    ("step", "kind"), [("start", "world"), ("respond", "world"), ("grade", "grader")]
)
def test_a_crash_is_a_failure_with_its_reason_and_never_reward_zero(step, kind):
    outcome = run(Scripted(**{step: RuntimeError("disk full")})).outcome
    assert outcome == Failure(kind=kind, where=step, what="RuntimeError: disk full")
    assert not outcome.is_policy_failure


ENDINGS = [SystemExit(0), SystemExit("bye"), asyncio.CancelledError(), GeneratorExit()]


@pytest.mark.parametrize("error", ENDINGS, ids=repr)
@pytest.mark.parametrize(
    ("step", "kind"), [("start", "world"), ("respond", "world"), ("grade", "grader")]
)
def test_system_exit_and_cancellation_in_a_step_are_failures_too(step, kind, error):
    outcome = run(Scripted(**{step: error})).outcome
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    assert outcome == Failure(kind=kind, where=step, what=message)


@pytest.mark.parametrize("error", ENDINGS, ids=repr)
def test_close_cannot_end_the_process_either(error):
    rollout = run(Scripted(close=error))
    assert rollout.outcome == Verdict(reward=1.0)
    assert rollout.leak.startswith(type(error).__name__)


def test_tools_that_raise_are_a_failure():
    class Toolless(Scripted):
        @property
        def tools(self):
            raise SystemExit(3)

        @tools.setter
        def tools(self, _):
            pass

    assert run(Toolless()).outcome == Failure(kind="world", where="tools", what="SystemExit: 3")


def test_a_future_cancelled_inside_a_step_is_a_failure():
    """A worker that was shut down leaves cancelled futures; the rollout itself is not cancelled."""

    async def deserted():
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    outcome = run(Scripted(grade=deserted)).outcome
    assert outcome == Failure(kind="grader", where="grade", what="CancelledError")


@pytest.mark.parametrize(
    ("step", "gave", "kind", "what"),
    [
        ("grade", 1.0, "grader", "it gave 1.0, not a Verdict"),
        ("grade", None, "grader", "it gave None, not a Verdict"),
        ("respond", "More.", "world", "it gave 'More.', not messages"),
        ("respond", ("More.",), "world", "it gave ('More.',), not messages"),
    ],
)
def test_an_invalid_return_value_is_a_failure(step, gave, kind, what):
    outcome = run(Scripted(**{step: gave})).outcome
    assert outcome == Failure(kind=kind, where=step, what=what)


@pytest.mark.parametrize("step", ["start", "respond", "grade"])
def test_a_hanging_step_times_out(step):
    env = Scripted(limits=replace(LIMITS, seconds=0.05), **{step: asyncio.Event().wait})
    assert run(env).outcome == Failure(kind="time", where=step, what="over 0.05 s in all")


@pytest.mark.parametrize("step", ["start", "respond", "grade"])
def test_a_timeout_inside_a_step_keeps_its_own_message(step):
    outcome = run(Scripted(**{step: TimeoutError("tests took over 2 s")})).outcome
    assert outcome == Failure(kind="time", where=step, what="TimeoutError: tests took over 2 s")


def test_an_environment_may_choose_the_failure_kind():
    stop = RolloutFailed("infrastructure", "pull", "no image")
    assert run(Scripted(start=stop)).outcome == stop.failure


def test_a_policy_that_stops_ends_the_rollout():
    async def stop(messages, tools):
        raise RolloutFailed("policy", "context", "full")

    assert run(Scripted(), stop).outcome.is_policy_failure


def test_a_bug_in_a_policy_is_raised_after_closing():
    async def broken(messages, tools):
        raise KeyError("bug")

    env = Scripted()
    with pytest.raises(KeyError):
        asyncio.run(run_rollout(env, broken))
    assert env.closed == 1


def test_cancelling_closes_the_environment():
    env = Scripted(start=asyncio.Event().wait)

    async def give_up():
        rollout = asyncio.create_task(run_rollout(env, say))
        await asyncio.sleep(0)
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout

    asyncio.run(give_up())
    assert env.closed == 1


def test_an_error_in_close_is_reported_and_the_verdict_kept():
    rollout = run(Scripted(close=OSError("busy")))
    assert rollout.outcome == Verdict(reward=1.0)
    assert rollout.leak == "OSError: busy"


def test_an_environment_that_never_closes_does_not_block_the_verdict():
    env = Scripted(close=asyncio.Event().wait)
    rollout = asyncio.run(asyncio.wait_for(run_rollout(env, say, close_s=0.01), 60))
    assert rollout.outcome == Verdict(reward=1.0)
    assert rollout.leak == "over 0.01 s to close"


def tool_call(name="look", **arguments):
    call = ToolCall(id="c1", name=name, arguments=arguments)
    return Message(role="assistant", content="", tool_calls=(call,))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (tool_call(key="oak"), "oak 0"),
        (tool_call(key="oak", deep=2), "oak 2"),
        (tool_call("find", key="oak"), "error: there is no tool 'find'; there are look"),
        (tool_call(), "error: look: argument 'key' is missing"),
        (tool_call(key=3), "error: look: argument 'key' is 3, not of type string"),
        (
            tool_call(key="a", deep=True),
            "error: look: argument 'deep' is True, not of type integer",
        ),
        (tool_call(key="a", far=1), "error: look: unknown argument 'far'; it takes key, deep"),
        (tool_call(key="nowhere"), "error: no such key"),
    ],
)
def test_an_invalid_call_gets_an_error_message(call, message):
    async def look(key, deep=0):
        if key == "nowhere":
            raise ToolError("no such key")
        return f"{key} {deep}"

    (answer,) = asyncio.run(execute_tool_calls([Tool(SPEC, look)], call))
    assert answer == Message(role="tool", content=message, tool_call_id="c1")


def test_a_tool_that_does_not_return_a_string_is_an_environment_failure():
    async def look(key):
        return len(key)

    with pytest.raises(TypeError, match="look must return a string, got 3"):
        asyncio.run(execute_tool_calls([Tool(SPEC, look)], tool_call(key="oak")))


def test_an_unknown_environment_is_named_with_the_known_ones():
    with pytest.raises(EnvError, match="environment 'moon' not found; it must be one of"):
        make("moon")
