"""SGLang client: the tokens of an in-process engine, errors, weight updates, a killed server."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest

from paddock.checkpoint import load_pretrained
from paddock.checkpoint.weight_sync import WeightUpdate, iter_released_tensors, serialize_update
from paddock.engine import Engine, EngineSettings, EngineWeightUpdater, Request
from paddock.records import Message, SamplingParams
from paddock.rollout.client import (
    EngineUnavailableError,
    InferenceRequest,
    InvalidModelResponseError,
    OverlongPromptError,
    RequestRejectedError,
)
from paddock.rollout.replica_pool import Replica, ReplicaPool, ReplicaPoolSettings
from paddock.rollout.session import PRESERVED, Session
from paddock.rollout.sglang_client import (
    HttpLogprobScorer,
    HttpWeightPublisher,
    ServerClient,
    SGLangClient,
    _error_response,
    connection_pool,
)
from paddock.text import Tokenizer, get_renderer, parse_completion
from tests.serve.live import serving
from tests.serve.memorized_model import COUNT, QUESTION, WEATHER

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=40)


@pytest.fixture(scope="module")
def live(folder):
    with serving(folder, weights=EngineWeightUpdater) as server:
        yield server
        assert server.audit() == []


def over_http(live, work):
    """Run `work(server)` with a fresh client."""

    async def run():
        async with connection_pool() as http:
            return await work(ServerClient(live.url, http, timeout_s=30))

    return asyncio.run(run())


def prompt(live, message=QUESTION):
    return live.renderer.render_prompt([message], tools=(WEATHER,), thinking=PRESERVED).token_ids


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(max_new_tokens=30, seed=7, top_k=20)])
def test_a_server_returns_what_its_engine_returns(live, sampling):
    ids = prompt(live)
    question = InferenceRequest(
        token_ids=ids, sampling_params=sampling, session_id="s\u00e9", id="q"
    )
    for _ in range(2):  # the prefix is cached from the second time on, which rounds differently
        here = live.engines[0].generate(ids, sampling)

    async def both(server):
        generate = SGLangClient(server)
        whole = await generate.generate(question)
        deltas = [delta async for delta in generate.stream(question)]
        return whole, deltas

    whole, deltas = over_http(live, both)
    assert whole.completion == here
    assert deltas[-1].output.completion == here
    assert [i for delta in deltas for i in delta.token_ids] == list(here.token_ids)
    assert all(delta.output is None for delta in deltas[:-1]) and len(deltas) > 1


def test_without_max_new_tokens_the_context_is_the_limit(live):
    ids, free = prompt(live), SamplingParams(temperature=0.0)
    question = InferenceRequest(token_ids=ids, sampling_params=free, session_id="s")
    answer = over_http(live, lambda s: SGLangClient(s, context=512).generate(question))
    assert answer.completion == live.engines[0].generate(ids, free)
    with pytest.raises(RequestRejectedError, match="context length of the server is unknown"):
        over_http(live, lambda s: SGLangClient(s).generate(question))
    with pytest.raises(OverlongPromptError, match="no room"):
        over_http(live, lambda s: SGLangClient(s, context=len(ids)).generate(question))


def test_a_rejected_request_raises_and_an_unreachable_server_is_unavailable(live):
    far_too_long = InferenceRequest(token_ids=(5,) * 600, sampling_params=GREEDY, session_id="s")
    with pytest.raises(OverlongPromptError, match="maximum context length"):
        over_http(live, lambda s: SGLangClient(s).generate(far_too_long))

    async def call_closed_port(server):
        gone = ServerClient("http://127.0.0.1:9", server.http, timeout_s=2)
        assert not await gone.check_health(1.0)
        assert await server.check_health(10.0)
        await SGLangClient(gone).generate(far_too_long)

    with pytest.raises(EngineUnavailableError, match=r"127\.0\.0\.1:9"):
        over_http(live, call_closed_port)


def test_a_duplicate_id_or_a_full_queue_is_not_an_invalid_request(live):
    """Our server answers 409 and 503; SGLang answers 400 to a duplicate id."""
    engine = live.engines[0]
    engine.pause("in_place")
    question = InferenceRequest(
        token_ids=prompt(live), sampling_params=GREEDY, session_id="s", id="twice"
    )
    name = engine.submit(Request(token_ids=(5,), id="twice"), lambda _: None)
    try:
        with pytest.raises(EngineUnavailableError, match=r"409: .*'twice' is already in use"):
            over_http(live, lambda s: SGLangClient(s).generate(question))
        most = engine.settings.max_queued_requests + engine.settings.max_running_requests
        others = [engine.submit(Request(token_ids=(5,)), lambda _: None) for _ in range(most - 1)]
        with pytest.raises(EngineUnavailableError, match=r"503: .*queued or running"):
            over_http(live, lambda s: SGLangClient(s).generate(replace(question, id="other")))
    finally:
        engine.abort(name)
        engine.abort_all()
        engine.resume()
    assert len(others) == most - 1
    live.settle()
    for status, message, kind in (
        (400, "Duplicate request ID detected: x", EngineUnavailableError),
        (
            400,
            "The input (900 tokens) is longer than the model's context length",
            OverlongPromptError,
        ),
        (413, "too large", OverlongPromptError),
        (503, "The request queue is full.", EngineUnavailableError),
        (400, "top_p: 7 is not in (0, 1]", RequestRejectedError),
    ):
        found = _error_response("u", status, json.dumps({"error": {"message": message}}).encode())
        assert type(found) is kind, message


def test_a_silent_server_times_out(live):
    live.engines[0].pause("in_place")
    question = InferenceRequest(token_ids=prompt(live), sampling_params=GREEDY, session_id="s")

    async def impatient(server):
        await SGLangClient(ServerClient(server.url, server.http, timeout_s=0.3)).generate(question)

    try:
        with pytest.raises(EngineUnavailableError, match=r"no response within 0\.3 s"):
            over_http(live, impatient)
    finally:
        live.engines[0].resume()
    live.settle()


def test_routed_experts_are_returned(folder):
    with serving(folder, engine={"capture_routing": True}) as live:
        layers = sum(kind == "moe" for kind in live.engines[0].config.mlp)
        shape = (layers, live.engines[0].config.moe.active)
        ids = prompt(live)
        here = live.engines[0].generate_output(
            Request(token_ids=ids, sampling_params=GREEDY, return_routing=True)
        )
        question = InferenceRequest(
            token_ids=ids, sampling_params=GREEDY, session_id="s", return_routing=True
        )
        found = over_http(live, lambda s: SGLangClient(s, experts=shape).generate(question))
        assert (found.routing.expert_TLK == here.routing.expert_TLK).all()
        with pytest.raises(InvalidModelResponseError, match="routed_experts"):
            over_http(live, lambda s: SGLangClient(s, experts=(9, 9)).generate(question))


def test_prompt_logprobs_are_those_of_the_engine(live):
    ids = prompt(live)
    here = live.engines[0].generate_output(
        Request(
            token_ids=ids, sampling_params=SamplingParams(max_new_tokens=1), prompt_logprobs_start=3
        )
    )
    found = over_http(live, lambda server: HttpLogprobScorer(server)(ids, 3))
    assert found == pytest.approx(here.prompt_logprobs, abs=1e-5)
    with pytest.raises(RequestRejectedError, match="start"):
        over_http(live, lambda server: HttpLogprobScorer(server)(ids, 0))


def test_a_weight_update_is_applied_completely_or_not_at_all(live, folder):
    network = load_pretrained(folder)
    parcel = serialize_update(WeightUpdate(7, dict(iter_released_tensors(network))))
    question = InferenceRequest(token_ids=prompt(live), sampling_params=GREEDY, session_id="s")

    async def publish(server):
        weights = HttpWeightPublisher({"a": server})
        assert await weights.sync_replica("a"), "there is nothing to catch up with yet"
        before = (await SGLangClient(server).generate(question)).completion
        damaged = bytearray(parcel)
        damaged[-5] ^= 1
        refused = await weights.update_weights([bytes(damaged)], 7)
        same = (await SGLangClient(server).generate(question)).completion
        assert await weights.update_weights([parcel], 7) == {}
        after = (await SGLangClient(server).generate(question)).completion
        assert await weights.sync_replica("a"), "a late joiner gets the last version"
        return before, refused, same, after

    before, refused, same, after = over_http(live, publish)
    assert "checksum" in refused["a"]
    assert same == before and before.versions[0].version == 0
    assert {segment.version for segment in after.versions} == {7}
    assert after.token_ids == before.token_ids


# --- kill -9 --------------------------------------------------------------------------------------


@contextmanager
def process(folder):
    """`paddock serve` in a subprocess; yields it and its address."""
    command = [sys.executable, "-m", "paddock.cli", "serve", str(folder), "--port", "0"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )
    try:
        for line in server.stdout:
            found = re.search(r"chat page +(http://\S+)", line)
            if found:
                url = found[1]
            if line.startswith("ready"):
                break
        yield url, server
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


@pytest.mark.slow
def test_a_session_survives_a_server_killed_in_the_middle_of_a_turn(folder):
    words = get_renderer(Tokenizer.load(folder))
    session = Session("s", words)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=200, ignore_eos=True)
    with Engine(load_pretrained(folder), words.tokenizer, EngineSettings()) as engine:
        first = session.begin_turn([COUNT], thinking=PRESERVED)
        wanted = engine.generate(first.prompt, sampling)

    async def run(servers):
        async with connection_pool() as http:
            every = [ServerClient(url, http, timeout_s=60) for url, _ in servers]
            replicas = [Replica(s.url, SGLangClient(s), s.check_health) for s in every]
            settings = ReplicaPoolSettings(
                health_check_timeout_s=2.0, health_failure_threshold=3
            )  # for a busy machine
            async with ReplicaPool(replicas, settings) as fleet:
                victim = fleet.router.route("s")
                question = InferenceRequest(
                    token_ids=first.prompt, sampling_params=sampling, session_id="s"
                )
                ids, answer = [], None
                async for delta in fleet.stream(question):
                    if not ids:
                        for url, server in servers:
                            if url == victim:
                                os.kill(server.pid, signal.SIGKILL)
                    ids += delta.token_ids
                    answer = delta.output
                assert victim not in fleet.live_replicas and len(fleet.live_replicas) == 1
                reply = parse_completion(
                    words.tokenizer, ids, finish="length", prompt=first.prompt
                ).message
                session.record(first, answer.completion, reply)
                again = Message(role="user", content="Count.")
                second = session.begin_turn([COUNT, reply, again], thinking=PRESERVED)
                after = await fleet.generate(
                    InferenceRequest(
                        token_ids=second.prompt, sampling_params=GREEDY, session_id="s"
                    )
                )
                return ids, answer, second, after

    with process(folder) as one, process(folder) as other:
        ids, answer, second, after = asyncio.run(run([one, other]))
    assert tuple(ids) == answer.completion.token_ids == wanted.token_ids
    assert answer.completion.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
    past = [*first.prompt, *ids]
    assert second.prompt.tolist()[: len(past)] == past
    assert after.completion.token_ids


def test_a_weight_update_does_not_wait_for_a_silent_server():
    """It accepts the connection and never answers, like a stopped process."""

    async def run():
        connected, is_alive = asyncio.Event(), True

        async def silent(_reader, _writer):
            connected.set()
            await asyncio.sleep(3600)

        async def well(_patience_s):
            return is_alive

        far = await asyncio.start_server(silent, "127.0.0.1", 0)
        host, port = far.sockets[0].getsockname()
        quick = ReplicaPoolSettings(health_check_interval_s=0.01, health_check_timeout_s=0.05)
        async with connection_pool() as http, asyncio.timeout(60):
            server = ServerClient(f"http://{host}:{port}", http)
            weights = HttpWeightPublisher({"far": server})
            async with ReplicaPool([Replica("far", SGLangClient(server), well)], quick) as fleet:
                weights.await_replica = fleet.while_alive
                publishing = asyncio.create_task(weights.update_weights([b"parcel"], 3))
                await connected.wait()
                is_alive = False
                assert "was removed" in (await publishing)["far"]
        far.close()

    asyncio.run(run())
