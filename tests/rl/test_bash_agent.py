"""examples/bash_agent.py through a real gateway: in its own folder, and in the shell of a task."""

import asyncio
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from paddock.api import parse_response_format
from paddock.checkpoint import load_pretrained
from paddock.engine import Engine, EngineSettings
from paddock.envs.terminal.env import SHELL
from paddock.envs.tools import Tool, execute_tool_calls
from paddock.http import bind_socket, socket_url
from paddock.launch.agent_process import ProcessAgent
from paddock.launch.engines import in_process_client
from paddock.launch.gateway import session_lines
from paddock.launch.run_gateway import serving
from paddock.records import Budget, Message, SamplingParams, Task, Trajectory, Verdict
from paddock.records.json_codec import decode
from paddock.rollout.agents import AgentRollout, AgentSettings
from paddock.rollout.gateway import SessionConfig, SessionManager, build_gateway
from paddock.rollout.sglang_client import connection_pool
from paddock.rollout.task_schedule import RolloutSpec
from paddock.text import Tokenizer, get_renderer
from tests.rollout.replay import check_replay, log_samples
from tests.rollout.test_gateway import gateway, opened
from tests.serve.memorized_model import SILENT
from tests.serve.random_model import one_of, save_random_model, saying

AGENT = Path(__file__).parents[2] / "examples/bash_agent.py"
SUBMIT = saying("```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```")
ADD = saying("One more.\n```bash\necho one >> count; cat count\n```")
REPLIES = (SUBMIT, ADD, saying("What do you mean?"))
EVEN = 50.0  # a temperature at which they are about as likely


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = save_random_model(tmp_path_factory.mktemp("random") / "model")
    settings = EngineSettings(kv_cache_bytes=1 << 24, max_running_requests=8)
    with Engine(load_pretrained(folder), Tokenizer.load(folder), settings) as found:
        yield found


@pytest.fixture
def log(monkeypatch):
    log = []
    log_samples(monkeypatch, log)
    return log


def test_it_runs_commands_in_its_folder_until_it_submits(engine, tmp_path, log):
    renderer = get_renderer(engine.tokenizer)
    only = one_of(renderer, *REPLIES)
    quiet = {"enable_thinking": False}
    with gateway(in_process_client(engine), renderer) as (url, sessions):
        for seed in range(3):
            name, folder = f"s{seed}", tmp_path / str(seed)
            folder.mkdir()
            session = opened(
                *(url, name),
                seed=seed,
                temperature=EVEN,
                response_format=only,
                chat_template_kwargs=quiet,
            )
            own = {"OPENAI_BASE_URL": f"{session.url}/v1", "OPENAI_API_KEY": session.key}
            command = [sys.executable, str(AGENT), "Count to three."]
            subprocess.run(command, cwd=folder, env=os.environ | own, check=True)
            (line,) = session_lines(sessions[name])
            ask, first, *rest = (m["content"] for m in line["messages"][1:])
            replies, seen = [first, *rest[1::2]], rest[::2]
            assert ask == "Count to three." and replies[-1] == SUBMIT.content
            counted = [i for i, reply in enumerate(replies) if reply == ADD.content]
            for number, i in enumerate(counted, start=1):
                assert seen[i] == number * "one\n" + "(exit code 0)"
            refused = sum("Nothing was run" in each for each in seen)
            assert len(counted) + refused + 1 == len(replies)
            check_replay([decode(Trajectory, line["trajectory"])], log)
    assert len(log) > 3, "there were commands before the submissions"


class Counting:
    """A taskset with one task, whose reward is the number of commands."""

    name = "count"

    def __init__(self):
        ask = Message(role="user", content="Count.")
        limits = Budget(turns=40, seconds=300, output_bytes=10_000)
        self.only = Task(id="count/0", env="count", messages=(ask,), budget=limits)

    def size(self, split):
        return 1

    def task(self, index, split="train"):
        return self.only

    def make_env(self, task):
        return CountingEnv(task)


class CountingEnv:
    tools = (SHELL,)

    def __init__(self, task):
        self.task, self.commands = task, []

    async def reset(self):
        pass

    async def step(self, reply):
        async def run(command, timeout_s=None):
            self.commands.append(command)
            return f"{len(self.commands)} of them"

        return await execute_tool_calls([Tool(SHELL, run)], reply)

    async def score(self):
        return Verdict(reward=float(len(self.commands)))

    async def close(self):
        pass


async def _rollouts(engine, specs):
    renderer = get_renderer(engine.tokenizer)
    grammar = parse_response_format(one_of(renderer, *REPLIES))
    sampling = SamplingParams(temperature=EVEN, grammar=grammar)
    rules = SessionConfig(sampling_params=sampling, thinking=SILENT)
    command = f"{sys.executable} {AGENT}"
    sessions = SessionManager(in_process_client(engine), renderer)
    with bind_socket("127.0.0.1", 0) as sock:
        app = build_gateway(sessions, worker_key="w", queues={})
        async with connection_pool() as http, serving(app, sock):
            rollout = AgentRollout(
                taskset=Counting(),
                sessions=sessions,
                rules=rules,
                settings=AgentSettings(command=command),
                reserve_agent=lambda: nullcontext(ProcessAgent(command).run_agent),
                base_url=socket_url(sock),
                http=http,
            )
            return await asyncio.gather(*map(rollout, specs))


def test_in_a_run_its_commands_go_to_the_shell_of_the_task(engine, log):
    specs = [RolloutSpec.derive("count", 0, member, seed=3) for member in range(3)]
    found = asyncio.run(_rollouts(engine, specs))
    commands = 0
    for (branch,) in found:
        replies = [engine.tokenizer.decode(turn.completion.token_ids) for turn in branch.turns]
        ran = sum("one >> count" in reply for reply in replies)
        assert branch.outcome == Verdict(reward=float(ran)), branch.outcome
        commands += ran
    assert commands > 0
    assert check_replay([branch for (branch,) in found], log) == len(log)
