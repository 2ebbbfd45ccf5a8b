"""Task services over HTTP: a real service in a subprocess, killed and restarted."""

import asyncio
import socket
import subprocess
import sys
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import httpx
import pytest
import uvicorn

import paddock
from paddock.journal import Ledger
from paddock.records import Completion, Failure, Segment, Verdict
from paddock.rl.live_batches import LiveBatchSource
from paddock.rollout.client import NonStreamingClient, RequestOutput
from paddock.rollout.gateway import build_gateway
from paddock.rollout.orchestrator import Orchestrator, TaskSpec
from paddock.rollout.session_manager import SessionConfig, SessionManager
from paddock.rollout.settings import RolloutSettings, TaskSettings
from paddock.rollout.sglang_client import connection_pool
from paddock.rollout.task_schedule import RolloutSpec
from paddock.rollout.task_service import RemoteRollout, TaskServiceRegistry, build_task_service
from tests.patience import PATIENCE_S, until_async
from tests.rollout.engines import renderer, tokenizer
from tests.rollout.task_service import KEY
from tests.rollout.virtual_time import Engine, Learner


class ShortReplyEngine(NonStreamingClient):
    """Returns a few tokens and logs the session."""

    def __init__(self):
        self.log, self.version = [], lambda: 0

    async def generate(self, request):
        await asyncio.sleep(0.01)
        ids = tuple(tokenizer().encode(f"reply {len(request.token_ids)}", specials=False))
        completion = Completion(
            token_ids=ids,
            logprobs=(-0.5,) * len(ids),
            versions=(Segment(self.version(), len(ids)),),
            finish="length",
        )
        self.log.append((request.session_id, tuple(request.token_ids), ids))
        return RequestOutput(completion=completion, prompt_tokens=len(request.token_ids))


