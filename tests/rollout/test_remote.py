"""Servers over HTTP: the same tokens as in this process, and a kill -9 in the middle of a turn."""

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
from paddock.rollout.client import Ask, AskRefused, BadReply, ContextFull, EngineLost
from paddock.rollout.fleet import Fleet, FleetSettings, Replica
from paddock.rollout.remote import HttpGenerate, HttpScore, HttpWeights, Server, _complaint, pool
from paddock.rollout.session import PRESERVED, Session
from paddock.text import Tokenizer, get_renderer, parse_completion
from tests.serve.live import serving
from tests.serve.school import ASK, COUNT, WEATHER

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=40)


@pytest.fixture(scope="module")
def live(folder):
    with serving(folder, weights=EngineWeightUpdater) as server:
        yield server
        assert server.audit() == []


def over_http(live, work):
    """Run `work(server)` with a client of its own."""

    async def run():
        async with pool() as http:
            return await work(Server(live.url, http, patience_s=30))

    return asyncio.run(run())


def prompt(live, message=ASK):
    return live.renderer.prompt([message], tools=(WEATHER,), thinking=PRESERVED).token_ids


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(max_new_tokens=30, seed=7, top_k=20)])
def test_a_server_answers_as_its_engine_does(live, sampling):
    ids = prompt(live)
    question = Ask(token_ids=ids, sampling=sampling, session="s\u00e9", id="q")
    for _ in range(2):  # the prefix is cached from the second time on, which rounds otherwise
        here = live.engines[0].generate(ids, sampling)

    async def both(server):
        generate = HttpGenerate(server)
        whole = await generate.respond(question)
        deltas = [delta async for delta in generate.stream(question)]
        return whole, deltas

    whole, deltas = over_http(live, both)
    assert whole.completion == here
    assert deltas[-1].answer.completion == here
    assert [i for delta in deltas for i in delta.token_ids] == list(here.token_ids)
    assert all(delta.answer is None for delta in deltas[:-1]) and len(deltas) > 1


def test_without_a_number_of_tokens_the_context_decides(live):
    ids, free = prompt(live), SamplingParams(temperature=0.0)
    question = Ask(token_ids=ids, sampling=free, session="s")
    answer = over_http(live, lambda s: HttpGenerate(s, context=512).respond(question))
    assert answer.completion == live.engines[0].generate(ids, free)
    with pytest.raises(AskRefused, match="context is not known"):
        over_http(live, lambda s: HttpGenerate(s).respond(question))
    with pytest.raises(ContextFull, match="no room"):
        over_http(live, lambda s: HttpGenerate(s, context=len(ids)).respond(question))


def test_what_a_server_refuses_is_refused_and_who_is_gone_is_lost(live):
    far_too_long = Ask(token_ids=(5,) * 600, sampling=GREEDY, session="s")
    with pytest.raises(ContextFull, match="maximum context length"):
        over_http(live, lambda s: HttpGenerate(s).respond(far_too_long))

    async def nobody(server):
        gone = Server("http://127.0.0.1:9", server.http, patience_s=2)
        assert not await gone.healthy(1.0)
        assert await server.healthy(10.0)
        await HttpGenerate(gone).respond(far_too_long)

    with pytest.raises(EngineLost, match=r"127\.0\.0\.1:9"):
        over_http(live, nobody)


def test_an_id_in_use_or_a_full_server_is_no_fault_of_the_request(live):
    """Our own server says 409 and 503; SGLang says 400 of an id that is in use."""
    engine = live.engines[0]
    engine.pause("in_place")
    question = Ask(token_ids=prompt(live), sampling=GREEDY, session="s", id="twice")
    name = engine.submit(Request(token_ids=(5,), id="twice"), lambda _: None)
    try:
        with pytest.raises(EngineLost, match=r"409: .*'twice' is being answered"):
            over_http(live, lambda s: HttpGenerate(s).respond(question))
        most = engine.settings.max_queued_requests + engine.settings.max_running
        others = [engine.submit(Request(token_ids=(5,)), lambda _: None) for _ in range(most - 1)]
        with pytest.raises(EngineLost, match=r"503: .*waiting or running"):
            over_http(live, lambda s: HttpGenerate(s).respond(replace(question, id="other")))
    finally:
        engine.abort(name)
        engine.abort_all()
        engine.resume()
    assert len(others) == most - 1
    live.settle()
    for status, said, kind in (
        (400, "Duplicate request ID detected: x", EngineLost),
        (400, "The input (900 tokens) is longer than the model's context length", ContextFull),
        (413, "too large", ContextFull),
        (503, "The request queue is full.", EngineLost),
        (400, "top_p: 7 is not in (0, 1]", AskRefused),
    ):
        found = _complaint("u", status, json.dumps({"error": {"message": said}}).encode())
        assert type(found) is kind, said


def test_a_server_that_says_nothing_is_given_up(live):
    live.engines[0].pause("in_place")
    question = Ask(token_ids=prompt(live), sampling=GREEDY, session="s")

    async def impatient(server):
        await HttpGenerate(Server(server.url, server.http, patience_s=0.3)).respond(question)

    try:
        with pytest.raises(EngineLost, match=r"nothing within 0\.3 s"):
            over_http(live, impatient)
    finally:
        live.engines[0].resume()
    live.settle()


