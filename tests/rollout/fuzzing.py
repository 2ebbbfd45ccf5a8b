"""Fuzzing of a gateway by its own OpenAPI document, and requests with keys of others."""

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from tests.rollout.agents import HTTP
from tests.serve.test_schema import CHECKED

PUBLIC = "/health"


def fuzz(url, key, mode, *, examples, session, task="task"):
    """Every operation with generated requests of this key, about one session and one task; returns
    the number of operations."""
    document = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in document.get_all_operations()]
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and not operation.body.items:
            continue

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=examples,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        def answered(case):
            if "session" in case.path_parameters:
                case.path_parameters["session"] = session
            if "name" in case.path_parameters:
                case.path_parameters["name"] = task
            body = case.body if isinstance(case.body, dict) else {}
            if type(body.get("wait_s")) in (int, float):
                body["wait_s"] = 0.0  # nothing will come
            headers = {"Authorization": f"Bearer {key}"}
            case.call_and_validate(checks=CHECKED, timeout=30, headers=headers)

        answered()
    return len(operations)


def check_that_strangers_are_refused(url, other, *, own_key, keys):
    """No key opens a route of the session `other` or of an admin. `own_key` is an agent's, which
    opens the routes without a session for its own; `keys` open nothing at all. Returns the number
    of requests."""
    count = 0
    for path, methods in HTTP.get(f"{url}/openapi.json").json()["paths"].items():
        for key in (own_key, *keys):
            if path == PUBLIC or (key == own_key and path.startswith("/v1/")):
                continue
            where = url + path.format(session=other, name="task")
            headers = {} if key is None else {"x-api-key": key}
            for method in methods:
                answer = HTTP.request(method, where, json={}, headers=headers)
                assert answer.status_code == 401, (method, path, answer.text)
                count += 1
    return count
