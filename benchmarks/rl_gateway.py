"""Gateway under load: turns per second, latency and memory, with a mock engine.

    python -m benchmarks.rl_gateway [--sessions 32] [--turns 50] [--processes 1]

Agents run in a separate process and send OpenAI chat completions over real connections; each sends
its whole conversation every turn and appends the reply. The mock engine is a separate process that
answers `/generate` with canned tokens. So the gateway is measured: HTTP in, matching the session's
history, tokenizing the new messages, HTTP to the engine and back, parsing the reply, recording the
turn. Latency is measured by the agent, from its request to the last byte.

For comparison, quoted and not measured here (another machine and mock engine): Miles, 32 sessions
x 50 turns, 192 cores: 58 turns/s, p99 1,190 ms and 12.5 GiB in one process, 477 turns/s, 114 ms and
34.4 GiB in 16. Memory of one long session is measured in this process.
"""

import argparse
import asyncio
import multiprocessing
import os
import platform
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

from benchmarks.table import Claim, print_claims, speedup
from paddock.records import Completion, Message, Segment
from paddock.rollout.session import PRESERVED, Session
from paddock.text import SpecialToken, Tokenizer, train_tokenizer
from paddock.text.glm_renderer import GlmRenderer

ADMIN_KEY = "benchmark"
REPLY, RESULT = 60, 700  # tokens per reply; characters per tool result
TOOL = {
    "type": "function",
    "function": {
        "name": "run",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


def make_tokenizer() -> Tokenizer:
    text = Path(__file__).read_text()
    return train_tokenizer([text] * 4, vocab=2000)


def canned_reply(tokenizer: Tokenizer) -> list[int]:
    """Token ids of a reply with reasoning and a tool call."""
    specials, encode = (
        tokenizer.special_token_ids,
        lambda text: tokenizer.encode(text, specials=False),
    )
    filler = encode(" gateway engine process memory turns" * 40)[: REPLY - 12]
    return [
        *filler,
        specials[SpecialToken.THINK_CLOSE],
        *(specials[SpecialToken.TOOL_CALL_OPEN], *encode("run")),
        *(
            specials[SpecialToken.ARG_KEY_OPEN],
            *encode("command"),
            specials[SpecialToken.ARG_KEY_CLOSE],
        ),
        *(
            specials[SpecialToken.ARG_VALUE_OPEN],
            *encode("ls"),
            specials[SpecialToken.ARG_VALUE_CLOSE],
        ),
        specials[SpecialToken.TOOL_CALL_CLOSE],
        specials[SpecialToken.OBSERVATION],
    ]


# --- processes ------------------------------------------------------------------------------------


def engine_process(sock: socket.socket, reply: list[int]) -> None:
    """Mock engine: a bare ASGI application, so that it is not the bottleneck."""
    import orjson

    entries = [[-0.25, token, None] for token in reply]

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            more = (await receive()).get("more_body", False)
        meta = {
            "finish_reason": {"type": "stop", "matched": reply[-1]},
            "completion_tokens": len(reply),
            "output_token_logprobs": entries,
            "weight_version": "0",
        }
        body = orjson.dumps({"text": "", "output_ids": reply, "meta_info": meta})
        length = str(len(body)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    _serve(app, sock)


def _serve(app: Any, sock: socket.socket, lifespan: Literal["on", "off"] = "off") -> None:
    import uvicorn

    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan=lifespan, timeout_keep_alive=300
    )
    uvicorn.Server(config).run(sockets=[sock])


def gateway_process(sock: socket.socket, engine: str, files: dict[str, bytes]) -> None:
    from paddock.records import SamplingParams
    from paddock.rollout.gateway import build_gateway
    from paddock.rollout.session_manager import SessionConfig, SessionManager
    from paddock.rollout.sglang_client import ServerClient, SGLangClient, connection_pool

    sessions = SessionManager(
        SGLangClient(ServerClient(engine, connection_pool())), GlmRenderer(Tokenizer(files))
    )
    config = SessionConfig(sampling_params=SamplingParams(max_new_tokens=REPLY))
    app = build_gateway(sessions, config, admin_key=ADMIN_KEY)
    _serve(app, sock, lifespan="on")


@contextmanager
def running(target: Callable[..., None], *args: Any) -> Iterator[tuple[str, int]]:
    """A server in a separate process: its URL and process id."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(1024)
    process = multiprocessing.get_context("spawn").Process(target=target, args=(sock, *args))
    process.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}", process.pid or 0
    finally:
        process.terminate()
        process.join(10)
        sock.close()


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# --- agents ---------------------------------------------------------------------------------------


@dataclass
class Load:
    seconds: float
    latencies: list[float]
    resident: int  # bytes, of all gateways
    resident_before: int
    cpu_s: float  # of all gateways

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds

    @property
    def cpu_per_turn(self) -> float:
        """CPU seconds per turn: unlike the rate, independent of other load on the machine."""
        return self.cpu_s / len(self.latencies)

    def percentile(self, share: float) -> float:
        return sorted(self.latencies)[
            min(len(self.latencies) - 1, int(share * len(self.latencies)))
        ]


async def agent(connect: Callable[[], Any], path: str, turns: int, seed: int) -> list[float]:
    """One session over one connection; latency of each turn in seconds."""
    import orjson

    rng, latencies = Random(seed), []
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Task {seed}: tidy up."}]
    reader, writer = await connect()
    body = orjson.dumps({"id": f"s{seed}"})
    key = orjson.loads(await _post(reader, writer, "/sessions", body, ADMIN_KEY))["api_key"]
    for turn in range(turns):
        body = orjson.dumps({"model": "m", "messages": messages, "tools": [TOOL]})
        start = time.perf_counter()
        response = await _post(reader, writer, path, body, key)
        latencies.append(time.perf_counter() - start)
        message = orjson.loads(response)["choices"][0]["message"]
        messages.append({k: v for k, v in message.items() if v is not None})
        call = message["tool_calls"][0]["id"]
        text = f"turn {turn} {rng.random()} " + "file listing " * (RESULT // 13)
        messages.append({"role": "tool", "tool_call_id": call, "content": text})
    writer.close()
    return latencies


async def _post(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, body: bytes, key: str
) -> bytes:
    """A hand-written request: a client library would be slower than the gateway."""
    head = [
        f"POST {path} HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {key}",
        f"Content-Length: {len(body)}",
    ]
    writer.write("\r\n".join([*head, "", ""]).encode() + body)
    await writer.drain()
    status, length = await reader.readline(), 0
    while (line := await reader.readline()) != b"\r\n":
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    response = await reader.readexactly(length)
    if b" 200 " not in status:
        raise RuntimeError(f"{status!r} {response[:300]!r}")
    return response


async def drive(gateways: list[tuple[str, int]], sessions: int, turns: int) -> Load:
    """All agents at once, spread over the gateways."""

    def connect(url: str) -> Callable[[], Any]:
        host, port = url.removeprefix("http://").split(":")
        return lambda: asyncio.open_connection(host, int(port), limit=1 << 22)

    before = sum(resident_bytes(pid) for _, pid in gateways)
    cpu_before = sum(cpu_seconds(pid) for _, pid in gateways)
    start = time.perf_counter()
    found = await asyncio.gather(
        *(
            agent(connect(gateways[i % len(gateways)][0]), _path(i), turns, i)
            for i in range(sessions)
        )
    )
    seconds = time.perf_counter() - start
    after = sum(resident_bytes(pid) for _, pid in gateways)
    cpu_s = sum(cpu_seconds(pid) for _, pid in gateways) - cpu_before
    return Load(seconds, [each for row in found for each in row], after, before, cpu_s)


def _path(number: int) -> str:
    return f"/sessions/s{number}/v1/chat/completions"


def run_load(sessions: int, turns: int, processes: int) -> Load:
    tokenizer = make_tokenizer()
    with running(engine_process, canned_reply(tokenizer)) as (engine, _):
        gateways, contexts = [], []
        try:
            for _ in range(processes):
                context = running(gateway_process, engine, dict(tokenizer.files))
                gateways.append(context.__enter__())
                contexts.append(context)
            await_ready([engine, *(url for url, _ in gateways)])
            return asyncio.run(drive(gateways, sessions, turns))
        finally:
            for context in contexts:
                context.__exit__(None, None, None)


def await_ready(urls: list[str]) -> None:
    import httpx

    for url in urls:
        for _ in range(600):
            try:
                httpx.get(f"{url}/health", timeout=2)
                break
            except httpx.HTTPError:
                time.sleep(0.1)


# --- requests to an engine ------------------------------------------------------------------------


def request_cost(concurrency: int, count: int) -> tuple[float, float]:
    """CPU seconds per request to an engine: with our connection pool, with httpx."""
    import httpx

    from paddock.rollout.sglang_client import connection_pool

    body, headers = b'{"input_ids": [1, 2, 3]}', {"Content-Type": "application/json"}

    async def ours(url: str) -> None:
        async with connection_pool() as http:

            async def send() -> None:
                for _ in range(count):
                    async with http.request(
                        "POST", f"{url}/generate", headers=headers, body=body, patience_s=60.0
                    ) as response:
                        await response.read()

            await asyncio.gather(*(send() for _ in range(concurrency)))

    async def theirs(url: str) -> None:
        async with httpx.AsyncClient(timeout=120) as http:

            async def send() -> None:
                for _ in range(count):
                    await http.post(f"{url}/generate", content=body, headers=headers)

            await asyncio.gather(*(send() for _ in range(concurrency)))

    costs = []
    with running(engine_process, [1, 2, 3]) as (url, _):
        await_ready([url])
        for client in (ours, theirs):
            start = time.process_time()
            asyncio.run(client(url))
            costs.append((time.process_time() - start) / (concurrency * count))
    return costs[0], costs[1]


# --- memory ---------------------------------------------------------------------------------------


def long_session(tokens: int = 262_144, turns: int = 200) -> tuple[Session, int, float]:
    """A session of so many tokens, its memory in bytes, and the CPU seconds to begin its next
    turn."""
    tokenizer = make_tokenizer()
    reply = canned_reply(tokenizer) * (tokens // turns // 3 // REPLY)
    result_tokens = tokens // turns - len(reply)
    result = tokenizer.decode([Random(i).randrange(300, 1500) for i in range(result_tokens)])
    messages = [Message(role="user", content="Go.")]
    tracemalloc.start()
    session = Session("long", GlmRenderer(tokenizer))
    for turn in range(turns):
        opening = session.begin_turn(messages, thinking=PRESERVED)
        done = Completion(
            token_ids=tuple(reply),
            logprobs=(-0.25,) * len(reply),
            versions=(Segment(0, len(reply)),),
            finish="stop",
        )
        message = Message(role="assistant", content=f"reply {turn}")
        session.record(opening, done, message)
        messages += [message, Message(role="user", content=f"{turn} {result}")]
        del opening, done
    snapshot = tracemalloc.take_snapshot().filter_traces(
        [
            tracemalloc.Filter(True, "*paddock/rollout/*"),
            tracemalloc.Filter(True, "*paddock/records/*"),
        ]
    )
    size = sum(each.size for each in snapshot.statistics("filename"))
    tracemalloc.stop()
    start = time.process_time()
    session.begin_turn(messages, thinking=PRESERVED)
    return session, size, time.process_time() - start


# --- claims ---------------------------------------------------------------------------------------


def machine() -> str:
    cpu = platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores, {cpu}, load {os.getloadavg()[0]:.1f} before"


def claims(processes: int | None = None) -> list[Claim]:
    # Two cores for the engine and the agents, the others for gateways.
    count = processes or max(1, min(8, (os.cpu_count() or 2) - 2))
    found = [Claim(name="machine", measured=machine())]
    for sessions, turns, has_target in ((32, 50, True), (1000, 5, False)):
        load = run_load(sessions, turns, count)
        what = f"gateway, {count} processes, {sessions} sessions x {turns} turns"
        p50, p99 = 1e3 * load.percentile(0.5), 1e3 * load.percentile(0.99)
        found += [
            Claim(
                name=f"{what}: turns/s",
                target=">= 500",
                measured=f"{load.rate:.0f} ({1e3 * load.cpu_per_turn:.2f} ms of CPU each)",
                holds=load.rate >= 500,
            ),
            Claim(
                name=f"{what}: latency",
                target="p99 <= 50 ms" if has_target else "",
                measured=f"p50 {p50:.1f} ms, p99 {p99:.1f} ms",
                holds=p99 <= 50 if has_target else None,
            ),
            Claim(
                name=f"{what}: memory of all gateways",
                target="< 4 GiB",
                measured=f"{load.resident / 2**20:.0f} MiB, {load.resident_before / 2**20:.0f} "
                "before",
                holds=load.resident < 4 << 30,
            ),
        ]
    for concurrency in (8, 64):
        ours, theirs = (
            1e3 * cost for cost in request_cost(concurrency, max(4, 2000 // concurrency))
        )
        what = f"request to an engine, {concurrency} concurrent, against httpx"
        found.append(speedup(what, ours, theirs, min_ratio=2.0, unit="ms of CPU"))
    session, size, begin_s = long_session()
    found.append(
        Claim(
            name=f"one session of {session.num_tokens:,} tokens in {len(session.tree.nodes)} turns",
            target="<= 3 MB",
            measured=f"{size / 1e6:.2f} MB ({size / session.num_tokens:.1f} bytes/token); "
            f"{1e3 * begin_s:.1f} ms of CPU to begin the next turn",
            holds=size <= 3e6,
        )
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--processes", type=int)
    args = parser.parse_args()
    if args.sessions is None:
        print_claims(claims(args.processes))
        return
    load = run_load(args.sessions, args.turns, args.processes or 1)
    print(machine())
    p50, p99 = 1e3 * load.percentile(0.5), 1e3 * load.percentile(0.99)
    print(f"{load.rate:.0f} turns/s, p50 {p50:.1f}, p99 {p99:.1f} ms")
    print(f"{1e3 * load.cpu_per_turn:.2f} ms of CPU per turn")
    print(f"{load.resident / 2**20:.0f} MiB of memory, {load.resident_before / 2**20:.0f} before")


if __name__ == "__main__":
    main()
