"""Agents in processes of their own: trained through the gateway of a run, killed, scored."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random

import pytest
from fastapi import FastAPI, Request

from paddock import launch
from paddock.journal import Ledger
from paddock.launch.engines import open_model_folder
from paddock.launch.rollout_engines import open_engines
from paddock.launch.rollouts import _worker, task_spec
from paddock.launch.run_gateway import open_run_gateway
from paddock.records import Failure, Verdict
from paddock.rl.group_filter import GroupFilter
from paddock.rollout.task_schedule import RolloutSpec
from tests.patience import PATIENCE_S
from tests.rl.agent_script import play, post
from tests.rl.vault_env import VaultEnv
from tests.rl.vault_runs import RECIPE, events, numbers, recipe_in, settings_of
from tests.rollout.replay import check_replay, log_samples
from tests.serve.live import listening

ROOT = Path(__file__).parents[2]
SMALL = ["steps=2", "tasks.vault.group_size=2", "credit.keep_zero_variance=true"]


def run_with(folder, start, agent, *sets, text=RECIPE, callbacks=None):
    table = "\n".join(f"{key} = {json.dumps(value)}" for key, value in agent.items())
    recipe = recipe_in(folder, start, f"{text}\n[tasks.vault.agent]\n{table}\n")
    return launch.rl(recipe, out=folder / "run", overrides=[*SMALL, *sets], callbacks=callbacks)


ASKING = RECIPE.replace('env = "vault"', 'env = "vault"\nargs.asks = 1')
TAKE = {"wait_s": 30}
SPECS = [RolloutSpec.derive("vault", 0, member, seed=0) for member in range(2)]


@asynccontextmanager
async def agents_of(start, folder, agent, text=RECIPE):
    """The rollout function of the vault with this agent, over an engine of its own."""
    table = "\n".join(f"{key} = {json.dumps(value)}" for key, value in agent.items())
    settings = settings_of(recipe_in(folder, start, f"{text}\n[tasks.vault.agent]\n{table}\n"))
    model = open_model_folder(start, None)
    async with open_engines(settings, model) as sampling:
        common = _worker(settings, model, sampling.generate, sampling)
        async with open_run_gateway(settings, common, folder) as gateway:
            spec = task_spec(settings, "vault", common, GroupFilter(settings), gateway)
            yield spec.rollout_fn
            assert len(gateway.sessions) == 0


async def rollouts_by(start, folder, agent, log=None, text=RECIPE):
    with pytest.MonkeyPatch.context() as patch:
        log_samples(patch, [] if log is None else log)
        async with agents_of(start, folder, agent, text) as rollout_fn:
            return await asyncio.gather(*map(rollout_fn, SPECS))


def rollouts_of(run):
    """Every rollout in a trained group: its branches."""
    with Ledger(run / "ledger.sqlite") as ledger:
        assert ledger.group_counts().is_consistent
        groups = ledger.groups("trained")
        return [branches for g in groups for branches in ledger.rollouts(g.ordinal).values()]


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_a_process_with_a_stock_client_is_trained(start, tmp_path, client):
    run = run_with(tmp_path, start, {"command": f"python {ROOT}/examples/{client}_agent.py"})
    found = rollouts_of(run)
    assert sorted(numbers(run)) == [1, 2] and len(found) == 8
    for branches in found:
        assert isinstance(branches[0].outcome, Verdict), branches[0].outcome
        assert any(turn.trained for turn in branches[0].turns)
    assert any(len(branches[0].turns) > 1 for branches in found), "some called a tool"
    assert events(run, "gateway")[0]["url"].startswith("http://127.0.0.1:")
    secret = run / "gateway.json"
    assert secret.stat().st_mode & 0o077 == 0


# --- how an agent ends ----------------------------------------------------------------------------

SCRIPT = f"{sys.executable} {ROOT / 'tests/rl/agent_script.py'}"


@pytest.mark.parametrize(
    ("how", "label", "what"),
    [
        ("breaks", "environment at agent", "it exited with code 1: no such file"),
        ("does nothing", "environment at agent", "it ended without a turn"),
        ("too long", "policy at context", "maximum context length"),
    ],
)
def test_an_agent_that_ends_badly_is_a_failure_with_its_cause(start, tmp_path, how, label, what):
    rollouts = asyncio.run(rollouts_by(start, tmp_path, {"command": f"{SCRIPT} '{how}'"}))
    for branches in rollouts:
        outcome = branches[0].outcome
        assert isinstance(outcome, Failure) and outcome.label == label and what in outcome.what


def test_an_agent_that_is_killed_is_begun_again_in_another_session(start, tmp_path):
    agent = {"command": f"{SCRIPT} 'dies once' {tmp_path}"}
    sampled = []
    rollouts = asyncio.run(rollouts_by(start, tmp_path, agent, log=sampled))
    for branches in rollouts:
        assert isinstance(branches[0].outcome, Verdict)
        check_replay(branches, sampled)
    turns = sum(len(branch.turns) for branches in rollouts for branch in branches)
    assert len(sampled) == turns + 1, "the turn of the killed agent is in no rollout"


def test_an_agent_that_is_killed_again_and_again_is_given_up(start, tmp_path):
    sampled = []
    agent = {"command": f"{SCRIPT} dies", "max_retries": 2}
    for branches in asyncio.run(rollouts_by(start, tmp_path, agent, log=sampled)):
        assert branches[0].outcome.label == "infrastructure at agent"
        assert "it was killed by SIGKILL" in branches[0].outcome.what
    assert len(sampled) == 2 * 3


def test_a_command_that_does_not_exist_is_named(start, tmp_path):
    (branches, _) = asyncio.run(rollouts_by(start, tmp_path, {"command": "no-such-agent"}))
    assert "no-such-agent" in branches[0].outcome.what


# --- other ways to run and to score one -----------------------------------------------------------


def reward_server(seen):
    """A callback that gives half the reward for any conversation."""
    app = FastAPI()

    @app.post("/score")
    async def score(request: Request):
        seen.append(await request.json())
        return {"reward": 0.5, "parts": {"style": 1}}

    return listening(app)


def test_a_callback_scores_the_task_with_its_conversation(start, tmp_path):
    seen = []
    with reward_server(seen) as url:
        agent = {"command": f"{SCRIPT} play", "reward_url": f"{url}/score"}
        rollouts = asyncio.run(rollouts_by(start, tmp_path, agent))
    for branches, body in zip(rollouts, sorted(seen, key=lambda b: b["session"]), strict=True):
        assert branches[0].outcome == Verdict(reward=0.5, parts={"style": 1.0})
        assert body["task"]["tools"] and body["messages"][0] == body["task"]["messages"][0]
        assert body["messages"][-1]["role"] == "assistant"


def test_a_callback_that_is_down_is_never_a_reward(start, tmp_path):
    agent = {"command": f"{SCRIPT} play", "reward_url": "http://127.0.0.1:9/score"}
    for branches in asyncio.run(rollouts_by(start, tmp_path, agent)):
        assert branches[0].outcome.label == "infrastructure at reward_url"


@pytest.mark.parametrize(("how", "label"), [("talks", ""), ("play", "environment at agent")])
def test_the_user_of_an_environment_is_answered_at_a_route(start, tmp_path, how, label):
    agent = {"command": f"{SCRIPT} {how}"}
    rollouts = asyncio.run(rollouts_by(start, tmp_path, agent, text=ASKING))
    for branches in rollouts:
        outcome = branches[0].outcome
        if label:
            assert outcome.label == label and "answered at /v1/reply" in outcome.what
        else:
            assert isinstance(outcome, Verdict), outcome
            assert len(branches[0].turns) > 1


@pytest.mark.parametrize(
    ("agent", "when"),
    [
        ({"command": f"{SCRIPT} play"}, "before the agent's end"),
        ({"pull": True, "reward_timeout_s": 0.2}, "within 0.2 s of the agent's end"),
    ],
)
def test_a_verdict_that_nobody_posts_is_not_waited_for(start, tmp_path, agent, when):
    async def main():
        async with agents_of(start, tmp_path, agent | {"posted_verdict": True}) as rollout_fn:
            running = [asyncio.ensure_future(rollout_fn(spec)) for spec in SPECS]
            if "pull" in agent:
                told = json.loads((tmp_path / "gateway.json").read_text())
                await asyncio.to_thread(end_without_a_verdict, told, len(SPECS))
            return await asyncio.gather(*running)

    for branches in asyncio.run(main()):
        assert branches[0].outcome == Failure(
            kind="grader", where="verdict", what=f"none was posted {when}"
        )


def end_without_a_verdict(told, count):
    for _ in range(count):
        rollout = post(f"{told['url']}/tasks/vault/rollouts/next", told["worker_key"], TAKE)
        rollout = rollout["rollout"]
        url = f"{rollout['base_url']}/v1"
        play(url, rollout["api_key"], rollout["task"])
        post(f"{url}/end", rollout["api_key"], {})


@pytest.mark.parametrize("posted", [False, True])
def test_workers_pull_rollouts_and_one_may_be_killed(start, tmp_path, posted):
    agent = {"pull": True, "posted_verdict": posted, "idle_timeout_s": 1.5}

    async def main():
        async with agents_of(start, tmp_path, agent) as rollout_fn:
            command = [*SCRIPT.split(), "pull", str(tmp_path / "gateway.json"), "vault"]
            workers = [subprocess.Popen(command) for _ in range(2)]
            try:
                running = [asyncio.ensure_future(rollout_fn(spec)) for spec in SPECS]
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                workers[0].kill()
                return await asyncio.wait_for(asyncio.gather(*running), PATIENCE_S)
            finally:
                for worker in workers:
                    worker.kill()
                    worker.wait()

    for branches in asyncio.run(main()):
        assert isinstance(branches[0].outcome, Verdict)
        assert branches[0].outcome.note == ("by the worker" if posted else "")


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_the_worker_of_the_examples_plays_rollouts_until_the_run_is_over(start, tmp_path, client):
    async def main():
        async with agents_of(start, tmp_path, {"pull": True}) as rollout_fn:
            words = [ROOT / "examples/agent_worker.py", client, tmp_path / "gateway.json", "vault"]
            worker = subprocess.Popen([sys.executable, *map(str, words)])
            found = await asyncio.wait_for(asyncio.gather(*map(rollout_fn, SPECS)), PATIENCE_S)
        return worker, found

    worker, found = asyncio.run(main())
    assert worker.wait(PATIENCE_S) == 0
    assert all(isinstance(branches[0].outcome, Verdict) for branches in found)


def test_the_time_of_a_task_begins_when_a_worker_is_there(start, tmp_path, monkeypatch):
    resets, reset = [], VaultEnv.reset

    async def noted(env):
        resets.append(env)
        await reset(env)

    monkeypatch.setattr(VaultEnv, "reset", noted)

    async def main():
        async with agents_of(start, tmp_path, {"pull": True}) as rollout_fn:
            running = asyncio.ensure_future(rollout_fn(SPECS[0]))
            await asyncio.sleep(0.1)
            early = len(resets)
            words = [*SCRIPT.split(), "pull", str(tmp_path / "gateway.json"), "vault"]
            worker = subprocess.Popen(words)
            found = await asyncio.wait_for(running, PATIENCE_S)
        return early, worker.wait(PATIENCE_S), found

    early, code, (branch, *_) = asyncio.run(main())
    assert early == 0 and len(resets) == 1 and isinstance(branch.outcome, Verdict)
    assert code == 0, "and the worker is told that the run is over"


def test_an_agent_behind_a_url_is_started_by_a_post(start, tmp_path):
    told = []
    app = FastAPI()

    @app.post("/start")
    def play_one(rollout: dict):
        told.append(rollout)
        play(f"{rollout['base_url']}/v1", rollout["api_key"], rollout["task"])
        return {}

    with listening(app) as url:
        rollouts = asyncio.run(rollouts_by(start, tmp_path, {"url": f"{url}/start"}))
    assert [isinstance(branches[0].outcome, Verdict) for branches in rollouts] == [True, True]
    assert {each["session"] for each in told} == {spec.session_id for spec in SPECS}
    assert all("verdict_key" not in each for each in told)
    rollouts = asyncio.run(rollouts_by(start, tmp_path, {"url": f"{url}/gone"}))
    assert {branches[0].outcome.label for branches in rollouts} == {"infrastructure at agent"}


# --- killed at random moments ---------------------------------------------------------------------


def kill_children(marked, kills, stop):
    """Kill processes of agents at random moments, until `kills` were killed."""
    rng, killed = Random(0), 0
    while killed < kills and not stop.wait(rng.uniform(0.0, 0.3)):
        found = [pid for pid in children() if marked in cmdline(pid)]
        if found:
            with suppress(ProcessLookupError):
                os.kill(rng.choice(found), signal.SIGKILL)
                killed += 1
    return killed


def children():
    every = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return [int(pid) for file in every for pid in file.read_text().split()]


def cmdline(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def killed_at_random_moments(start, folder, patch, *, kills, steps):
    """A run whose agents are killed; checks it, and returns the number of its rollouts."""
    sampled, stop = [], threading.Event()
    log_samples(patch, sampled)
    agent = {"command": f"{SCRIPT} slow", "max_retries": 20}
    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill_children, "agent_script", kills, stop)
        run = run_with(folder, start, agent, f"steps={steps}")
        stop.set()
    assert killing.result() == kills
    with Ledger(run / "ledger.sqlite") as ledger:
        assert list(ledger.failure_counts()) == []
    found = rollouts_of(run)
    assert len(found) == 4 * steps
    check_replay([branch for branches in found for branch in branches], sampled)
    return len(found)


def test_killed_agents_cost_no_group_and_duplicate_nothing(start, tmp_path, monkeypatch):
    killed_at_random_moments(start, tmp_path, monkeypatch, kills=4, steps=2)
