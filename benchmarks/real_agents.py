"""Agents from the package registries, unchanged, against the gateway and `paddock serve`.

    python -m benchmarks.real_agents [--only NAME]

Each is installed into a folder of its own (~/.cache/paddock) and runs in its own process. The model
has random weights. In the gateway a session's `response_format` leaves it a tool call of the agent
and an end, of which it samples either; the model of the server says whatever it says.
"""

import argparse
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from benchmarks.table import Claim, print_claims
from paddock.api import parse_response_format
from paddock.checkpoint import load_pretrained
from paddock.engine import Engine, EngineSettings
from paddock.envs.foreign.interpreter import find_interpreter
from paddock.launch.engines import in_process_client
from paddock.records import Message, SamplingParams, Verdict, json_codec
from paddock.rollout.gateway import SessionConfig, SessionManager, build_gateway
from paddock.text import Tokenizer, get_renderer
from tests.rollout.replay import check_replay, log_samples
from tests.serve import live
from tests.serve.memorized_model import SILENT
from tests.serve.random_model import calling, one_of, save_random_model, saying

HERE = Path(__file__).parent
NPM_CACHE = Path.home() / ".cache" / "paddock" / "npm"
SEEDS = 3  # runs of each agent at the gateway
CONTEXT = 1 << 17  # tokens; with the small vocabulary of the model some prompts have 50,000
KV_CACHE_BYTES = 1 << 28
EVEN = 50.0  # the temperature at which a call and an end are about as likely
TIMEOUT_S = 200

