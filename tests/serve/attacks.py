"""Malformed and hostile requests, for the test suite and for `make prove AREA=attack`."""

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

USER = [{"role": "user", "content": "Say hello."}]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TEXT, NATIVE, INNER = "/v1/completions", "/generate", "/inference/v1/generate"
LEAKS = (b"Traceback", b"site-packages", b"/project/", b".cc:", b"root:x:", b"def build_app")
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Attack:
    """Bytes that a client sends; it then reads the response or disconnects."""

    name: str
    sent: bytes
    answered: bool = True  # a response is required; otherwise the connection may just be closed
    leaves: bool = False  # the client disconnects without reading
    refused: bool = False  # it must be rejected


def http(method: str, path: str, body: bytes = b"", headers: str = "Host: 127.0.0.1") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\n{headers}\r\nContent-Length: {len(body)}\r\n"
    return head.encode("latin-1") + b"Connection: close\r\n\r\n" + body


def post(path: str, body: object) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return http("POST", path, data)


FIELDS: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    CHAT: (
        {"messages": USER, "max_tokens": 2},
        ("messages", "model", "max_tokens", "n", "stream", "stream_options", "logprobs",
         "top_logprobs", "tools", "tool_choice", "response_format", "temperature", "top_p", "top_k",
         "min_p", "stop", "stop_token_ids", "logit_bias", "seed", "rid", "priority", "user",
         "reasoning_effort", "thinking", "chat_template_kwargs", "input_ids", "routed_dp_rank"),
    ),
    TEXT: (
        {"prompt": "x", "max_tokens": 2},
        ("prompt", "model", "max_tokens", "n", "echo", "logprobs", "stream", "suffix", "seed"),
    ),
    RESPONSES: (
        {"input": "x", "max_output_tokens": 2},
        ("input", "model", "instructions", "max_output_tokens", "tools", "tool_choice", "text",
         "reasoning", "metadata", "include", "previous_response_id", "store", "conversation"),
    ),
    MESSAGES: (
        {"messages": USER, "max_tokens": 2},
        ("messages", "model", "max_tokens", "system", "tools", "tool_choice", "thinking",
         "stop_sequences", "temperature", "top_k", "metadata", "stream"),
    ),
    NATIVE: (
        {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}},
        ("text", "input_ids", "sampling_params", "rid", "return_logprob", "logprob_start_len",
         "top_logprobs_num", "token_ids_logprob", "stream", "session_id", "priority", "extra_key"),
    ),
    INNER: (
        {"token_ids": [5], "sampling_params": {"max_tokens": 2}},
        ("token_ids", "sampling_params", "request_id", "stream", "cache_salt", "priority"),
    ),
    "/tokenize": ({"prompt": "x"}, ("prompt", "messages", "tools", "model")),
    "/detokenize": ({"tokens": [5]}, ("tokens", "model", "skip_special_tokens")),
}  # fmt: skip
WRONG = (None, True, -1, 0, 10**30, 1.5, -1e308, "", "\x00\n", "\ud83d", [], [None], [[]], [-1],
         [10**30], {}, {"": None}, {"type": "x"}, [{"role": "x"}],
         [{"type": "function"}])  # fmt: skip


def wrong_types() -> Iterator[Attack]:
    """Every field of every body with a value of every other type."""
    for path, (good, names) in FIELDS.items():
        for name in names:
            for value in WRONG:
                yield Attack(f"{path} {name}={value!r:.20}", post(path, good | {name: value}))


def bodies() -> Iterator[Attack]:
    deep = b"[" * 100_000 + b"]" * 100_000
    for path in (CHAT, MESSAGES, RESPONSES, NATIVE, "/tokenize"):
        for name, body in {
            "empty": b"",
            "cut": b'{"messages": [',
            "not UTF-8": b'{"messages": "\xff\xfe"}',
            "NaN": b'{"temperature": NaN}',
            "Infinity": b'{"temperature": -Infinity}',
            "1e999": b'{"temperature": 1e999}',
            "deep": b'{"messages": ' + deep + b"}",
            "deep object": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
            "a list": b"[]",
            "null": b"null",
            "half a pair": b'{"model": "\\ud83d"}',
            "twice a key": b'{"messages": 1, "messages": 2}',
            "a long number": b'{"max_tokens": ' + b"9" * 5000 + b"}",
        }.items():
            yield Attack(f"{path} body: {name}", post(path, body))
    yield Attack("32 MB and more", post(CHAT, b" " * ((32 << 20) + 1)), answered=False)
    lying = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    lying += b"Content-Length: 999999999999\r\n\r\n"
    yield Attack("a length that lies", lying)


