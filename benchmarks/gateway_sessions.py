"""A thousand agents at `paddock gateway`: turns per second, latency, memory of an idle session.

    python -m benchmarks.gateway_sessions [--sessions 100] [--seconds 25] [--rounds 2]

The agents are a process of their own and behave as agents do: numbers of turns, times of tool
calls and stalls, and lengths of tool results have heavy tails; when a session ends, its slot opens
another. The gateway is the command with a real engine (the small model of tests/rl/vault_env.py).

Every round is followed by the same load on a bare server: one route of the same HTTP stack over
the same engine, without sessions. It gets token ids, as many as the gateway's prompts had, at the
same moments after the turn before, and samples as many as the gateway did.
"""

import argparse
import asyncio
import multiprocessing
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from benchmarks.attack_requests import running as running_command
from benchmarks.rl_gateway import await_ready, cpu_seconds, machine, resident_bytes, running
from benchmarks.table import Claim, print_claims
from paddock.http import ConnectionPool
from tests.rl.vault_env import LOOK, pretrained_on_vault

ADMIN_KEY = "benchmark"
CONTEXT, RUNNING = 4096, 64  # tokens of the model; requests that the engine runs at once
CACHE = "64MB"
MAX_TURNS, MAX_PAUSE_S = 60, 20.0
RAMP_S = 5.0  # in which all agents have begun; not measured
OVERHEAD_MS, AT_SESSIONS = 5.0, 100  # at most, at the median turn
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": LOOK.name,
            "description": LOOK.description,
            "parameters": LOOK.parameters,
        },
    }
]


# --- what agents do -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    pause_s: float  # before the request: the agent's tool runs, or it stalls
    question: str  # that the agent adds, unless the last reply called a tool
    result: str  # of its tool
    max_tokens: int


def plan_session(slot: int, number: int, mean_pause_s: float) -> list[PlannedTurn]:
    """The turns of the session that a slot opens as its `number`-th."""
    rng = Random(f"{slot} {number}")
    turns = min(MAX_TURNS, int(4 * rng.paretovariate(1.2)))
    return [_planned_turn(rng, mean_pause_s) for _ in range(turns)]


