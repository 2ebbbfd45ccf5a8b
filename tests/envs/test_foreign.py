"""Environments in another Python: its process, its virtual environment, tasksets of verifiers.

Those of verifiers run where `paddock env` or `make prove AREA=agents` has made its environment; no
test installs it.
"""

import asyncio
import sys
from pathlib import Path

import pytest

from paddock.envs import EnvError, make, run_rollout, scripted_policy
from paddock.envs.foreign.interpreter import find_interpreter, venv_folder
from paddock.envs.foreign.messages import message_from_json, message_to_json
from paddock.envs.foreign.process import ForeignError, ForeignProcess
from paddock.envs.foreign.verifiers_taskset import VerifiersSettings
from paddock.records import Failure, Message, ToolCall

REQUIREMENTS = VerifiersSettings().requirements
TASKSET = str(Path(__file__).with_name("foreign_taskset.py"))
needs_verifiers = pytest.mark.skipif(
    not (venv_folder(REQUIREMENTS) / ".ready").exists(),
    reason="verifiers has no environment yet: make prove AREA=agents",
)
ECHO = """
import json, os, sys, threading, time
def answer(call):
    p = call["params"]
    time.sleep(p.get("sleep", 0))
    if call["method"] == "exit":
        os.write(2, b"goodbye"); os._exit(3)
    found = {"error": "no"} if call["method"] == "fail" else {"result": p}
    os.write(1, json.dumps({"call": call["call"], **found}).encode() + b"\\n")
for line in sys.stdin:
    threading.Thread(target=answer, args=[json.loads(line)]).start()
"""


@pytest.fixture
def echo(tmp_path):
    (tmp_path / "echo.py").write_text(ECHO)
    return ForeignProcess([sys.executable, str(tmp_path / "echo.py")])


def test_calls_overlap_and_each_gets_its_result(echo):
    async def calls():
        return await asyncio.gather(*(echo.call("x", n=n, sleep=0.01 * (9 - n)) for n in range(9)))

    assert [found["n"] for found in asyncio.run(calls())] == list(range(9))


def test_an_error_is_raised_and_the_next_call_works(echo):
    with pytest.raises(ForeignError, match="no"):
        echo.call_blocking("fail")
    assert echo.call_blocking("x", text="ä" * 200_000)["text"] == "ä" * 200_000


def test_the_end_of_the_process_fails_every_call_with_its_last_words(echo):
    async def calls():
        waiting = asyncio.gather(*(echo.call("x", sleep=60) for _ in range(3)), echo.call("exit"))
        return await asyncio.gather(waiting, return_exceptions=True)

    (error,) = asyncio.run(calls())
    assert isinstance(error, ForeignError) and "it wrote: goodbye" in str(error)
    assert echo.ended
    with pytest.raises(ForeignError, match="goodbye"):
        echo.call_blocking("x")


def test_a_cancelled_call_does_not_disturb_others(echo):
    async def cancelled():
        async with asyncio.timeout(0.05):
            await echo.call("x", sleep=0.2)

    with pytest.raises(TimeoutError):
        asyncio.run(cancelled())
    assert echo.call_blocking("x", n=1, sleep=0.3) == {"n": 1, "sleep": 0.3}


def test_an_environment_is_made_once(tmp_path):
    python = find_interpreter("", ("pip",), tmp_path)
    made = Path(python).stat().st_ctime_ns
    assert find_interpreter("", ("pip",), tmp_path) == python
    assert Path(python).stat().st_ctime_ns == made


def test_what_cannot_be_installed_is_an_error_with_the_reason(tmp_path):
    with pytest.raises(EnvError, match=r"installing \./no-such-folder into .* failed: .*no-such"):
        find_interpreter("", ("./no-such-folder",), tmp_path)
    with pytest.raises(EnvError, match="'no-such-python' is not a program"):
        find_interpreter("no-such-python", (), tmp_path)


def test_messages_survive_the_wire():
    call = ToolCall(id="c1", name="look", arguments={"n": [1, None]})
    message = Message(role="assistant", content="so", reasoning="hm", tool_calls=(call,))
    assert message_from_json(message_to_json(message)) == message
    with pytest.raises(ValueError, match="part of type 'image_url'"):
        message_from_json({"role": "user", "content": [{"type": "image_url"}]})


