"""schemathesis on the gateway's OpenAPI document: no request is a server error, or harms others."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from paddock.rollout.gateway import build_gateway
from paddock.rollout.rollout_queue import RolloutQueue
from paddock.rollout.session_manager import GatewaySettings, SessionManager
from tests.rollout.agents import HTTP, ChatAgent, SessionEndpoint
from tests.rollout.engines import RandomEngine, renderer
from tests.rollout.test_gateway import ADMIN_KEY, exported
from tests.serve.live import listening
from tests.serve.test_schema import CHECKED

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


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("who", ["agent", "admin"])
def test_fuzzing_leaves_the_gateway_healthy(served, mode, who):
    url, sessions = served
    for live in list(sessions):
        sessions.close(live)
    fuzzed, other = sessions.open("fuzzed"), sessions.open("other")
    agent = ChatAgent(SessionEndpoint(url, other.api_key), stream=False)
    agent.say("Hi")
    agent.turn()
    before, keys = (
        exported(url, "other"),
        {"agent": fuzzed.api_key, "admin": ADMIN_KEY},
    )
    document = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in document.get_all_operations()]
    assert len(operations) > 20
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and not operation.body.items:
            continue

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=2,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        def answered(case):
            if "session" in case.path_parameters:
                case.path_parameters["session"] = "fuzzed"
            if "name" in case.path_parameters:
                case.path_parameters["name"] = "task"
            if case.path.endswith("/next") and isinstance(case.body, dict):
                case.body.pop("wait_s", None)  # nothing will come
            headers = {"Authorization": f"Bearer {keys[who]}"}
            case.call_and_validate(checks=CHECKED, timeout=30, headers=headers)

        answered()
    assert HTTP.get(f"{url}/health").json() == {"status": "ok"}
    assert sessions.get("other") is other and exported(url, "other") == before
    agent.say("Still there?")
    agent.turn()
    (branch,) = exported(url, "other")
    assert len(branch["turns"]) == 2
    assert who == "agent" or fuzzed.session.tree.nodes == []
