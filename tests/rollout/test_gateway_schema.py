"""schemathesis on the gateway's OpenAPI document: no request is a server error, or harms others."""

import pytest
from schemathesis import GenerationMode

from paddock.rollout.gateway import build_gateway
from paddock.rollout.rollout_queue import RolloutQueue
from paddock.rollout.session_manager import GatewaySettings, SessionManager
from tests.rollout.agents import HTTP, ChatAgent, SessionEndpoint
from tests.rollout.engines import RandomEngine, renderer
from tests.rollout.fuzzing import check_that_strangers_are_refused, fuzz
from tests.rollout.test_gateway import ADMIN_KEY, exported
from tests.serve.live import listening

WORKER_KEY = "worker-side"


@pytest.fixture(scope="module")
def served():
    """A gateway with the routes of a run, and a session that is none of the fuzzer's business."""
    limits = GatewaySettings(context_length=4096, max_sessions=64, max_body_bytes=1 << 16)
    sessions = SessionManager(RandomEngine(), renderer(), limits)
    queues = {"task": RolloutQueue(1.0)}
    app = build_gateway(sessions, admin_key=ADMIN_KEY, worker_key=WORKER_KEY, queues=queues)
    with listening(app) as url:
        yield url, sessions


@pytest.fixture
def pair(served):
    """Two new sessions, alone at the gateway."""
    _, sessions = served
    for live in list(sessions):
        sessions.close(live)
    return sessions.open("fuzzed"), sessions.open("other")


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("who", ["agent", "admin"])
def test_fuzzing_leaves_the_gateway_healthy(served, pair, mode, who):
    url, sessions = served
    fuzzed, other = pair
    agent = ChatAgent(SessionEndpoint(url, other.api_key), stream=False)
    agent.say("Hi")
    agent.turn()
    before = exported(url, "other")
    key = {"agent": fuzzed.api_key, "admin": ADMIN_KEY}[who]
    assert fuzz(url, key, mode, examples=2, session="fuzzed") > 20
    assert HTTP.get(f"{url}/health").json() == {"status": "ok"}
    assert sessions.get("other") is other and exported(url, "other") == before
    agent.say("Still there?")
    agent.turn()
    (branch,) = exported(url, "other")
    assert len(branch["turns"]) == 2
    assert who == "agent" or fuzzed.session.tree.nodes == []


def test_no_key_of_one_session_opens_any_route_of_another(served, pair):
    url, sessions = served
    own, other = pair
    before = (exported(url, "other"), other.used_at, other.outcome)
    keys = (None, "", "guess", own.verdict_key)
    asked = check_that_strangers_are_refused(url, "other", own_key=own.api_key, keys=keys)
    assert asked > 100
    assert (exported(url, "other"), other.used_at, other.outcome) == before
    assert len(sessions) == 2 and not own.session.tree.nodes and not other.session.tree.nodes