AI_SDK = ("ai@7.0.173", "@ai-sdk/openai@4.0.118", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7")
CLAUDE_CODE = ("@anthropic-ai/claude-code@2.1.197",)
CODEX = ("@openai/codex@0.169.0",)
MINI_SWE_AGENT = (
    "mini-swe-agent==2.4.6",
    "mcp==2.3.0",
)  # litellm needs mcp as soon as it has tools
OPENAI_AGENTS = ("openai-agents==0.24.0",)
OPENCODE = ("opencode-ai@1.18.33",)
PYDANTIC_AI = ("pydantic-ai-slim[anthropic,openai]==2.68.0",)
QWEN_CODE = ("@qwen-code/qwen-code@0.24.4",)
SMOLAGENTS = ("smolagents[openai]==1.26.0",)

# The command of an agent in a new folder that is its home, too; it may add to its environment.
Command = Callable[[Path, dict[str, str]], list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    name: str
    api: str
    command: Command
    replies: tuple[Message, ...]
    rewrites: bool = False  # the replies that it got, so that every turn begins a branch


# --- how they are started -------------------------------------------------------------------------


def _python(requirements: Sequence[str], *words: str) -> Command:
    def command(folder: Path, env: dict[str, str]) -> list[str]:
        env |= {
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_COST_TRACKING": "ignore_errors",  # else it stops: this model has no price
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        # Copied, so that nothing that lies beside it is imported.
        script = shutil.copy(HERE / "real_agents_python.py", folder / "agent.py")
        return [find_interpreter("", requirements), str(script), *words]

    return command


def _node(*words: str) -> Command:
    def command(_: Path, __: dict[str, str]) -> list[str]:
        script = _npm_folder(AI_SDK) / "agent.mjs"  # packages are found from where a script lies
        shutil.copy(HERE / "real_agents_node.mjs", script)
        return ["node", str(script), *words]

    return command


def _npm_folder(packages: Sequence[str]) -> Path:
    """A folder with these packages, which are installed on first use."""
    folder = NPM_CACHE / blake2b("\n".join(packages).encode(), digest_size=8).hexdigest()
    if not (folder / ".ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "package.json").write_text("{}")
        subprocess.run(["npm", "install", *packages], cwd=folder, check=True, capture_output=True)
        (folder / ".ready").touch()
    return folder


def _program(packages: Sequence[str], name: str) -> str:
    return str(_npm_folder(packages) / "node_modules" / ".bin" / name)


def _codex(folder: Path, env: dict[str, str]) -> list[str]:
    (folder / ".codex").mkdir()
    (folder / ".codex" / "config.toml").write_text(
        'model = "policy"\nmodel_provider = "paddock"\n[model_providers.paddock]\n'
        f'name = "paddock"\nbase_url = "{env["OPENAI_BASE_URL"]}"\nenv_key = "OPENAI_API_KEY"\n'
        'wire_api = "responses"\n'
    )
    options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    return [_program(CODEX, "codex"), "exec", *options, "Say hi."]


def _opencode(folder: Path, env: dict[str, str]) -> list[str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": env["OPENAI_BASE_URL"], "apiKey": env["OPENAI_API_KEY"]},
        "models": {"policy": {"tool_call": True, "limit": {"context": 100_000, "output": 4000}}},
    }
    settings = {
        "model": "paddock/policy",
        "small_model": "paddock/policy",
        "autoupdate": False,
        "provider": {"paddock": provider},
        "permission": {"bash": "allow"},
        "agent": {"title": {"disable": True}},  # its request would be a turn of the session
    }
    (folder / "opencode.json").write_bytes(json_codec.json_bytes(settings))
    return [_program(OPENCODE, "opencode"), "run", "Say hi."]


def _qwen_code(_: Path, env: dict[str, str]) -> list[str]:
    env["OPENAI_MODEL"] = "policy"
    return [_program(QWEN_CODE, "qwen"), "--auth-type", "openai", "--yolo", "-p", "Say hi."]


def _claude_code(_: Path, env: dict[str, str]) -> list[str]:
    env |= {"ANTHROPIC_MODEL": "policy", "ANTHROPIC_SMALL_FAST_MODEL": "policy"}
    env["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] = "1"
    return [_program(CLAUDE_CODE, "claude"), "-p", "Say hi.", "--allowedTools", "Bash(echo:*)"]


# --- the agents -----------------------------------------------------------------------------------


def _agents() -> Iterator[Agent]:
    done = saying("Done.")
    add = (calling("add", a=1, b=2), done)
    for streamed in ((), ("stream",)):
        for kind in ("chat", "responses"):
            yield Agent(
                name="openai-agents",
                api=kind,
                command=_python(OPENAI_AGENTS, "openai_agents", kind, *streamed),
                replies=add,
            )
        for kind in ("chat", "responses", "messages"):
            command = _python(PYDANTIC_AI, "pydantic_ai", kind, *streamed)
            yield Agent(name="pydantic-ai", api=kind, command=command, replies=add)
        for kind in ("chat", "responses", "compatible"):
            api = kind.replace("compatible", "chat")
            yield Agent(name="ai", api=api, command=_node(kind, *streamed), replies=add)
        smolagents = partial(_python, SMOLAGENTS, "smolagents")
        yield Agent(
            name="smolagents",
            api="chat",
            command=smolagents("tools", *streamed),
            replies=(add[0], calling("final_answer", answer="3")),
            rewrites=True,
        )
        yield Agent(
            name="smolagents",
            api="chat",
            command=smolagents("code", *streamed),
            replies=(
                saying("Thought: add.\n<code>\nprint(add(1, 2))\n</code>"),
                saying("<code>\nfinal_answer(3)\n</code>"),
            ),
            rewrites=True,
        )
    echo, submit = "echo hi", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    for kind, api in (("litellm", "chat"), ("litellm_response", "responses")):
        yield Agent(
            name="mini-swe-agent",
            api=api,
            command=_python(MINI_SWE_AGENT, "mini_swe_agent", kind),
            replies=(
                replace(calling("bash", command=echo), content="First."),
                calling("bash", command=submit),
            ),
        )
    yield Agent(
        name="mini-swe-agent",
        api="chat",
        command=_python(MINI_SWE_AGENT, "mini_swe_agent", "litellm_textbased"),
        replies=tuple(saying(f"Now.\n\n```mswea_bash_command\n{c}\n```") for c in (echo, submit)),
    )
    for name, api, command, call in (
        ("codex", "responses", _codex, calling("exec_command", cmd=echo)),
        ("opencode", "chat", _opencode, calling("bash", command=echo, description="Say hi")),
        (
            *("qwen-code", "chat", _qwen_code),
            calling("run_shell_command", command=echo, is_background=False),
        ),
        ("claude-code", "messages", _claude_code, calling("Bash", command=echo)),
    ):
        yield Agent(name=name, api=api, command=command, replies=(call, done))


# --- runs -----------------------------------------------------------------------------------------


@dataclass
class Recorder:
    """An ASGI application that notes the status of every turn that was asked for."""

    app: Any
    statuses: list[int] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.app, name)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def noted(message: Any) -> None:
            if message["type"] == "http.response.start" and scope["method"] == "POST":
                self.statuses.append(message["status"])
            await send(message)

        await self.app(scope, receive, noted)


@dataclass
class Tally:
    """What became of the runs of one agent."""

    apis: dict[str, None] = field(default_factory=dict)
    runs: int = 0
    turns: int = 0
    calls: int = 0  # turns with a result of a tool
    requests: int = 0
    wrong: list[str] = field(default_factory=list)


def claims(only: str | None = None) -> list[Claim]:
    chosen = [agent for agent in _agents() if only in (None, agent.name)]
    tallies = {agent.name: Tally() for agent in chosen}
    for agent in chosen:
        tallies[agent.name].apis[agent.api] = None
    with tempfile.TemporaryDirectory() as scratch:
        model = save_random_model(Path(scratch) / "model", context=CONTEXT)
        _run_at_gateway(model, chosen, tallies)
        _run_at_server(model, chosen, tallies)
    return [
        Claim(
            name=f"{name} ({', '.join(tally.apis)}) runs unchanged, every trained token sampled",
            target="all runs, tool turns",
            measured="; ".join(tally.wrong[:2])
            or f"{tally.runs} runs, {tally.turns} turns, {tally.calls} after tool results; "
            f"server: {tally.requests} requests",
            holds=not tally.wrong and tally.calls > 0,
        )
        for name, tally in tallies.items()
    ]


def _run_at_gateway(model: Path, agents: Sequence[Agent], tallies: dict[str, Tally]) -> None:
    tokenizer = Tokenizer.load(model)
    renderer = get_renderer(tokenizer)
    settings = EngineSettings(kv_cache_bytes=KV_CACHE_BYTES, max_running_requests=8)
    log: list[Any] = []
    with (
        pytest.MonkeyPatch.context() as patch,
        Engine(load_pretrained(model), tokenizer, settings) as engine,
    ):
        log_samples(patch, log)
        sessions = SessionManager(in_process_client(engine), renderer)
        recorder = Recorder(build_gateway(sessions))
        with live.listening(recorder) as url:
            for agent in agents:
                grammar = parse_response_format(one_of(renderer, *agent.replies))
                for seed in range(SEEDS):
                    sampling = SamplingParams(temperature=EVEN, seed=seed, grammar=grammar)
                    rules = SessionConfig(sampling_params=sampling, thinking=SILENT)
                    session = sessions.open(None, rules)
                    tally = tallies[agent.name]
                    with _checked(agent, tally, recorder):
                        _run(agent, url, session.api_key)
                        branches = session.session.trajectories(
                            task_id="t", group_id="g", outcome=Verdict(reward=0.0)
                        )
                        trained = check_replay(branches, log)
                        assert trained == len(session.session.tree.nodes) > 0, "no turns"
                        expected = trained if agent.rewrites else 1
                        assert len(branches) == expected, f"{len(branches)} branches"
                        tally.turns += trained
                        tally.calls += trained - 1
                    sessions.close(session)


def _run_at_server(model: Path, agents: Sequence[Agent], tallies: dict[str, Tally]) -> None:
    recorders: list[Recorder] = []

    def recorded(*arguments: Any, **more: Any) -> Recorder:
        recorders.append(Recorder(build_app(*arguments, **more)))
        return recorders[-1]

    build_app = live.build_app
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "build_app", recorded)
        names = ("policy", "gpt-4o-mini")
        with live.serving(
            model, engine={"kv_cache_bytes": KV_CACHE_BYTES}, served_model_aliases=names
        ) as server:
            (recorder,) = recorders
            for agent in agents:
                with _checked(agent, tallies[agent.name], recorder):
                    _run(agent, server.url, "x", must_succeed=False)
                    tallies[agent.name].requests += len(recorder.statuses)
            server.settle()


@contextmanager
def _checked(agent: Agent, tally: Tally, recorder: Recorder) -> Iterator[None]:
    """One run: what goes wrong is a fault of the agent's claim."""
    recorder.statuses.clear()
    tally.runs += 1
    try:
        yield
        refused = [status for status in recorder.statuses if status != 200]
        assert not refused, f"refused with {refused}"
        assert recorder.statuses, "no request"
    except AssertionError as error:
        tally.wrong.append(f"{agent.api}: {error}"[:300])


def _run(agent: Agent, url: str, key: str, *, must_succeed: bool = True) -> None:
    with tempfile.TemporaryDirectory() as name:
        env = {"PATH": os.environ["PATH"], "HOME": name}
        env |= {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}
        env |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key}
        command = agent.command(Path(name), env)
        done = subprocess.run(
            command,
            cwd=name,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    told = (done.stderr or done.stdout)[-200:].decode(errors="replace")
    assert not must_succeed or done.returncode == 0, f"exit code {done.returncode}: {told}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=sorted({agent.name for agent in _agents()}))
    print_claims(claims(parser.parse_args().only))


if __name__ == "__main__":
    main()
