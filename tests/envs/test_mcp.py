"""Tools of MCP servers, against a server written with the SDK in processes of its own."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paddock.envs import EnvError, make, run_rollout, scripted_policy
from paddock.records import Failure, Message, ToolCall, Verdict
from tests.patience import PATIENCE_S

pytest.importorskip("mcp", reason="the optional MCP SDK is not installed")
GARDEN = [sys.executable, str(Path(__file__).with_name("mcp_garden.py"))]
PATH = {"PYTHONPATH": os.pathsep.join(sys.path)}  # the server's SDK is the tests'


@pytest.fixture
def taskset(tmp_path):
    """Makes the environment with the garden as server."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Plant oaks.", "answer": "2"}))

    def make_taskset(**server):
        server = {"command": [*GARDEN, "stdio"], "env": PATH, "shared": True} | server
        settings = {
            "train_file": str(tmp_path / "rows.jsonl"),
            "correct_weight": 1.0,
            "max_turns": 8,
            "mcp_servers": {"garden": server},
        }
        return make("ask", settings)

    return make_taskset


def calls(*named):
    """A policy that makes these calls one by one and ends with what the last one returned."""

    async def policy(messages, tools):
        turn = sum(message.role == "assistant" for message in messages)
        if turn == len(named):
            return Message(role="assistant", content=messages[-1].content)
        name, arguments = named[turn]
        call = ToolCall(id=f"c{turn}", name=name, arguments=arguments)
        return Message(role="assistant", content="", tool_calls=(call,))

    return policy


def rollout(taskset, *named):
    trace = asyncio.run(run_rollout(taskset.make_env(taskset.task(0)), calls(*named)))
    assert not trace.leak
    return trace


def results(trace):
    return [message.content for message in trace.messages if message.role == "tool"]


PLANT = ("plant", {"name": "oak", "count": 2})
COUNT = ("count", {"name": "oak"})


def test_tools_are_listed_from_the_server_and_called(taskset):
    garden = taskset()
    tools = {spec.name: spec for spec in garden.make_env(garden.task(0)).tools}
    assert list(tools) == ["plant", "count", "wait", "flood", "crash", "secret"]
    assert tools["plant"].description == "Plant some of a plant."
    assert tools["plant"].parameters["required"] == ["name"]
    trace = rollout(garden, PLANT, COUNT)
    assert results(trace) == ["planted 2 oak", "2"]
    assert trace.outcome.reward == 1.0


def test_each_rollout_has_a_process_of_its_own_unless_shared(taskset):
    own, shared = taskset(shared=False), taskset()
    assert [results(rollout(own, PLANT, COUNT))[-1] for _ in range(2)] == ["2", "2"]
    assert [results(rollout(shared, PLANT, COUNT))[-1] for _ in range(2)] == ["2", "4"]


def test_concurrent_rollouts_share_a_server(taskset):
    garden = taskset()

    async def run_all():
        envs = [garden.make_env(garden.task(0)) for _ in range(8)]
        return await asyncio.gather(*(run_rollout(env, calls(PLANT)) for env in envs))

    assert all(results(trace) == ["planted 2 oak"] for trace in asyncio.run(run_all()))
    assert results(rollout(garden, COUNT)) == ["16"]


def test_an_invalid_call_is_an_error_that_the_model_reads(taskset):
    trace = rollout(
        taskset(),
        ("plant", {"name": "oak", "count": -1}),
        ("plant", {"count": 1}),
        ("plant", {"name": "oak", "deep": True}),
        ("dig", {}),
    )
    first, *others = results(trace)
    assert "cannot plant -1" in first
    assert others == [
        "error: plant: argument 'name' is missing",
        "error: plant: unknown argument 'deep'; it takes name, count",
        "error: there is no tool 'dig'; there are plant, count, wait, flood, crash, secret",
    ]
    assert isinstance(trace.outcome, Verdict)


