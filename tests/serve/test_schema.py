"""schemathesis on the OpenAPI document: no allowed request is a server error."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.serve.live import serving

CHECKED = [
    schemathesis.checks.not_a_server_error,
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
]
# Pausing would block the other requests; tests/serve/test_admin_routes.py tests it.
APART = ["/pause_generation"]


@pytest.fixture(scope="module")
def small(folder):
    """A server with a small context, so that replies are short."""
    with serving(folder, engine={"context_length": 96}) as server:
        yield server
        assert server.audit() == []


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_request_is_answered(small, mode):
    document = schemathesis.openapi.from_url(small.url + "/openapi.json")
    operations = [found.ok() for found in document.exclude(path=APART).get_all_operations()]
    assert len(operations) > 30
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and not operation.body.items:
            continue

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=4,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        def answered(case):
            case.call_and_validate(checks=CHECKED, timeout=30)

        answered()


def test_the_document_names_every_route(small):
    paths = small.get("/openapi.json").json()["paths"]
    assert "post" in paths["/v1/chat/completions"] and "get" in paths["/metrics"]
    schema = paths["/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "input_ids" in schema["properties"]
