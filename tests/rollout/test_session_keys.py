"""Session API keys: a key opens only its own session; an agent can end only its own rollout."""

import asyncio
from contextlib import asynccontextmanager, nullcontext
from functools import partial

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from paddock.envs import make
from paddock.journal import Ledger
from paddock.records import Failure, Verdict
from paddock.rl.live_batches import LiveBatchSource
from paddock.rollout.agents import AgentRollout, AgentSettings, run_at_url
from paddock.rollout.gateway import build_gateway
from paddock.rollout.orchestrator import Orchestrator, TaskSpec
from paddock.rollout.session_manager import GatewaySettings, SessionConfig, SessionManager
from paddock.rollout.settings import RolloutSettings, TaskSettings
from paddock.rollout.sglang_client import ServerClient, connection_pool
from paddock.rollout.task_schedule import RolloutSpec
from tests.rollout.agents import HTTP
from tests.rollout.engines import RandomEngine, renderer
from tests.rollout.test_gateway import ADMIN, ADMIN_KEY, gateway, opened
from tests.rollout.virtual_time import Engine, Learner
from tests.serve.live import listening

HELLO = [{"role": "user", "content": "Hi"}]
CHAT = {"messages": HELLO, "max_tokens": 4}
AGENT = {  # requests an agent may send in its own session
    ("GET", ""): None,
    ("GET", "/v1/models"): None,
    ("POST", "/v1/chat/completions"): CHAT,
    ("POST", "/v1/responses"): {"input": "Hi"},
    ("POST", "/v1/messages"): CHAT,
    ("POST", "/v1/messages/count_tokens"): CHAT,
}
TRAINER = {("POST", "/export"): {}, ("DELETE", ""): None}  # requests only the trainer may send


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


def status(method, url, body, headers):
    return HTTP.request(method, url, json=body, headers=headers).status_code


def test_a_session_accepts_only_its_own_key():
    with gateway(RandomEngine()) as (url, sessions):
        own, other = opened(url, "own"), opened(url, "other")
        strangers = [{}, {"Authorization": "Bearer"}, {"x-api-key": "guess"}, other.headers]
        for (method, path), body in (AGENT | TRAINER).items():
            for headers in strangers:
                assert status(method, own.url + path, body, headers) == 401, path
                assert status(method, f"{url}/sessions/absent{path}", body, headers) == 401, path
        assert sessions["own"].session.tree.nodes == []
        for (method, path), body in AGENT.items():
            for headers in (own.headers, {"x-api-key": own.key}):
                assert status(method, own.url + path, body, headers) == 200, path
        for (method, path), body in TRAINER.items():
            assert status(method, own.url + path, body, own.headers) == 401, path
            assert status(method, own.url + path, body, ADMIN) == 200, path
        assert (
            status("POST", f"{other.url}/v1/messages", CHAT, ADMIN) == 401
        )  # only the session key
        assert status("GET", other.url, None, ADMIN) == 200


def test_sessions_are_opened_and_listed_with_the_admin_key_only():
    with gateway(RandomEngine()) as (url, sessions):
        own = opened(url, "own")
        for headers in ({}, own.headers, {"x-api-key": "guess"}):
            assert status("GET", f"{url}/sessions", None, headers) == 401
            assert status("POST", f"{url}/sessions", {"id": "next"}, headers) == 401
        assert [live.session.id for live in sessions] == ["own"]
        listed = HTTP.get(f"{url}/sessions", headers=ADMIN)
        assert [each["id"] for each in listed.json()["sessions"]] == ["own"]
        assert own.key not in listed.text
        assert HTTP.get(f"{url}/health").json() == {"status": "ok"}


def test_a_key_is_invalid_once_its_session_is_closed():
    with gateway(RandomEngine()) as (url, _):
        first = opened(url, "s")
        HTTP.delete(first.url, headers=ADMIN).raise_for_status()
        second = opened(url, "s")
        assert status("GET", second.url, None, first.headers) == 401
        assert status("GET", second.url, None, second.headers) == 200