def test_a_call_over_its_time_is_a_timeout(taskset):
    outcome = rollout(taskset(timeout_s=0.5), ("wait", {"seconds": 60})).outcome
    assert (outcome.kind, outcome.where) == ("time", "wait")
    assert outcome.what == "no result within 0.5 s"


def test_a_long_result_is_truncated(taskset):
    (text,) = results(rollout(taskset(), ("flood", {"size": 1_000_000})))
    assert len(text) <= 20_000 and "bytes left out" in text


@pytest.mark.parametrize("shared", [False, True])
def test_a_crashed_server_fails_its_rollout_and_the_next_one_works(taskset, shared):
    garden = taskset(shared=shared)
    outcome = rollout(garden, ("crash", {})).outcome
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.where) == ("world", "MCP server garden")
    assert "the garden is on fire" in outcome.what
    assert results(rollout(garden, PLANT)) == ["planted 2 oak"]


def test_only_the_chosen_tools_are_offered_with_the_given_environment(taskset):
    garden = taskset(tools=["secret"], env={**PATH, "GARDEN_SECRET": "rose"})
    assert results(rollout(garden, ("secret", {}), PLANT)) == [
        "rose",
        "error: there is no tool 'plant'; there are secret",
    ]


def test_a_server_at_a_url(taskset):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([*GARDEN, "streamable-http", str(port)], stderr=subprocess.DEVNULL)
    try:
        wait_for(port)
        garden = taskset(command=[], url=f"http://127.0.0.1:{port}/mcp", env={})
        assert results(rollout(garden, PLANT, COUNT)) == ["planted 2 oak", "2"]
        process.kill()
        process.wait()
        assert rollout(garden, COUNT).outcome.kind == "world"
    finally:
        process.kill()


def wait_for(port):
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError(port)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"command": []}, "set either 'command' or 'url'"),
        ({"command": ["/no/such/server"]}, "MCP server 'garden': /no/such/server: FileNotFound"),
        ({"command": [sys.executable, "-c", "print(1 / 0)"]}, "ZeroDivisionError"),
        ({"tools": ["plough"]}, "has no tool 'plough'; it has plant, count, wait"),
        ({"command": ["sleep", "60"], "start_timeout_s": 0.3}, "did not answer within 0.3 s"),
        (
            {"command": [], "url": "http://127.0.0.1:1/mcp", "env": {}},
            "MCP server 'garden': http://127",
        ),
    ],
)
def test_a_server_that_cannot_be_used_is_an_error_with_the_reason(taskset, server, message):
    with pytest.raises(EnvError, match=message):
        taskset(**server)


def test_two_servers_with_the_same_tool_are_rejected(tmp_path):
    server = {"command": [*GARDEN, "stdio"], "env": PATH}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "x"}))
    args = {"train_file": str(tmp_path / "rows.jsonl"), "correct_weight": 1.0, "max_turns": 2}
    with pytest.raises(EnvError, match="servers 'a' and 'b' both have a tool 'plant'"):
        make("ask", {**args, "mcp_servers": {"a": server, "b": server}})


def test_reward_functions_see_the_calls(taskset, tmp_path):
    (tmp_path / "r.py").write_text(
        "def planted(completions, **kwargs):\n"
        "    return [sum(len(m.get('tool_calls', [])) for m in c) for c in completions]\n"
    )
    prompt = [{"role": "user", "content": "Plant."}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": prompt}))
    garden = make(
        "ask",
        {
            "train_file": str(tmp_path / "chat.jsonl"),
            "reward_funcs": [f"{tmp_path / 'r.py'}:planted"],
            "max_turns": 4,
            "mcp_servers": {"garden": {"command": [*GARDEN, "stdio"], "env": PATH, "shared": True}},
        },
    )
    assert rollout(garden, PLANT, COUNT).outcome.reward == 2.0
    done = scripted_policy(Message(role="assistant", content="no"))
    trace = asyncio.run(run_rollout(garden.make_env(garden.task(0)), done))
    assert trace.outcome.reward == 0.0
