"""Hostile structured-output requests, while other clients send plain and structured requests.

python -m benchmarks.attack_grammars
"""

import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx

from benchmarks.table import Claim, print_claims

HOSTILE_TIMEOUT_S = 60.0  # for the response to a hostile request, rejected or not
OTHERS_TIMEOUT_S = 30.0  # for the requests of other clients


def _levels(item: str, levels: int) -> str:
    names = [f"r{i}" for i in range(levels)]
    rows = zip(["root", *names], [*names, item], strict=True)
    return "\n".join(f"{rule} ::= {' '.join([each] * 8)}" for rule, each in rows)


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


LOOP = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
HOSTILE: tuple[tuple[str, Any], ...] = (
    ("ebnf", _levels("[a-z]?", 7)),
    ("ebnf", _levels('("a" | "b")*', 5)),
    ("ebnf", 'root ::= a{1,1000000}\na ::= "x"'),
    ("ebnf", "root ::= a a\na ::= b{1,1000} b{1,1000}\nb ::= c{1,1000}\nc ::= [a-z]{1,1000}"),
    ("ebnf", f'root ::= {"(" * 20000}"a"{")" * 20000}'),
    ("ebnf", 'root ::= root root | "a" | ""'),
    ("ebnf", "root ::= root"),
    ("ebnf", "\n".join(f'r{i} ::= "a" | r{i + 1}' for i in range(20000))),
    ("ebnf", 'root ::= "\\ud800"'),
    ("regex", "(a{1,1000}){1,1000}"),
    ("regex", "(((a|b)*a){1,50}){1,50}"),
    ("regex", "(a|aa|aaa|.*.*.*.*){1,300}"),
    ("regex", "(" * 5000 + "a" + ")" * 5000),
    ("regex", "(.*a){200}"),
    ("regex", "(a?){5000}a{5000}"),
    ("regex", "[a-z]{1,1000000}"),
    ("regex", "((a*)*)*b"),
    ("json_schema", {"type": "string", "minLength": 1_000_000}),
    ("json_schema", {"enum": [f"x{i}" for i in range(60_000)]}),
    ("json_schema", {"properties": {f"p{i}": {"type": "string"} for i in range(5000)}}),
    ("json_schema", _nested(90)),
    ("json_schema", {"type": "array", "minItems": 100_000, "items": {"type": "integer"}}),
    ("json_schema", {"$ref": "#"}),
    ("json_schema", {"$ref": "#/$defs/a", "$defs": LOOP}),
    ("json_schema", {"type": "string", "pattern": "(a+)+(b+)+(c{1,1000}){1,1000}$"}),
    ("json_schema", {"type": "string", "pattern": "(" * 300}),
    ("json_schema", {"const": "\ud800"}),
    ("json_schema", {"const": "x" * 2_000_000}),
    ("json_schema", {"anyOf": [{"type": "object", "properties": LOOP}] * 2000}),
)


def claims() -> list[Claim]:
    from tests.serve.live import serving
    from tests.serve.random_model import save_random_model

    with (
        tempfile.TemporaryDirectory() as folder,
        serving(save_random_model(Path(folder) / "model")) as server,
    ):
        done = Event()
        with ThreadPoolExecutor(8) as pool:
            others = [pool.submit(_others, server.url, done, i) for i in range(2)]
            try:
                found = list(pool.map(lambda each: _attack(server.url, *each), HOSTILE))
            finally:
                done.set()
            slowest = max(each.result() for each in others)
        leaked = server.audit()
    late = [
        f"{HOSTILE[i][0]} {i}: {s:.1f} s" for i, (_, s) in enumerate(found) if s > HOSTILE_TIMEOUT_S
    ]
    faults = [f"{HOSTILE[i][0]} {i}: {code}" for i, (code, _) in enumerate(found) if code == 0]
    return [
        Claim(
            name=f"{len(HOSTILE)} hostile grammars are served or rejected",
            target=f"within {HOSTILE_TIMEOUT_S:g} s",
            measured=", ".join(late + faults) or f"slowest {max(s for _, s in found):.1f} s",
            holds=not late and not faults,
        ),
        Claim(
            name="concurrent chats of other clients",
            target=f"within {OTHERS_TIMEOUT_S:g} s",
            measured=f"slowest {slowest:.1f} s",
            holds=slowest <= OTHERS_TIMEOUT_S,
        ),
        Claim(name="leaked resources", target="none", measured=str(leaked), holds=not leaked),
    ]


def _attack(url: str, kind: str, value: Any) -> tuple[int, float]:
    """HTTP status (0: no response) and seconds."""
    params = {"max_new_tokens": 40, kind: value}
    body = json.dumps({"text": "hello", "sampling_params": params})
    started = time.monotonic()
    try:
        status = httpx.post(
            f"{url}/generate", content=body, timeout=4 * HOSTILE_TIMEOUT_S
        ).status_code
    except httpx.HTTPError:
        status = 0
    return status, time.monotonic() - started


def _others(url: str, done: Event, which: int) -> float:
    """The slowest chat of one client until the attack is over."""
    slowest, count = 0.0, 0
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
    while not done.is_set():
        count += 1
        if which:  # a new schema every time: not in the grammar cache
            schema = {"type": "integer", "minimum": count}
            response_format = {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": schema},
            }
            body |= {"response_format": response_format}
        started = time.monotonic()
        response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=4 * OTHERS_TIMEOUT_S)
        response.raise_for_status()
        slowest = max(slowest, time.monotonic() - started)
    return slowest


if __name__ == "__main__":
    print_claims(claims())