def test_a_gateway_without_an_admin_key_opens_sessions_only_in_process():
    sessions = SessionManager(RandomEngine(), renderer())
    live = sessions.open("s")
    with listening(build_gateway(sessions)) as url:
        for method, path in (("GET", ""), ("POST", ""), ("DELETE", "/s"), ("POST", "/s/export")):
            assert status(method, f"{url}/sessions{path}", {}, {"x-api-key": "None"}) == 403
        own = {"Authorization": f"Bearer {live.api_key}"}
        assert status("GET", f"{url}/sessions/s/v1/models", None, own) == 200
    with pytest.raises(ValueError, match="admin_key must not be empty"):
        build_gateway(sessions, admin_key="")


def test_a_body_is_not_read_from_a_client_without_the_key():
    with gateway(RandomEngine(), max_body_bytes=64) as (url, _):
        opened(url, "s")
        reply = HTTP.post(f"{url}/sessions/s/v1/chat/completions", content=b"{" * 100)
        assert reply.status_code == 401 and "missing or invalid API key" in reply.text


class BlockingEngine(RandomEngine):
    """Blocks every request until released."""

    def __init__(self):
        super().__init__()
        self.num_requests, self.go = 0, asyncio.Event()

    async def generate(self, request):
        self.num_requests += 1
        await self.go.wait()
        return await super().generate(request)


def test_concurrent_turns_of_a_session_are_bounded():
    async def main():
        engine = BlockingEngine()
        sessions = SessionManager(engine, renderer(), GatewaySettings(max_concurrent_turns=2))
        lives = [sessions.open("crowd"), sessions.open("other")]
        async with served(build_gateway(sessions)) as url, httpx.AsyncClient(timeout=60) as http:

            async def turn(live):
                headers = {"Authorization": f"Bearer {live.api_key}"}
                where = f"{url}/sessions/{live.session.id}/v1/chat/completions"
                return (await http.post(where, json=CHAT, headers=headers)).status_code

            held = [asyncio.ensure_future(turn(lives[i])) for i in (0, 0, 1)]
            async with asyncio.timeout(60):
                while engine.num_requests < 3:
                    await asyncio.sleep(0.01)
            crowded = await turn(lives[0])
            engine.go.set()
            return crowded, await asyncio.gather(*held), await turn(lives[0])

    assert asyncio.run(main()) == (429, [200, 200, 200], 200)


# --- in a run -------------------------------------------------------------------------------------

SPEC = RolloutSpec.derive("a", 3, 1, seed=9)


@asynccontextmanager
async def agents_by(play):
    """The rollout function of agents that a service starts and scores, and the sessions."""
    sessions, service = SessionManager(RandomEngine(), renderer()), FastAPI()

    @service.post("/start")
    async def start(rollout: dict):
        async with httpx.AsyncClient(timeout=60) as http:
            reward = await play(http, rollout)
            await http.post(
                rollout["verdict_url"],
                json={"reward": reward},
                headers={"x-api-key": rollout["verdict_key"]},
            )
        return {}

    gateway = build_gateway(sessions, admin_key=ADMIN_KEY, queues={})
    async with connection_pool() as http, served(gateway) as url, served(service) as where:
        yield (
            AgentRollout(
                taskset=make("http"),
                sessions=sessions,
                rules=SessionConfig(),
                settings=AgentSettings(url=f"{where}/start", posted_verdict=True),
                reserve_agent=lambda: nullcontext(
                    partial(run_at_url, ServerClient(f"{where}/start", http))
                ),
                base_url=url,
                http=http,
            ),
            sessions,
        )


async def honest(http, rollout):
    """Two turns; the reward is 1 for even numbers."""
    messages = list(rollout["task"]["messages"])
    headers = {"Authorization": f"Bearer {rollout['api_key']}"}
    for _ in range(2):
        body = {"messages": messages}
        reply = await http.post(
            f"{rollout['base_url']}/v1/chat/completions", json=body, headers=headers
        )
        reply.raise_for_status()
        messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "go on"}]
    return float(rollout["number"] % 2 == 0)


