"""A grammar that takes forever to compile blocks no other request and ends with its client."""

import socket
from contextlib import closing
from urllib.parse import urlsplit

import pytest

from paddock.engine.grammar_worker import compile_workers
from tests.engine.test_grammar import EXPLODING
from tests.patience import until
from tests.serve import attacks
from tests.serve.live import serving

pytest.importorskip("xgrammar", reason="the extra 'grammar' is not installed")

# Separate limits, so that compilation workers are not shared with other tests.
LIMITS = {
    "grammar_timeout_s": 500.0,
    "grammar_memory_bytes": 1 << 32,
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}


@pytest.mark.slow
def test_a_grammar_that_explodes_blocks_no_other_request_and_ends_with_its_client(folder):
    body = {"text": "hello", "sampling_params": {"ebnf": EXPLODING.text, "max_new_tokens": 4}}
    hello = {"messages": attacks.USER, "max_tokens": 8}
    with serving(folder, engine=LIMITS) as server:
        place, (_, slow) = urlsplit(server.url), compile_workers(*LIMITS.values())
        with closing(socket.create_connection((place.hostname, place.port))) as client:
            client.sendall(attacks.post("/generate", body))
            client.settimeout(0.005)
            until(lambda: slow.waiting or _rejected(client))
            for more in ({}, {"response_format": SCHEMA}):
                assert server.post(attacks.CHAT, hello | more).status_code == 200
            assert slow.waiting or server.post("/generate", body).status_code == 400
        until(lambda: not slow.waiting)
        assert server.audit() == []


def _rejected(client: socket.socket) -> bool:
    """Whether the grammar was rejected already: its worker may run out of what it is given."""
    try:
        answer = client.recv(4096)
    except TimeoutError:
        return False
    assert answer.startswith(b"HTTP/1.1 400") and b"cannot be used" in answer, answer
    return True