@asynccontextmanager
async def served(app):
    """Serve an application in this event loop; yields its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    server.capture_signals = nullcontext  # leave Ctrl-C to pytest
    serving = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = server.force_exit = True
        await serving


@asynccontextmanager
async def gateway_and_registry():
    """Engine, service registry, remote rollout function and gateway URL."""
    engine, registry = ShortReplyEngine(), TaskServiceRegistry()
    sessions = SessionManager(engine, renderer())
    app = build_gateway(sessions)
    registry.add_routes(app, key=KEY)
    async with connection_pool() as http, served(app) as url:
        run_remote = RemoteRollout(
            registry=registry,
            sessions=sessions,
            session_config=SessionConfig(),
            gateway=url,
            http=http,
            api_key=KEY,
        )
        yield engine, registry, run_remote, url


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start(port, url):
    command = [sys.executable, "-m", "tests.rollout.task_service", str(port), url]
    return subprocess.Popen(command, cwd=Path(paddock.__file__).parents[1])


@pytest.mark.slow
def test_a_killed_service_fails_only_its_own_task():
    async def main():
        async with gateway_and_registry() as (engine, registry, run_remote, url):
            port, local, ledger = free_port(), Engine(delay=lambda *_: 0.05), Ledger(":memory:")
            task_specs = {
                "echo": TaskSpec(
                    run_remote,
                    TaskSettings(group_size=2, max_consecutive_failed=2, attempt_timeout_s=30.0),
                ),
                "local": TaskSpec(local, TaskSettings(group_size=2)),
            }
            engine.version = lambda: local.version
            settings = RolloutSettings(
                groups_per_batch=4, pipeline_depth=1, max_staleness=2, retry_disabled_after=1
            )
            service = start(port, url)
            try:
                await until_async(lambda: registry.services_for("echo"))
                async with LiveBatchSource(
                    Orchestrator(task_specs, settings, ledger, seed=0)
                ) as collect:
                    learner = Learner(collect, local, step_s=lambda: 0.01)
                    await asyncio.wait_for(learner.run(3), PATIENCE_S)
                    learning = asyncio.ensure_future(learner.run(6))
                    await until_async(lambda: run_remote._running.total() > 0)
                    service.kill()  # in the middle of a rollout
                    await asyncio.wait_for(learning, PATIENCE_S)
                    down = collect.progress().tasks["echo"]
                    await until_async(
                        lambda: not registry.services_for("echo")
                    )  # its registration expires
                    service = start(port, url)
                    await until_async(lambda: registry.services_for("echo"))
                    for _ in range(30):
                        await asyncio.wait_for(learner.run(1), PATIENCE_S)
                        if not collect.progress().tasks["echo"].disabled_reason:
                            break
                    await asyncio.wait_for(learner.run(2), PATIENCE_S)
                    return engine, learner, ledger, down, collect.progress().tasks["echo"]
            finally:
                service.kill()
                service.wait()

    engine, learner, ledger, down, back = asyncio.run(main())
    assert [sum(g.task == "echo" for g in b.groups) for b in learner.batches[:3]] == [2, 2, 2]
    assert (
        "consecutive groups failed" in down.disabled_reason
        and "infrastructure at service" in down.disabled_reason
    )
    assert back.disabled_reason == "" and back.trained > 6
    assert sum(g.task == "echo" for g in learner.batches[-1].groups) == 2
    assert ledger.group_counts().is_consistent
    assert {kind for _, kind, _ in ledger.failure_counts()} == {"infrastructure"}
    sampled = {(session, prompt, ids) for session, prompt, ids in engine.log}
    groups = [g for b in learner.batches for g in b.groups if g.task == "echo"]
    for branches in [branches for group in groups for branches in group.rollouts]:
        if isinstance(branches[0].outcome, Failure):
            continue
        (branch,) = branches
        assert len(branch.turns) == 2
        prompt = ()
        for turn in branch.turns:
            prompt += turn.added_ids
            assert (branch.session_id, prompt, turn.completion.token_ids) in sampled
            prompt += turn.completion.token_ids


def rollout_spec():
    return RolloutSpec.derive("echo", 3, 1, seed=9)


def rollout_by(service, *, key=KEY):
    """One rollout by a service in this process, and the number of sessions left open."""

    async def main():
        async with gateway_and_registry() as (_, registry, run_remote, _), served(service) as url:
            registry.register("echo", url)
            run_remote.api_key = key
            (branch,) = await run_remote(rollout_spec())
            return branch, len(run_remote.sessions)

    return asyncio.run(main())


def test_the_verdict_of_a_service_is_the_outcome():
    async def rollout(spec, session):
        assert session.base_url.endswith("/sessions/echo-3-1")
        return Verdict(reward=spec.number / 4, note=str(spec.seed))

    branch, left = rollout_by(build_task_service({"echo": rollout}, key=KEY))
    assert branch.outcome == Verdict(reward=0.75, note=str(rollout_spec().seed))
    assert (branch.task_id, branch.group_id, branch.session_id) == ("echo/3", "echo-3", "echo-3-1")
    assert left == 0


def test_a_service_with_a_bug_is_a_failure_and_never_a_reward():
    async def rollout(spec, session):
        raise KeyError("tests")

    branch, left = rollout_by(build_task_service({"echo": rollout}, key=KEY))
    assert branch.outcome.kind == "infrastructure" and "KeyError" in branch.outcome.what
    assert left == 0


def test_a_service_without_the_task_is_named():
    branch, _ = rollout_by(build_task_service({}, key=KEY))
    assert branch.outcome.kind == "world"
    assert "task 'echo' not found" in branch.outcome.what


def test_a_wrong_key_is_rejected():
    async def rollout(spec, session):
        return Verdict(reward=1.0)

    service = build_task_service({"echo": rollout}, key=KEY)
    assert "invalid or missing key" in rollout_by(service, key="guess")[0].outcome.what
    assert rollout_by(service)[0].outcome == Verdict(reward=1.0)


def test_without_a_service_the_rollout_fails_at_once():
    async def main():
        async with gateway_and_registry() as (_, _, run_remote, _):
            return await run_remote(rollout_spec())

    (branch,) = asyncio.run(main())
    assert branch.outcome == Failure(
        kind="infrastructure", where="service", what="no service for task 'echo' is registered"
    )


def test_cancelling_a_rollout_cancels_it_at_the_service():
    async def main():
        begun, left = asyncio.Event(), asyncio.Event()

        async def rollout(spec, session):
            begun.set()
            try:
                await asyncio.sleep(1e6)
            finally:
                left.set()

        service = build_task_service({"echo": rollout}, key=KEY)
        async with gateway_and_registry() as (_, registry, run_remote, _), served(service) as url:
            registry.register("echo", url)
            doing = asyncio.ensure_future(run_remote(rollout_spec()))
            await asyncio.wait_for(begun.wait(), PATIENCE_S)
            doing.cancel()
            await asyncio.wait_for(left.wait(), PATIENCE_S)
            assert len(run_remote.sessions) == 0

    asyncio.run(main())


def test_services_register_over_http():
    async def main():
        async with gateway_and_registry() as (_, _, _, url), httpx.AsyncClient() as http:
            http.headers["Authorization"] = f"Bearer {KEY}"
            bad = await http.post(f"{url}/tasks", json={"name": "echo", "url": "echo"})
            good = await http.post(f"{url}/tasks", json={"name": "echo", "url": "http://e:1/"})
            every = await http.get(f"{url}/tasks")
            return bad.status_code, good.json(), every.json()

    bad, good, every = asyncio.run(main())
    assert bad == 400 and good == {"heartbeat_s": 1.0}
    assert every == {"tasks": {"echo": ["http://e:1"]}}