def sampling() -> Iterator[Attack]:
    for name, more in {
        "negative max_tokens": {"max_tokens": -1},
        "huge max_tokens": {"max_tokens": 2**62},
        "n": {"n": 10**6},
        "hot": {"temperature": 1e308},
        "top_p": {"top_p": 2},
        "penalty": {"repetition_penalty": 0},
        "many stops": {"stop": ["x"] * 10_000},
        "a long stop": {"stop": "x" * 10**6},
        "many biases": {"logit_bias": {str(i): 1 for i in range(10_000)}},
        "bias out of range": {"logit_bias": {"999999999": 1}},
        "unknown model": {"model": "gpt-9"},
        "long model": {"model": "x" * 10**6},
        "a bomb of a regex": {"response_format": {"type": "json_schema", "json_schema": {
            "schema": {"type": "string", "pattern": "((a{0,50}){0,50}){0,50}"}}}},
        "a schema that refers to itself": {"response_format": {"type": "json_schema",
            "json_schema": {"schema": {"$ref": "#"}}}},
        "a schema elsewhere": {"response_format": {"type": "json_schema",
            "json_schema": {"schema": {"$ref": "file:///etc/passwd"}}}},
        "forged rid": {"rid": "a\n00:00:00 INFO forged"},
        "long rid": {"rid": "x" * 10**6},
        "many top_logprobs": {"logprobs": True, "top_logprobs": 10**6},
    }.items():  # fmt: skip
        yield Attack(f"chat: {name}", post(CHAT, {"messages": USER, "max_tokens": 2} | more))
    long = "one two three " * 500_000  # 7 MB
    for path, body in {
        CHAT: {"messages": [{"role": "user", "content": long}]},
        TEXT: {"prompt": long},
        NATIVE: {"text": [long, long]},
        MESSAGES: {"messages": [{"role": "user", "content": long}], "max_tokens": 1},
        RESPONSES: {"input": long, "metadata": {"a": long}},
        "/tokenize": {"prompt": long},
    }.items():
        yield Attack(f"{path}: 7 MB of text", post(path, body))
    yield Attack("many messages", post(CHAT, {"messages": USER * 100_000}))
    yield Attack("many prompts", post(TEXT, {"prompt": ["x"] * 100_000}))
    yield Attack("many ids", post(NATIVE, {"input_ids": [1] * 10**6}))
    ids = {"token_ids_logprob": [1] * 10**6, "return_logprob": True}
    yield Attack("many asked ids", post(NATIVE, {"input_ids": [5]} | ids))
    for kind, text in {"regex": "(", "ebnf": "root ::= (", "json_schema": "{"}.items():
        body = {"input_ids": [5], "sampling_params": {kind: text}}
        yield Attack(f"a broken {kind}", post(NATIVE, body))


def addresses() -> Iterator[Attack]:
    chat = json.dumps({"messages": USER, "max_tokens": 1}).encode()
    for headers in (
        "Host: evil.example", "Host: 127.0.0.1.evil.example", "Host: [", "Host: ", "X-None: 1",
        "Host: 127.0.0.1\r\nOrigin: http://[", "Host: 127.0.0.1\r\nOrigin: null",
        "Host: 127.0.0.1\r\nOrigin: https://evil.example",
        "Host: 127.0.0.1\r\nSec-Fetch-Site: cross-site",
    ):  # fmt: skip
        for method, path in (
            ("POST", CHAT),
            ("POST", "/pause_generation"),
            ("GET", "/flush_cache"),
        ):
            name = f"{method} {path} with {headers!r}"
            yield Attack(name, http(method, path, chat, headers), refused=True)
    for path in ("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/v1/models/../../etc/passwd",
                 "/v1/models/%00", "/%ff%fe", "/v1/responses/%0a", "//evil.example/"):  # fmt: skip
        yield Attack(f"GET {path}", http("GET", path))
    disk = {"model_path": "/etc/passwd"}
    yield Attack("weights from /etc/passwd", post("/update_weights_from_disk", disk), refused=True)
    yield Attack("flush with no number", http("POST", "/flush_cache?timeout=x"))
    yield Attack("flush and never return", http("POST", "/flush_cache?timeout=nan"))