def test_missing_tasksets_are_named():
    with pytest.raises(EnvError, match="set 'taskset'"):
        make("verifiers")
    with pytest.raises(EnvError, match=r"there is no file nowhere\.py"):
        make("verifiers", {"taskset": "nowhere.py"})


# --- with verifiers -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def capitals():
    return make("verifiers", {"taskset": TASKSET, "args": {"country": "Norway"}, "num_test": 2})


def rollout(taskset, *replies, index=0, split="train"):
    policy = scripted_policy(*(r if isinstance(r, Message) else said(r) for r in replies))
    return asyncio.run(run_rollout(taskset.make_env(taskset.task(index, split)), policy))


def said(text, **call):
    calls = (ToolCall(id="c1", **call),) if call else ()
    return Message(role="assistant", content=text, reasoning="hm", tool_calls=calls)


@needs_verifiers
def test_a_taskset_in_the_api_of_verifiers_is_played_and_scored(capitals):
    assert (capitals.size("train"), capitals.size("test")) == (3, 2)
    assert capitals.task(0, "test").messages[-1].content == "Capital of Norway? (0)"
    assert capitals.task(0).messages[-1].content == "Capital of Norway? (2)"
    trace = rollout(capitals, "Oslo")
    assert [(m.role, m.content) for m in trace.messages[:2]] == [
        ("system", "Be short."),
        ("user", "Capital of Norway? (2)"),
    ]
    assert trace.outcome.reward == 1.0 and trace.outcome.parts == {"right": 1.0, "turns": 1.0}
    assert rollout(capitals, "Rome").outcome.reward == 0.0


@needs_verifiers
def test_its_tools_are_called_by_verifiers(capitals):
    ask = said("", name="atlas_look_up", arguments={"country": "Norway"})
    trace = rollout(capitals, ask, said("", name="dig", arguments={}), "Oslo")
    results = [m.content for m in trace.messages if m.role == "tool"]
    assert results == ["Oslo", "error: there is no tool 'dig'; there are atlas_look_up"]
    assert trace.outcome.parts == {"right": 1.0, "turns": 3.0}


@needs_verifiers
def test_the_turns_are_limited_and_still_scored():
    taskset = make("verifiers", {"taskset": TASKSET, "max_turns": 2})
    ask = said("Paris", name="atlas_look_up", arguments={"country": "France"})
    trace = rollout(taskset, ask, ask, ask)
    assert trace.turns == 2 and trace.outcome.parts == {"right": 1.0, "turns": 2.0}


@needs_verifiers
def test_a_reward_that_raises_is_a_failure_of_the_grader(capitals):
    outcome = rollout(capitals, "break the verifier").outcome
    assert isinstance(outcome, Failure) and outcome.kind == "grader"
    assert "the verifier is broken" in outcome.what
    assert rollout(capitals, "Oslo").outcome.reward == 1.0


@needs_verifiers
def test_a_lost_process_fails_its_rollouts_and_is_started_again(capitals):
    assert rollout(capitals, "crash").outcome.kind == "world"
    assert rollout(capitals, "Oslo").outcome.reward == 1.0


@needs_verifiers
def test_rollouts_run_together_and_a_cancelled_one_ends(capitals):
    async def policy(messages, tools):
        await asyncio.sleep(60)

    async def run_all():
        tasks = [capitals.task(i) for i in range(16)]
        slow = asyncio.create_task(run_rollout(capitals.make_env(tasks[0]), policy))
        quick = scripted_policy(said("Oslo"))
        found = await asyncio.gather(*(run_rollout(capitals.make_env(t), quick) for t in tasks))
        slow.cancel()
        await asyncio.wait({slow})
        return found

    assert all(trace.outcome.reward == 1.0 for trace in asyncio.run(run_all()))


@needs_verifiers
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"taskset": "no-such-taskset"}, "taskset 'no-such-taskset': ModuleNotFoundError"),
        ({"taskset": TASKSET, "args": {"planet": "Mars"}}, "planet"),
    ],
)
def test_a_taskset_that_cannot_be_loaded_is_an_error(settings, message):
    with pytest.raises(EnvError, match=message):
        make("verifiers", settings)
