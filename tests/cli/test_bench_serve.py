"""Benchmarks of servers: counts, arrivals, latencies, failures, and vLLM's keys."""

import asyncio
import json
import math
from itertools import islice, pairwise
from statistics import fmean, stdev

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from typer.testing import CliRunner

from paddock.bench.serving import (
    LatencySummary,
    RequestFailedError,
    StreamedTokens,
    Timer,
    Workload,
    run_workload,
)
from paddock.cli.__main__ import app
from paddock.launch import UserError
from paddock.text import train_tokenizer, with_chat_template
from tests.serve.live import listening, serving
from tests.train.tiny import network_folder

# Keys of a result of `vllm bench serve --metric-percentiles 50,90,95,99` (0.32) that we have.
VLLM_KEYS = {
    *("date", "backend", "model_id", "num_prompts", "request_rate", "burstiness"),
    *("max_concurrency", "duration", "completed", "failed"),
    *("total_input_tokens", "total_output_tokens"),
    *("request_throughput", "output_throughput", "total_token_throughput"),
    *(
        f"{statistic}_{metric}_ms"
        for statistic in ("mean", "median", "std", "p50", "p90", "p95", "p99")
        for metric in ("ttft", "tpot", "itl", "e2el")
    ),
}
OUR_KEYS = {"input_len", "output_len", "prefix_len", "seed", "first_error", "peak_rss_bytes"}


def bench(*words):
    return CliRunner().invoke(app, ["bench", "serve", *(str(word) for word in words)])


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    folder = network_folder(tmp_path_factory.mktemp("bench") / "model")
    text = (f"{a} + {b} = {a + b}" for a in range(30) for b in range(30))
    with_chat_template(train_tokenizer(text, vocab=320, splitting="words"), "5").save(folder)
    with serving(folder) as server:
        yield server
        assert server.audit() == []


SMALL = ("--input-len", 12, "--output-len", 5, "--max-concurrency", "1,3", "--json")


@pytest.mark.parametrize("backend", ["openai", "sglang"])
def test_a_server_is_measured_with_exact_token_counts(live, backend, tmp_path):
    file = tmp_path / "result.json"
    words = ("--base-url", f"{live.url}/v1", "--backend", backend, "--result-file", file)
    found = bench(*words, *SMALL)
    assert found.exit_code == 0, found.output
    assert file.read_text() == found.stdout
    rows = [json.loads(line) for line in found.stdout.splitlines()]
    assert [(row["completed"], row["failed"]) for row in rows] == [(4, 0), (12, 0)]
    assert [row["total_input_tokens"] for row in rows] == [4 * 12, 12 * 12]
    assert [row["total_output_tokens"] for row in rows] == [4 * 5, 12 * 5]
    assert (rows[0]["backend"], rows[0]["model_id"]) == (backend, "tiny")
    assert rows[0].keys() == VLLM_KEYS | OUR_KEYS | {"base_url"}


@pytest.mark.parametrize("words", [("--text-prompts",), ("--backend", "openai-chat")])
def test_text_prompts_are_counted_by_the_server(live, words):
    found = bench("--base-url", live.url, *words, *SMALL[:4], "--max-concurrency", 2, "--json")
    assert found.exit_code == 0, found.output
    row = json.loads(found.stdout)
    assert row["total_output_tokens"] == 8 * 5
    assert row["total_input_tokens"] >= 8 * 12


def test_arrivals_need_no_concurrency_limit(live):
    words = ("--request-rate", 1000, "--num-prompts", 6, "--output-len", 3, "--json")
    row = json.loads(bench("--base-url", live.url, *words).stdout)
    assert (row["max_concurrency"], row["request_rate"], row["completed"]) == (None, 1000.0, 6)


def test_a_failing_server_is_an_error_that_quotes_it():
    async def models(_request):
        return JSONResponse({"data": [{"id": "broken"}]})

    async def refuse(_request):
        return JSONResponse({"error": {"message": "prompt must be a string"}}, status_code=400)

    routes = [Route("/v1/models", models), Route("/v1/completions", refuse, methods=["POST"])]
    with listening(Starlette(routes=routes)) as url:
        found = bench("--base-url", url, *SMALL)
    assert found.exit_code == 1
    assert "all 1 requests failed" in found.stderr
    assert "prompt must be a string" in found.stderr
    assert "--text-prompts" in found.stderr


def test_percentiles_are_linear_between_ranks():
    found = LatencySummary.of([n / 1000 for n in range(100, -1, -1)])
    assert found.percentiles == pytest.approx({50: 50.0, 90: 90.0, 95: 95.0, 99: 99.0})
    assert (found.mean, found.median) == pytest.approx((50.0, 50.0))
    assert LatencySummary.of([0.001, 0.003]).std == pytest.approx(1.0)
    assert LatencySummary.of([0.007]).percentiles[99] == pytest.approx(7.0)