def _planned_turn(rng: Random, mean_pause_s: float) -> PlannedTurn:
    usual = mean_pause_s * 0.55 * rng.lognormvariate(0.0, 1.0)  # a mean of 0.9 mean_pause_s
    stalls = rng.random() < 0.02
    pause = 5 * mean_pause_s * rng.paretovariate(1.5) if stalls else usual
    lines = min(150, int(6 * rng.paretovariate(1.1)))
    text = " ".join(["is open"] * lines)
    return PlannedTurn(
        pause_s=min(MAX_PAUSE_S, pause),
        question=f"Vault {rng.randrange(10)} .",
        result=text,
        max_tokens=rng.randint(16, 48),
    )


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Of one turn at the gateway; the bare server is asked for the same."""

    prompt: int
    completion: int


Trace = dict[tuple[int, int], list[TokenCounts]]  # by slot and number of its session


@dataclass(slots=True)
class Measured:
    """What the agents saw."""

    latencies: list[float] = field(default_factory=list)  # of turns begun after the ramp
    refused: Counter[int] = field(default_factory=Counter)  # with Retry-After, and sent again
    failed: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    called: int = 0  # turns that ended with tool calls
    trace: Trace = field(default_factory=dict)

    def percentile_ms(self, share: float) -> float:
        ordered = sorted(self.latencies)
        return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Agents:
    """All agents of one round; each slot has one session at a time until `seconds` have passed.
    Its last session is left open."""

    def __init__(self, url: str, pause_s: float, seconds: float) -> None:
        self.url, self.pause_s, self.seconds = url, pause_s, seconds
        self.found, self.began = Measured(), time.monotonic()
        self.http = ConnectionPool(idle=4096)

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self.began > RAMP_S + self.seconds

    async def run(self, slots: int, play: Callable[[int, int], Any]) -> Measured:
        async def one_slot(slot: int) -> None:
            await asyncio.sleep(RAMP_S * slot / slots)
            number = 0
            while not self.is_over:
                await play(slot, number)
                number += 1

        async with self.http:
            await asyncio.gather(*map(one_slot, range(slots)))
        return self.found

    async def post(self, path: str, key: str, body: Any, *, is_turn: bool = True) -> Any:
        """The response; refused requests are sent again after the time that was told."""
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        sent, start = orjson.dumps(body), time.monotonic()
        while True:
            try:
                async with self.http.request(
                    "POST", self.url + path, headers=headers, body=sent, timeout_s=120
                ) as response:
                    data = await response.read()
            except (OSError, EOFError) as error:
                self.found.failed[f"{type(error).__name__} {error}"] += 1
                return None
            if response.status == 200:
                break
            wait_s = response.headers.get("retry-after")
            if response.status not in (429, 503) or wait_s is None:
                self.found.failed[f"{response.status} {data[:200]!r}"] += 1
                return None
            self.found.refused[response.status] += 1
            await asyncio.sleep(float(wait_s))
        if is_turn:
            self.found.turns += 1
            if start - self.began > RAMP_S:
                self.found.latencies.append(time.monotonic() - start)
        return orjson.loads(data)

    # --- at the gateway ---------------------------------------------------------------------------

    async def play_session(self, slot: int, number: int) -> None:
        name = f"{slot}-{number}"
        made = await self.post("/sessions", ADMIN_KEY, {"id": name}, is_turn=False)
        if made is None:
            return
        messages: list[dict[str, Any]] = []
        counts = self.found.trace[slot, number] = []
        for turn in plan_session(slot, number, self.pause_s):
            await asyncio.sleep(turn.pause_s)
            if self.is_over:
                return
            calls = messages[-1].get("tool_calls", ()) if messages else ()
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": turn.result}
                for call in calls
            ] or [{"role": "user", "content": turn.question}]
            body = {"messages": messages, "tools": TOOLS, "max_tokens": turn.max_tokens}
            reply = await self.post("/v1/chat/completions", made["api_key"], body)
            if reply is None or reply["usage"]["total_tokens"] > CONTEXT - 1500:
                break
            usage = reply["usage"]
            counts.append(TokenCounts(usage["prompt_tokens"], usage["completion_tokens"]))
            said = reply["choices"][0]["message"]
            self.found.called += bool(said.get("tool_calls"))
            messages.append({key: value for key, value in said.items() if value is not None})
        headers = {"x-api-key": ADMIN_KEY}
        async with self.http.request(
            "DELETE", f"{self.url}/sessions/{name}", headers=headers, timeout_s=120
        ) as response:
            await response.read()

    # --- at the bare server -----------------------------------------------------------------------

    def replay(self, trace: Trace) -> Callable[[int, int], Any]:
        async def play(slot: int, number: int) -> None:
            if (slot, number) not in trace:
                await asyncio.sleep(1.0)  # the gateway's agent had not begun it either
                return
            rng, ids = Random(f"{slot} {number} ids"), list[int]()
            plan = plan_session(slot, number, self.pause_s)
            for turn, counts in zip(plan, trace[slot, number], strict=False):
                await asyncio.sleep(turn.pause_s)
                if self.is_over:
                    return
                if not ids:  # tools and instructions, which all sessions have
                    ids = [5 + i % 90 for i in range(max(1, counts.prompt - 8))]
                ids = ids[: counts.prompt]
                ids += [rng.randrange(5, 95) for _ in range(counts.prompt - len(ids))]
                body = {"input_ids": ids, "max_new_tokens": counts.completion}
                reply = await self.post("/generate", ADMIN_KEY, body)
                if reply is None:
                    return
                ids += reply["output_ids"]

        return play


def agents_process(
    url: str, slots: int, pause_s: float, seconds: float, trace: Trace | None
) -> Any:
    """Run in a process of its own; without a trace at the gateway."""

    async def play() -> Measured:
        agents = Agents(url, pause_s, seconds)
        played = agents.play_session if trace is None else agents.replay(trace)
        return await agents.run(slots, played)

    return asyncio.run(play())


# --- servers --------------------------------------------------------------------------------------


def bare_process(sock: socket.socket, folder: str) -> None:
    """One route over an engine, in the stack that the gateway uses."""
    import uvicorn
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

    from paddock.http import uvicorn_config
    from paddock.launch.engines import in_process_client
    from paddock.launch.serve import ServeOptions, open_engines
    from paddock.records import SamplingParams
    from paddock.rollout import InferenceRequest

    options = ServeOptions(port=0, max_running_requests=RUNNING, kv_cache_memory=CACHE)
    with open_engines(Path(folder), options) as loaded:
        client, app = in_process_client(loaded.engines[0]), FastAPI()

        @app.get("/health")
        def health() -> dict[str, str]:
            return {"status": "ok"}

        @app.post("/generate")
        async def generate(http: Request) -> Response:
            body = orjson.loads(await http.body())
            sampling = SamplingParams(max_new_tokens=body["max_new_tokens"], ignore_eos=True)
            request = InferenceRequest(
                token_ids=body["input_ids"], sampling_params=sampling, session_id=""
            )
            output = await client.generate(request)
            reply = {"output_ids": output.completion.token_ids}
            return Response(orjson.dumps(reply), media_type="application/json")

        uvicorn.Server(uvicorn_config(app)).run(sockets=[sock])


@contextmanager
def gateway(folder: Path, cache: str) -> Iterator[tuple[str, int]]:
    """The command with a KV cache of this size: its URL and process id."""
    options = ("--max-running-requests", str(RUNNING), "--kv-cache-memory", cache)
    command = ("gateway", str(folder), "--admin-key", ADMIN_KEY, *options)
    with running_command(*command, log=folder.parent / "log") as (url, process):
        yield url, process.pid


@contextmanager
def bare_server(folder: Path) -> Iterator[tuple[str, int]]:
    with running(bare_process, str(folder)) as (url, pid):
        await_ready([url])
        yield url, pid


# --- claims ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    found: Measured
    cpu_ms: float  # of the server, per turn
    seconds: float
    resident: int  # bytes after the round

    def __str__(self) -> str:
        p50, p99 = self.found.percentile_ms(0.5), self.found.percentile_ms(0.99)
        rate = len(self.found.latencies) / self.seconds
        return f"{rate:.0f} turns/s, p50 {p50:.1f}, p99 {p99:.1f} ms, {self.cpu_ms:.1f} ms of CPU"


def measure(
    name: str, server: tuple[str, int], slots: int, pause_s: float, seconds: float,
    trace: Trace | None = None,
) -> Arm:  # fmt: skip
    """One round of agents at one server."""
    url, pid = server
    before = cpu_seconds(pid)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        found = pool.submit(agents_process, url, slots, pause_s, seconds, trace).result()
    cpu_ms = 1e3 * (cpu_seconds(pid) - before) / max(1, found.turns)
    return Arm(name, found, cpu_ms, seconds, resident_bytes(pid))


def close_all(url: str) -> tuple[int, int]:
    """Close the sessions that were left open: how many there were, and their tokens."""
    import httpx

    with httpx.Client(base_url=url, headers={"x-api-key": ADMIN_KEY}, timeout=60) as admin:
        found = admin.get("/sessions").json()["sessions"]
        for each in found:
            admin.delete(f"/sessions/{each['id']}").raise_for_status()
    return len(found), sum(each["tokens"] for each in found)


def against_bare(slots: int, pause_s: float, seconds: float, rounds: int) -> list[Claim]:
    """Gateway and bare server in turn, `rounds` times each after a warm-up."""
    arms: list[Arm] = []
    with TemporaryDirectory() as scratch:
        folder = pretrained_on_vault(
            Path(scratch) / "model", steps=80, full=1.0, vaults=2, context=CONTEXT
        )
        with gateway(folder, CACHE) as ours, bare_server(folder) as bare:
            measure("warm-up", ours, min(slots, 100), pause_s / 4, 5.0)
            close_all(ours[0])
            for _ in range(rounds):
                arms.append(measure("gateway", ours, slots, pause_s, seconds))
                close_all(ours[0])
                trace = arms[-1].found.trace
                arms.append(measure("bare server", bare, slots, pause_s, seconds, trace))
    what = f"{slots} sessions"
    found = [Claim(name=f"{what}: what agents do", measured=describe(arms[0].found))]
    found += [Claim(name=f"{what}, {arm.name}", measured=str(arm)) for arm in arms]
    added = _median(
        one.found.percentile_ms(0.5) - other.found.percentile_ms(0.5)
        for one, other in zip(arms[::2], arms[1::2], strict=True)
    )
    target = slots == AT_SESSIONS
    found.append(
        Claim(
            name=f"{what}: the gateway adds to the median turn",
            target=f"<= {OVERHEAD_MS:g} ms" if target else "",
            measured=f"{added:.1f} ms",
            holds=added <= OVERHEAD_MS if target else None,
        )
    )
    failed = sum((arm.found.failed for arm in arms), Counter[str]())
    refused = sum((arm.found.refused for arm in arms), Counter[int]())
    found.append(
        Claim(
            name=f"{what}: turns that failed; told to wait",
            target="none failed",
            measured=f"{failed.total()} {failed.most_common(1) or ''}; {refused.total()}",
            holds=not failed,
        )
    )
    return found


def describe(found: Measured) -> str:
    sessions = found.trace.values()
    counts = [turn for session in sessions for turn in session]
    prompt = sum(turn.prompt for turn in counts) / len(counts)
    reply = sum(turn.completion for turn in counts) / len(counts)
    turns = sorted(map(len, sessions))
    return (
        f"{found.turns:,} turns, {found.called / found.turns:.0%} of them tool calls; sessions of"
        f" {turns[len(turns) // 2]} turns (median) to {turns[-1]}; {prompt:.0f} tokens in a prompt,"
        f" to {max(turn.prompt for turn in counts)}, {reply:.0f} in a reply"
    )


def idle_memory(sessions: int, turns: int) -> Claim:
    """What the gateway's process grows by for a session that waits."""

    async def fill(url: str, first: int, count: int) -> None:
        agents = Agents(url, pause_s=0.0, seconds=1e9)
        limit = asyncio.Semaphore(32)

        async def converse(number: int) -> None:
            async with limit:
                made = await agents.post("/sessions", ADMIN_KEY, {}, is_turn=False)
                messages: list[dict[str, Any]] = []
                for turn in range(turns):
                    text = f"{number} {turn} " + "the vault is open . " * 20
                    messages.append({"role": "user", "content": text})
                    body = {"messages": messages, "tools": TOOLS, "max_tokens": 16}
                    reply = await agents.post("/v1/chat/completions", made["api_key"], body)
                    said = reply["choices"][0]["message"]
                    messages.append({k: v for k, v in said.items() if v is not None})

        async with agents.http:
            await asyncio.gather(*(converse(first + i) for i in range(count)))
        assert not agents.found.failed, agents.found.failed

    with TemporaryDirectory() as scratch:
        folder = pretrained_on_vault(
            Path(scratch) / "model", steps=80, full=1.0, vaults=2, context=CONTEXT
        )
        # A small KV cache, which the first sessions fill: its pages are not memory of a session.
        with gateway(folder, "4MB") as (url, pid):
            asyncio.run(fill(url, 0, 200))
            close_all(url)
            before = resident_bytes(pid)
            asyncio.run(fill(url, 200, sessions))
            growth = resident_bytes(pid) - before
            count, tokens = close_all(url)
    return Claim(
        name=f"{count:,} idle sessions of {turns} turns: memory of each",
        measured=f"{growth / count / 1024:.1f} KiB, for {tokens / count:.0f} tokens",
    )


def _median(values: Any) -> float:
    ordered: Sequence[float] = sorted(values)
    return ordered[len(ordered) // 2]


def claims() -> list[Claim]:
    return [
        Claim(name="machine", measured=machine()),
        *against_bare(AT_SESSIONS, 2.0, seconds=20.0, rounds=3),
        *against_bare(1000, 8.0, seconds=40.0, rounds=1),
        idle_memory(1000, turns=5),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sessions", type=int)
    parser.add_argument("--pause", type=float, default=2.0, help="mean seconds between turns")
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--idle", action="store_true", help="only their memory while they wait")
    options = parser.parse_args()
    if options.sessions is None:
        print_claims(claims())
        return
    if options.idle:
        print_claims([idle_memory(options.sessions, turns=5)])
        return
    found = against_bare(options.sessions, options.pause, options.seconds, options.rounds)
    print_claims(found)


if __name__ == "__main__":
    main()
