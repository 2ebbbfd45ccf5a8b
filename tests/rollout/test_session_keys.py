"""Session API keys: a key opens only its own session; an agent can end only its own rollout."""

import asyncio

import httpx
import pytest

from paddock.journal import Ledger
from paddock.records import Failure, Verdict
from paddock.rl.live_batches import LiveBatchSource
from paddock.rollout.gateway import build_gateway
from paddock.rollout.orchestrator import Orchestrator, TaskSpec
from paddock.rollout.session_manager import GatewaySettings, SessionManager
from paddock.rollout.settings import RolloutSettings, TaskSettings
from paddock.rollout.task_service import build_task_service
from tests.rollout.agents import HTTP
from tests.rollout.engines import RandomEngine, renderer
from tests.rollout.task_service import KEY
from tests.rollout.task_service import rollout as honest
from tests.rollout.test_gateway import ADMIN, gateway, opened
from tests.rollout.test_task_service import gateway_and_registry, rollout_by, rollout_spec, served
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


async def attack_other_sessions(http, url, spec, session):
    """Every request an agent could send to other sessions, with its own key and without one."""
    ids = [f"{task}-{spec.number + n}-{m}" for task in ("a", "b") for n in range(3) for m in (0, 1)]
    others = [id for id in ids if id != spec.session_id]
    for headers in ({"Authorization": f"Bearer {session.api_key}"}, {}):
        tries = [("GET", "/sessions", None), ("POST", "/tasks", {"name": "a", "url": url})]
        tries += [("POST", "/sessions", {"id": id}) for id in others]
        tries += [("POST", f"/sessions/{id}/v1/chat/completions", CHAT) for id in others]
        tries += [("DELETE", f"/sessions/{id}", None) for id in ids]  # including its own
        for method, path, body in tries:
            reply = await http.request(method, url + path, json=body, headers=headers)
            yield reply.status_code


def test_an_agent_cannot_change_other_sessions():
    statuses = set()

    async def main():
        async with gateway_and_registry() as (_, registry, run_remote, url):

            async def hostile(spec, session):
                async with httpx.AsyncClient(timeout=60) as http:
                    statuses.update(
                        [s async for s in attack_other_sessions(http, url, spec, session)]
                    )
                return await honest(spec, session)

            service = build_task_service({"a": hostile, "b": honest}, key=KEY)
            async with served(service) as where:
                registry.register("a", where)
                registry.register("b", where)
                registry.expires_after_s = 1e6
                task_specs = {
                    task: TaskSpec(run_remote, TaskSettings(group_size=2)) for task in ("a", "b")
                }
                settings = RolloutSettings(groups_per_batch=2, pipeline_depth=1, max_staleness=2)
                ledger = Ledger(":memory:")
                async with LiveBatchSource(
                    Orchestrator(task_specs, settings, ledger, seed=0)
                ) as collect:
                    learner = Learner(collect, Engine(), step_s=lambda: 0.0)
                    await asyncio.wait_for(learner.run(2), 120)
                return learner, ledger

    learner, ledger = asyncio.run(main())
    assert statuses == {401, 403}
    assert list(ledger.failure_counts()) == []
    branches = [
        branch for b in learner.batches for g in b.groups for each in g.rollouts for branch in each
    ]
    assert len(branches) == 8
    for branch in branches:
        assert isinstance(branch.outcome, Verdict) and len(branch.turns) == 2


def test_a_session_that_cannot_be_opened_or_is_closed_early_is_a_failure():
    async def main(close):
        async with gateway_and_registry() as (_, registry, run_remote, _):

            async def rollout(spec, session):
                run_remote.sessions.close(run_remote.sessions[spec.session_id])
                return Verdict(reward=1.0)

            async with served(build_task_service({"echo": rollout}, key=KEY)) as url:
                registry.register("echo", url)
                if not close:
                    run_remote.sessions.open(rollout_spec().session_id)
                (branch,) = await run_remote(rollout_spec())
                return branch

    taken, closed = asyncio.run(main(close=False)), asyncio.run(main(close=True))
    for branch, what in ((taken, "is already open"), (closed, "closed before the rollout ended")):
        assert isinstance(branch.outcome, Failure) and branch.outcome.kind == "infrastructure"
        assert what in branch.outcome.what
        assert branch.session_id == rollout_spec().session_id


def test_the_agent_of_a_service_gets_the_key_of_its_session():
    async def rollout(spec, session):
        assert session.api_key not in repr(session)
        headers = {"Authorization": f"Bearer {session.api_key}"}
        async with httpx.AsyncClient(timeout=60) as http:
            found = (await http.get(session.base_url, headers=headers)).json()
        return Verdict(reward=1.0, note=found["id"])

    branch, _ = rollout_by(build_task_service({"echo": rollout}, key=KEY))
    assert branch.outcome == Verdict(reward=1.0, note=rollout_spec().session_id)