def test_prompts_differ_except_for_their_shared_prefix():
    load = Workload(input_len=40, output_len=1, num_prompts=1, prefix_len=16, vocab=300)
    warm, timed = load.prompts("warm"), load.prompts("timed")
    found = [next(warm), next(warm), next(timed)]
    assert {len(prompt) for prompt in found} == {40}
    assert len({prompt[:16] for prompt in found}) == 1
    assert len({prompt[16:] for prompt in found}) == 3
    assert next(load.prompts("timed")) == found[2]


def gaps(**settings):
    load = Workload(input_len=1, output_len=1, num_prompts=1, **settings)
    return [after - before for before, after in pairwise(islice(load.arrivals(), 4001))]


def test_arrivals_follow_seed_rate_and_burstiness():
    poisson = gaps(request_rate=5.0)
    assert poisson == gaps(request_rate=5.0) != gaps(request_rate=5.0, seed=1)
    assert fmean(poisson) == pytest.approx(0.2, rel=0.05)
    assert stdev(poisson) == pytest.approx(0.2, rel=0.05)  # exponential: equal to the mean
    even = gaps(request_rate=5.0, burstiness=4.0)
    assert fmean(even) == pytest.approx(0.2, rel=0.05)
    assert stdev(even) == pytest.approx(0.1, rel=0.05)
    assert set(gaps()) == {0.0}


class PacedBackend:
    """Two tokens after a second, one a second later, two more after four, then usage. Every
    request but the first `failing` after the warm-up ones completes."""

    def __init__(self, failing=()):
        self.now, self.running = 0.0, 0
        self.concurrency, self.sent_at = [], []  # at each request
        self.failing = failing

    async def sleep(self, seconds):
        await asyncio.sleep(0)  # what is ready runs before time passes
        self.now += seconds

    @property
    def timer(self):
        return Timer(lambda: self.now, self.sleep)

    async def stream(self, prompt, output_len):
        self.running += 1
        self.concurrency.append(self.running)
        self.sent_at.append(self.now)
        if len(self.sent_at) in self.failing:
            self.running -= 1
            raise RequestFailedError("the server is full")
        for seconds in (1, 1, 4):
            await asyncio.sleep(0)
            self.now += seconds
            yield StreamedTokens(True)
        self.running -= 1
        yield StreamedTokens(False, len(prompt), output_len)


def run(backend, num_prompts, limit, **settings):
    load = Workload(input_len=3, output_len=5, num_prompts=num_prompts, **settings)
    return asyncio.run(run_workload(backend, load, limit, backend.timer))


def test_latencies_are_those_of_events_and_counts_those_of_usage():
    found = run(PacedBackend(), 2, 1)
    assert (found.completed, found.duration) == (2, 12.0)
    assert (found.total_input_tokens, found.total_output_tokens) == (6, 10)
    assert found.ttft.mean == 1000.0
    assert (found.itl.mean, found.itl.percentiles[50]) == (2500.0, 2500.0)
    assert found.tpot.mean == 5000.0 / 4
    assert found.e2el.mean == 6000.0
    assert found.output_throughput == pytest.approx(10 / 12)


def test_concurrency_holds_and_warmup_is_excluded():
    paced = PacedBackend()
    found = run(paced, 7, 3)
    assert (found.completed, len(paced.concurrency)) == (7, 10)
    assert paced.concurrency[:3] == paced.concurrency[3:6] == [1, 2, 3]
    assert max(paced.concurrency) == 3


def test_requests_are_sent_when_they_arrive():
    class Instant(PacedBackend):
        async def stream(self, prompt, output_len):
            self.sent_at.append(self.now)
            yield StreamedTokens(True, len(prompt), output_len)

    backend = Instant()
    found = run(backend, 5, None, request_rate=0.5, seed=3)
    load = Workload(input_len=1, output_len=1, num_prompts=5, request_rate=0.5, seed=3)
    assert backend.sent_at[1:] == pytest.approx(list(islice(load.arrivals(), 5)))
    assert found.duration == pytest.approx(backend.sent_at[-1])


def test_failures_are_counted_unless_all_fail():
    found = run(PacedBackend(failing={2, 4}), 4, 1)
    assert (found.completed, found.failed, found.total_output_tokens) == (2, 2, 10)
    assert found.first_error == "the server is full"
    assert found.to_json()["request_rate"] == "inf"
    with pytest.raises(UserError, match="all 3 requests failed; the first: the server is full"):
        run(PacedBackend(failing={2, 3, 4}), 3, 1)


def test_a_trailing_event_without_a_token_is_no_latency():
    class Trailing(PacedBackend):
        async def stream(self, prompt, output_len):
            for seconds in (1, 1, 0):
                await self.sleep(seconds)
                yield StreamedTokens(True)
            yield StreamedTokens(False, len(prompt), 2)

    found = run(Trailing(), 1, 1)
    assert (found.itl.mean, found.itl.std) == (1000.0, 0.0)
    assert math.isclose(found.tpot.mean, 1000.0)