def bytes_on_the_wire() -> Iterator[Attack]:
    for name, sent in {
        "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
        "no such version": b"GET / HTTP/9.9\r\nHost: a\r\n\r\n",
        "two lengths": b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\n"
        b"Content-Length: 2\r\n\r\n{}",
        "length and chunks": b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "negative length": b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        "a chunk of no size": b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        "headers without end": b"GET / HTTP/1.1\r\nX: " + b"x" * (1 << 20),
        "a long address": b"GET /" + b"x" * (1 << 20) + b" HTTP/1.1\r\n\r\n",
        "many headers": b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 100_000 + b"\r\n",
        "a websocket": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\n"
        b"Connection: Upgrade\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n",
        "an odd method": b"BREW /generate HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    }.items():
        yield Attack(name, sent, answered=False, leaves=name == "a websocket")


def disconnecting() -> Iterator[Attack]:
    long = {"messages": USER, "max_tokens": 200, "ignore_eos": True}
    for name, body in {
        "a stream": long | {"stream": True},
        "a reply": long,
        "eight replies": long | {"n": 8, "stream": True},
    }.items():
        yield Attack(f"leaves {name}", post(CHAT, body), leaves=True)
    half = post(CHAT, long)[:-10]
    yield Attack("leaves half a body", half, leaves=True)


def dash_attacks() -> Iterator[Attack]:
    for path in ("/pages/../server.py", "/pages/..%2fserver.py", "/pages/%2e%2e/%2e%2e/etc/passwd",
                 "/report?run=../..", "/report?run=/etc", "/api/group?run=rl&ordinal=1e999",
                 "/api/rollouts?run=%00", "/api/curves?metric=reward&run=rl&smooth=nan",
                 "/api/curves?metric=reward&run=rl&smooth=1e308", "/openapi.json"):  # fmt: skip
        yield Attack(f"dash {path}", http("GET", path))
    for name in ("step", "before", "low"):
        for value in (-1, 2**63, 10**40):
            yield Attack(
                f"dash {name}={value}", http("GET", f"/api/rollouts?run=rl&{name}={value}")
            )
    for host in ("evil.example", "["):
        sent = http("GET", "/api/runs", headers=f"Host: {host}")
        yield Attack(f"dash Host: {host}", sent, refused=True)
    yield Attack("dash POST", http("POST", "/api/runs", b"{}"))
    yield from bytes_on_the_wire()


def serve_attacks() -> Iterator[Attack]:
    for kind in (bodies, sampling, addresses, bytes_on_the_wire, disconnecting, wrong_types):
        yield from kind()


def complaint(url: str, attack: Attack) -> str:
    """What is wrong with the server's reaction to an attack; empty if nothing."""
    place = urlsplit(url)
    address = (place.hostname or "", place.port or 0)
    received = b""
    try:
        with socket.create_connection(address, timeout=PATIENCE_S) as sock:
            sock.sendall(attack.sent)
            if attack.leaves:
                return ""
            while piece := sock.recv(1 << 20):
                received += piece
                if len(received) > 8 << 20:
                    return "more than 8 MB of answer"
    except TimeoutError:
        return f"no end within {PATIENCE_S:g} s, after {received[:80]!r}"
    except ConnectionError:
        if attack.answered and not received:
            return "the connection was cut without an answer"
    status = received[9:12]
    if attack.answered and not received:
        return "no answer"
    if status.startswith(b"5") or (attack.refused and not status.startswith(b"4")):
        return f"status {status.decode()}: {received[-200:]!r}"
    return next((f"leaks {leak!r}" for leak in LEAKS if leak in received), "")