def test_the_experts_that_tokens_chose_come_along(folder):
    with serving(folder, engine={"replay": True}) as live:
        layers = sum(kind == "moe" for kind in live.engines[0].config.mlp)
        shape = (layers, live.engines[0].config.moe.active)
        ids = prompt(live)
        here = live.engines[0].generate_output(
            Request(token_ids=ids, sampling_params=GREEDY, return_routing=True)
        )
        question = Ask(token_ids=ids, sampling=GREEDY, session="s", replay=True)
        found = over_http(live, lambda s: HttpGenerate(s, experts=shape).respond(question))
        assert (found.replay.expert_TLK == here.routing.expert_TLK).all()
        with pytest.raises(BadReply, match="routed_experts"):
            over_http(live, lambda s: HttpGenerate(s, experts=(9, 9)).respond(question))


def test_scores_are_those_of_the_engine(live):
    ids = prompt(live)
    here = live.engines[0].answer(
        Request(
            token_ids=ids, sampling_params=SamplingParams(max_new_tokens=1), prompt_logprobs_start=3
        )
    )
    found = over_http(live, lambda server: HttpScore(server)(ids, 3))
    assert found == pytest.approx(here.prompt_logprobs, abs=1e-5)
    with pytest.raises(AskRefused, match="start"):
        over_http(live, lambda server: HttpScore(server)(ids, 0))


def test_weights_are_published_whole_or_not_at_all(live, folder):
    network = load_pretrained(folder)
    parcel = serialize_update(WeightUpdate(7, dict(iter_released_tensors(network))))
    question = Ask(token_ids=prompt(live), sampling=GREEDY, session="s")

    async def publish(server):
        weights = HttpWeights({"a": server})
        assert await weights.catch_up("a"), "there is nothing to catch up with yet"
        before = (await HttpGenerate(server).respond(question)).completion
        damaged = bytearray(parcel)
        damaged[-5] ^= 1
        refused = await weights.publish([bytes(damaged)], 7)
        same = (await HttpGenerate(server).respond(question)).completion
        assert await weights.publish([parcel], 7) == {}
        after = (await HttpGenerate(server).respond(question)).completion
        assert await weights.catch_up("a"), "a late joiner gets the last version"
        return before, refused, same, after

    before, refused, same, after = over_http(live, publish)
    assert "checksum" in refused["a"]
    assert same == before and before.versions[0].version == 0
    assert {segment.version for segment in after.versions} == {7}
    assert after.token_ids == before.token_ids


# --- kill -9 --------------------------------------------------------------------------------------


@contextmanager
def process(folder):
    """`paddock serve` in a process of its own; its address."""
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
def test_a_session_outlives_the_server_that_was_killed_in_the_middle_of_its_turn(folder):
    words = get_renderer(Tokenizer.load(folder))
    session = Session("s", words)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=200, ignore_eos=True)
    with Engine(load_pretrained(folder), words.tokenizer, EngineSettings()) as engine:
        first = session.begin([COUNT], thinking=PRESERVED)
        wanted = engine.generate(first.prompt, sampling)

    async def run(servers):
        async with pool() as http:
            every = [Server(url, http, patience_s=60) for url, _ in servers]
            replicas = [Replica(s.url, HttpGenerate(s), s.healthy) for s in every]
            settings = FleetSettings(patience_s=2.0, misses=3)  # of a machine that is busy
            async with Fleet(replicas, settings) as fleet:
                victim = fleet.router.place("s")
                question = Ask(token_ids=first.prompt, sampling=sampling, session="s")
                ids, answer = [], None
                async for delta in fleet.stream(question):
                    if not ids:
                        for url, server in servers:
                            if url == victim:
                                os.kill(server.pid, signal.SIGKILL)
                    ids += delta.token_ids
                    answer = delta.output
                assert victim not in fleet.alive and len(fleet.alive) == 1
                reply = parse_completion(
                    words.tokenizer, ids, finish="length", prompt=first.prompt
                ).message
                session.record(first, answer.completion, reply)
                again = Message(role="user", content="Count.")
                second = session.begin([COUNT, reply, again], thinking=PRESERVED)
                after = await fleet.respond(
                    Ask(token_ids=second.prompt, sampling=GREEDY, session="s")
                )
                return ids, answer, second, after

    with process(folder) as one, process(folder) as other:
        ids, answer, second, after = asyncio.run(run([one, other]))
    assert tuple(ids) == answer.completion.token_ids == wanted.token_ids
    assert answer.completion.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
    past = [*first.prompt, *ids]
    assert second.prompt.tolist()[: len(past)] == past
    assert after.completion.token_ids


def test_weights_are_not_waited_for_where_a_server_has_fallen_silent():
    """It takes the connection and says nothing, as one that was stopped does."""

    async def run():
        heard, alive = asyncio.Event(), True

        async def silent(_reader, _writer):
            heard.set()
            await asyncio.sleep(3600)

        async def well(_patience_s):
            return alive

        far = await asyncio.start_server(silent, "127.0.0.1", 0)
        host, port = far.sockets[0].getsockname()
        quick = FleetSettings(beat_s=0.01, patience_s=0.05)
        async with pool() as http, asyncio.timeout(60):
            server = Server(f"http://{host}:{port}", http)
            weights = HttpWeights({"far": server})
            async with Fleet([Replica("far", HttpGenerate(server), well)], quick) as fleet:
                weights.wait = fleet.while_alive
                publishing = asyncio.create_task(weights.publish([b"parcel"], 3))
                await heard.wait()
                alive = False
                assert "was lost" in (await publishing)["far"]
        far.close()

    asyncio.run(run())