async def attack_other_sessions(http, rollout):
    """Every request an agent could send to other sessions, with its own key and without one."""
    url, own, number = rollout["base_url"], rollout["session"], rollout["number"]
    ids = [f"{task}-{number + n}-{m}" for task in ("a", "b") for n in range(3) for m in (0, 1)]
    others = [id for id in ids if id != own]
    for headers in ({"Authorization": f"Bearer {rollout['api_key']}"}, {}):
        tries = [("GET", "/sessions", None), ("POST", "/tasks/a/rollouts/next", {})]
        tries += [("POST", "/sessions", {"id": id}) for id in others]
        for id in others:
            tries += [
                ("POST", f"/sessions/{id}/v1/{path}", CHAT)
                for path in ("chat/completions", "tools", "end")
            ]
            tries.append(("GET", f"/sessions/{id}/v1/task", None))
        for id in ids:  # including its own
            tries += [
                ("DELETE", f"/sessions/{id}", None),
                ("POST", f"/sessions/{id}/verdict", {"reward": 1.0}),
            ]
        for method, path, body in tries:
            reply = await http.request(method, url + path, json=body, headers=headers)
            yield reply.status_code


def test_an_agent_cannot_change_other_sessions_or_its_own_reward():
    statuses = set()

    async def play(http, rollout):
        if rollout["name"] == "a":
            statuses.update([status async for status in attack_other_sessions(http, rollout)])
        return await honest(http, rollout)

    async def main():
        async with agents_by(play) as (rollout_fn, _):
            specs = {name: TaskSpec(rollout_fn, TaskSettings(group_size=2)) for name in "ab"}
            settings = RolloutSettings(groups_per_batch=2, pipeline_depth=1, max_staleness=100)
            ledger = Ledger(":memory:")
            async with LiveBatchSource(Orchestrator(specs, settings, ledger, seed=0)) as collect:
                learner = Learner(collect, Engine(), step_s=lambda: 0.0)
                await asyncio.wait_for(learner.run(2), 120)
            return learner, ledger

    learner, ledger = asyncio.run(main())
    assert statuses == {401}
    assert list(ledger.failure_counts()) == []
    rollouts = [(g, each) for b in learner.batches for g in b.groups for each in g.rollouts]
    assert len(rollouts) == 8
    for group, branches in rollouts:
        assert branches[0].outcome == Verdict(reward=float(group.number % 2 == 0))
        assert sum(turn.trained for branch in branches for turn in branch.turns) == 2


def test_a_session_that_cannot_be_opened_or_is_closed_early_is_a_failure():
    async def main(*, close):
        async def play(http, rollout):
            reward = await honest(http, rollout)
            if close:
                await http.delete(
                    f"{rollout['base_url']}/sessions/{rollout['session']}", headers=ADMIN
                )
            return reward

        async with agents_by(play) as (rollout_fn, sessions):
            rollout_fn.settings = AgentSettings(url="http://service", max_retries=0)
            if not close:
                sessions.open(SPEC.session_id)
            return (await rollout_fn(SPEC))[0]

    taken, closed = asyncio.run(main(close=False)), asyncio.run(main(close=True))
    for branch, what in ((taken, "is already open"), (closed, "closed before the rollout ended")):
        assert isinstance(branch.outcome, Failure) and branch.outcome.kind == "infrastructure"
        assert what in branch.outcome.what
        assert branch.session_id == SPEC.session_id


def test_a_service_with_a_bug_is_a_failure_and_never_a_reward():
    async def play(http, rollout):
        raise KeyError("tests")

    async def main():
        async with agents_by(play) as (rollout_fn, sessions):
            (branch,) = await rollout_fn(SPEC)
            return branch, len(sessions)

    branch, left = asyncio.run(main())
    assert branch.outcome.label == "infrastructure at agent" and left == 0


def test_cancelling_a_rollout_closes_its_session():
    async def main():
        begun = asyncio.Event()

        async def play(http, rollout):
            begun.set()
            await asyncio.sleep(1e6)

        async with agents_by(play) as (rollout_fn, sessions):
            running = asyncio.ensure_future(rollout_fn(SPEC))
            await asyncio.wait_for(begun.wait(), 60)
            running.cancel()
            await asyncio.wait({running})
            assert len(sessions) == 0

    asyncio.run(main())
