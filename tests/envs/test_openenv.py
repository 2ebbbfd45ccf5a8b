"""Servers that speak OpenEnv's protocol: a plain one, and those of its package in its own Python.

The package's servers run where `make prove AREA=agents` has made its environment.
"""

import asyncio
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from paddock.envs import EnvError, make, run_rollout, scripted_policy
from paddock.envs.foreign.interpreter import venv_folder
from paddock.records import Failure, Message, ToolCall
from tests.envs.http_env_server import counter_server
from tests.patience import PATIENCE_S

REQUIREMENTS = ("openenv==0.10.0",)
SERVERS = str(Path(__file__).with_name("openenv_servers.py"))


def acts(tool, **arguments):
    call = ToolCall(id="c", name=tool, arguments=arguments)
    return Message(role="assistant", content="", tool_calls=(call,))


def says(text):
    return Message(role="assistant", content=text)


def rollout(taskset, *replies, index=0, split="train"):
    env = taskset.make_env(taskset.task(index, split))
    trace = asyncio.run(run_rollout(env, scripted_policy(*replies)))
    assert not trace.leak
    return trace


def contents(trace):
    return [m.content for m in trace.messages if m.role != "assistant"]


@pytest.fixture(scope="module")
def plain():
    server = counter_server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {"url": f"http://127.0.0.1:{server.server_port}", "transport": "http"}
    server.shutdown()


def test_the_actions_of_the_schema_are_a_tool_and_rewards_are_added(plain):
    taskset = make("openenv", {**plain, "instruction": "Count to ten."})
    (tool,) = taskset.make_env(taskset.task(0)).tools
    assert tool.name == "step" and tool.parameters["properties"] == {"add": {"type": "integer"}}
    trace = rollout(taskset, acts("step", add=4), acts("step", add=5))
    assert contents(trace) == ["Count to ten.\n\nat 1", "at 5"]
    assert trace.outcome.reward == pytest.approx(0.9)
    assert trace.outcome.parts == {"steps": 2.0, "done": 1.0}


def test_a_reply_may_be_the_action(plain):
    taskset = make("openenv", {**plain, "actions": "text"})
    trace = rollout(taskset, says("4"), says('```json\n{"add": -1}\n```'), says('{"add": 5}'))
    assert contents(trace) == ["at 1", "at 5", 'error: {"detail": "add must not be negative"}']
    assert trace.outcome.reward == pytest.approx(0.9)


def test_a_reply_without_a_call_ends_the_episode(plain):
    trace = rollout(make("openenv", plain), acts("step", add=2), says("enough"))
    assert trace.outcome.reward == pytest.approx(0.2) and trace.outcome.parts["done"] == 0.0


def test_an_error_of_the_server_is_a_failure_of_the_environment(plain):
    outcome = rollout(make("openenv", plain), acts("step", add=400)).outcome
    assert isinstance(outcome, Failure) and outcome.kind == "world"
    assert "500" in outcome.what


def test_concurrent_rollouts_have_episodes_of_their_own(plain):
    taskset = make("openenv", plain)

    async def run_all():
        policy = scripted_policy(acts("step", add=3), acts("step", add=3), says("."))
        envs = [taskset.make_env(taskset.task(0)) for _ in range(16)]
        return await asyncio.gather(*(run_rollout(env, policy) for env in envs))

    for trace in asyncio.run(run_all()):
        assert contents(trace) == ["at 1", "at 4", "at 7"], trace.outcome


def test_tasks_are_the_given_resets_or_seeds(plain):
    resets = [{"seed": n} for n in range(5)]
    taskset = make("openenv", {**plain, "resets": resets, "num_test": 2})
    assert (taskset.size("train"), taskset.size("test")) == (3, 2)
    starts = [contents(rollout(taskset, says("."), index=i))[0] for i in range(3)]
    assert starts == ["at 2", "at 3", "at 4"]
    assert contents(rollout(taskset, says("."), index=1, split="test")) == ["at 1"]
    endless = make("openenv", plain)
    assert endless.size("train") is None
    assert contents(rollout(endless, says("."), index=1, split="test")) == ["at 2"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"url": "localhost:8000"}, "url must start with http"),
        ({"url": "http://127.0.0.1:1"}, "no action schema at http://127.0.0.1:1/schema: Connect"),
    ],
)
def test_a_server_that_cannot_be_reached_is_an_error(args, message):
    with pytest.raises(EnvError, match=message):
        make("openenv", args)


# --- with the package -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def servers():
    """The URLs of both servers of the package, in its own Python."""
    folder = venv_folder(REQUIREMENTS)
    if not (folder / ".ready").exists():
        pytest.skip("openenv has no environment yet: make prove AREA=agents")
    ports = {}
    for name in ("counter", "tools"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports[name] = free.getsockname()[1]
    command = [str(folder / "bin" / "python"), "-I", SERVERS]
    running = [subprocess.Popen([*command, name, str(port)]) for name, port in ports.items()]
    try:
        for port in ports.values():
            wait_for(port)
        yield {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    finally:
        for process in running:
            process.kill()
            process.wait()


def wait_for(port):
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError(port)


def test_a_server_of_the_package_is_played_over_its_websocket(servers):
    taskset = make("openenv", {"url": servers["counter"]})
    trace = rollout(taskset, acts("step", add=4), acts("step", add=5))
    assert contents(trace) == ['{"total": 1}', '{"total": 5}']
    assert trace.outcome.reward == 1.0
    stuck = rollout(taskset, acts("step", add=101)).outcome
    assert (stuck.kind, stuck.what) == ("world", "EXECUTION_ERROR: the counter is stuck")


def test_the_tools_of_an_mcp_environment_are_tools(servers):
    taskset = make("openenv", {"url": servers["tools"], "instruction": "Plant."})
    wrong = acts("plant", nam="oak")
    trace = rollout(taskset, acts("plant", name="oak"), wrong, acts("plant", name="elm"), says("."))
    results = [m.content for m in trace.messages if m.role == "tool"]
    assert results[0] == "1 planted" and results[2] == "2 planted"
    assert results[1].startswith("error: plant: unknown argument 'nam'")
