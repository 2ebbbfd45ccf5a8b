"""Gateway: every API records the same tokens; a disconnected client records no turn."""

import asyncio
import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random

import anthropic
import httpx
import openai
import pytest

from paddock.checkpoint import load_pretrained
from paddock.engine import (
    ContextLengthExceededError,
    Engine,
    EngineError,
    EngineSettings,
    InvalidRequestError,
    Request,
)
from paddock.records import Message, SamplingParams, Trajectory, Verdict
from paddock.records.json_codec import decode, encode
from paddock.rollout.client import EngineUnavailableError, InProcessClient
from paddock.rollout.gateway import build_gateway
from paddock.rollout.session_manager import GatewaySettings, SessionConfig, SessionManager
from paddock.text import SpecialToken, Tokenizer, get_renderer
from tests.patience import until
from tests.rollout.agents import AGENTS, HTTP, ChatAgent, MessagesAgent, SessionEndpoint
from tests.rollout.conversations import ids_of
from tests.rollout.engines import RandomEngine, ScriptedEngine, completion, renderer
from tests.serve.live import listening
from tests.serve.memorized_model import WEATHER
from tests.text.conversations import MARKERS, WORDS, text

VARIANTS = [(name, stream) for name in AGENTS for stream in (False, True)]
GREEDY = SessionConfig(sampling_params=SamplingParams(temperature=0.0))
TOOL = {"type": "function", "function": encode(WEATHER)}
ADMIN_KEY = "trainer-side"
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


@contextmanager
def gateway(generate, words=None, rules=None, **settings):
    sessions = SessionManager(generate, words or renderer(), GatewaySettings(**settings))
    with listening(build_gateway(sessions, rules, admin_key=ADMIN_KEY)) as url:
        yield url, sessions


def opened(url, session, **more):
    """Open a session; returns its endpoint."""
    reply = HTTP.post(f"{url}/sessions", json={"id": session, **more}, headers=ADMIN)
    reply.raise_for_status()
    opened_session = reply.json()
    return SessionEndpoint(f"{url}{opened_session['path']}", opened_session["api_key"])


def exported(url, session, **more):
    reply = HTTP.post(f"{url}/sessions/{session}/export", json=more, headers=ADMIN)
    reply.raise_for_status()
    return reply.json()["trajectories"]


# --- A5: protocols agree --------------------------------------------------------------------------


def converse(agent, rng, turns):
    agent.say(text(rng, (*WORDS, *MARKERS)))
    for _ in range(turns):
        calls = agent.turn()
        results = [(call, text(rng, (*WORDS, *MARKERS))) for call in calls]
        agent.answer(results)
        if not results or rng.random() < 0.3:
            agent.say(f"Go on {text(rng, WORDS)}.")


def test_every_api_records_the_same_trajectory():
    kept = {}
    for name, stream in VARIANTS:
        engine = RandomEngine(pieces=5)
        with gateway(engine) as (url, _):
            for number in range(6):
                api = opened(url, f"s{number}")
                system = "Be brief." if number % 2 else None
                agent = AGENTS[name](api, stream=stream, system=system)
                converse(agent, Random(number), turns=3)
            kept[name, stream] = [exported(url, f"s{number}") for number in range(6)]
    first, *others = kept.values()
    assert all(len(branches) == 1 for branches in first)
    assert [len(branches[0]["turns"]) for branches in first] == [3] * 6
    for (name, stream), other in kept.items():
        assert other == first, f"{name}, streaming: {stream}"
    assert others


@pytest.mark.parametrize(("name", "stream"), VARIANTS)
def test_unclosed_reasoning_returned_as_content_is_matched_when_sent_back(name, stream):
    ended = completion(ids_of("just so", SpecialToken.USER))  # no </think>
    with gateway(ScriptedEngine([ended, ended])) as (url, _):
        api = opened(url, "s")
        agent = AGENTS[name](api, stream=stream)
        agent.say("Hi")
        agent.turn()
        agent.say("Sure?")
        agent.turn()
        assert [len(found["turns"]) for found in exported(url, "s")] == [2]


@pytest.fixture(scope="module")
def engine(folder):
    words = Tokenizer.load(folder)
    settings = EngineSettings(kv_cache_bytes=1 << 22, max_running_requests=8)
    with Engine(load_pretrained(folder), words, settings) as found:
        yield found
        assert found.audit() == []


def in_process(engine, kind=InProcessClient):
    return kind(
        engine,
        Request,
        overlong_errors=(ContextLengthExceededError,),
        rejection_errors=(InvalidRequestError,),
        engine_errors=(EngineError,),
    )


@pytest.fixture
def real(engine):
    """A real engine behind the gateway."""
    return in_process(engine)


@pytest.mark.parametrize(("name", "stream"), VARIANTS)
def test_a_real_model_calls_its_tool_through_every_api(real, engine, name, stream):
    words = get_renderer(engine.tokenizer)
    with gateway(real, words, GREEDY, context_length=engine.capacity.context_length) as (
        url,
        sessions,
    ):
        api = opened(url, "s")
        agent = AGENTS[name](api, stream=stream, tools=[TOOL])
        agent.say("Weather in Oslo?")
        (call,) = agent.turn()
        agent.answer([(call, '{"t": 12}')])
        assert agent.turn() == []
        assert HTTP.get(api.url, headers=api.headers).json()["turns"] == 2
        (node, last) = sessions["s"].session.tree.nodes
        assert last.messages()[1].content == "12 C in Oslo."
        assert last.parent is node
        again = engine.generate(last.token_ids()[: -len(last.ids)], SamplingParams(temperature=0.0))
        assert list(again.token_ids) == last.ids.tolist()
        assert again.logprobs == pytest.approx(tuple(last.logprobs), abs=1e-5)


# --- disconnected clients -------------------------------------------------------------------------


class FreezingClient(InProcessClient):
    """The engine stops after the first delta, and cannot have finished before."""

    async def stream(self, request):
        request = replace(
            request, sampling_params=replace(request.sampling_params, min_new_tokens=300)
        )
        async for delta in super().stream(request):
            self.engine.pause("in_place")
            yield delta


@pytest.mark.parametrize("name", AGENTS)
def test_a_turn_whose_client_disconnects_mid_stream_is_not_recorded(engine, name):
    words, slow = get_renderer(engine.tokenizer), in_process(engine, FreezingClient)
    with gateway(slow, words, GREEDY, context_length=engine.capacity.context_length) as (
        url,
        sessions,
    ):
        api = opened(url, "s")
        agent = AGENTS[name](api, stream=False, tools=[TOOL])
        agent.say("Weather in Oslo?")
        body = {"model": "m", "stream": True, "max_tokens": 400}
        path = {"chat": "chat/completions"}.get(name, name)
        history = {"input": agent.items} if name == "responses" else {"messages": agent.messages}
        options = {"json": body | history, "headers": api.headers}
        with HTTP.stream("POST", f"{api.url}/v1/{path}", **options) as reply:
            assert reply.status_code == 200
            parts = reply.iter_bytes()  # dropping it disconnects
            next(parts)
            until(lambda: sessions["s"].running == 1 and engine.stats().running == 1)
        until(lambda: not sessions["s"].running and not engine.stats().running)
        engine.resume()
        assert sessions["s"].session.tree.nodes == []
        agent.turn()
        facts = HTTP.get(api.url, headers=api.headers).json()
        assert facts["turns"] == 1, "and the session goes on"


def test_a_turn_whose_client_disconnects_before_the_response_is_not_recorded(real, engine):
    words = get_renderer(engine.tokenizer)
    with gateway(real, words, GREEDY) as (url, sessions):
        api = opened(url, "s")
        engine.pause("in_place")
        body = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 450}
        with pytest.raises(httpx.ReadTimeout):
            HTTP.post(f"{api.url}/v1/chat/completions", json=body, headers=api.headers, timeout=0.5)
        until(lambda: not sessions["s"].running and not engine.stats().waiting)
        engine.resume()
        assert sessions["s"].session.tree.nodes == []


def test_turns_of_one_session_may_run_concurrently():
    """Sub-agents share a session: their turns are branches, none is lost."""
    with gateway(RandomEngine(pieces=3)) as (url, sessions):
        api = opened(url, "s")

        def one(number):
            agent = ChatAgent(api, stream=bool(number % 2))
            converse(agent, Random(number), turns=3)

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(one, range(6)))
        assert len(sessions["s"].session.tree.nodes) == 18
        assert sum(len(t["turns"]) for t in exported(url, "s")) >= 18


@dataclass
class MessageCountingEngine(ScriptedEngine):
    """Counts the messages in memory while waiting for the engine."""

    held: tuple[int, ...] = ()

    async def generate(self, request):
        gc.collect()
        every = (each for each in gc.get_objects() if type(each) is Message)
        self.held = (*self.held, sum(each.content.startswith("needle") for each in every))
        return await super().generate(request)


def test_a_waiting_turn_holds_only_its_new_messages():
    engine = MessageCountingEngine([completion(ids_of("so", SpecialToken.USER))] * 12)
    with gateway(engine) as (url, _):
        api = opened(url, "s")
        agent = ChatAgent(api, stream=False)
        for turn in range(12):
            agent.say(f"needle {turn}")
            agent.turn()
    # The newest message, as received and as it will be recorded; the previous turn may still be
    # referenced.
    assert len(engine.held) == 12 and max(engine.held) <= 4


def test_objects_loaded_before_serving_are_frozen_for_the_garbage_collector():
    app, before = build_gateway(SessionManager(RandomEngine(), renderer())), gc.get_threshold()

    async def served():
        async with app.router.lifespan_context(app):
            return gc.get_freeze_count(), gc.get_threshold()

    frozen, threshold = asyncio.run(served())
    assert frozen > 10_000 and threshold[0] > before[0]
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, before)


# --- session config -------------------------------------------------------------------------------


def test_the_session_config_overrides_sampling_params_of_the_client():
    options = SamplingParams(temperature=0.0, top_p=0.5, max_new_tokens=9, stop=("x",), seed=4)
    own = SessionConfig(sampling_params=SamplingParams(temperature=0.7, max_new_tokens=20, seed=1))
    ruled = own.apply(options, turn=3)
    assert (ruled.temperature, ruled.top_p) == (0.7, 1.0)
    assert (ruled.max_new_tokens, ruled.stop) == (9, ("x",))
    assert ruled.seed not in (1, 4, None) and own.apply(options, turn=4).seed != ruled.seed


def test_the_forced_opening_of_a_required_call_is_not_trained(real, engine):
    words = get_renderer(engine.tokenizer)
    with gateway(real, words, GREEDY) as (url, sessions):
        api = opened(url, "s")
        agent = ChatAgent(api, stream=False, tools=[TOOL])
        agent.say("Weather in Oslo?")
        assert len(agent.turn(tool_choice="required")) == 1
        assert HTTP.get(api.url, headers=api.headers).json()["turns"] == 1
        (node,) = sessions["s"].session.tree.nodes
        opening = words.tokenizer.decode(node.added.tolist())
        assert opening.endswith("<tool_call>get_weather")


# --- errors and exports ---------------------------------------------------------------------------


def test_errors_have_the_shape_of_the_api():
    with gateway(RandomEngine(), context_length=64) as (url, _):
        api = opened(url, "s")
        long, lost, hello = (
            ChatAgent(api, stream=False),
            ChatAgent(SessionEndpoint(f"{url}/sessions/other", api.key), stream=False),
            ChatAgent(api, stream=False),
        )
        also_long = MessagesAgent(api, stream=True)
        for agent, words in ((long, "too long " * 50), (also_long, "too long " * 50), (lost, "Hi")):
            agent.say(words)
        hello.say("Hi")
        with pytest.raises(openai.BadRequestError, match="maximum context length") as refused:
            long.turn()
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
            also_long.turn()
        with pytest.raises(openai.AuthenticationError, match="session 'other'"):
            lost.turn()
        for more in ({"n": 2}, {"logprobs": True, "top_logprobs": 3}):
            with pytest.raises(openai.BadRequestError, match=next(reversed(more))):
                hello.turn(**more)
        broken = HTTP.post(f"{api.url}/v1/messages", content=b"{", headers=api.headers)
        assert broken.json()["type"] == "error"
        for id, status in (("s", 409), ("a/b", 400)):
            refused = HTTP.post(f"{url}/sessions", json={"id": id}, headers=ADMIN)
            assert refused.status_code == status
        assert HTTP.get(f"{url}/sessions/s/nothing").status_code == 404


def test_an_unavailable_engine_records_no_turn():
    class Lost(RandomEngine):
        async def generate(self, request):
            raise EngineUnavailableError("gone")

    with gateway(Lost()) as (url, sessions):
        api = opened(url, "s")
        for name in AGENTS:
            for stream in (False, True):
                agent = AGENTS[name](api, stream=stream)
                agent.say("Hi")
                with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as error:
                    agent.turn()
                assert error.value.status_code == 503
        assert sessions["s"].session.tree.nodes == []


def test_an_export_decodes_to_trajectories():
    with gateway(RandomEngine()) as (url, sessions):
        api = opened(url, "s")
        converse(ChatAgent(api, stream=False), Random(1), turns=3)
        outcome = encode(Verdict(reward=0.5))
        (found,) = exported(url, "s", task_id="t", group_id="g", outcome=outcome)
        trajectory = decode(Trajectory, found)
        assert trajectory.outcome == Verdict(reward=0.5)
        assert trajectory.token_ids == tuple(sessions["s"].session.tree.nodes[-1].token_ids())
        facts = HTTP.get(api.url, headers=api.headers).json()
        assert (facts["turns"], facts["branches"], facts["forks"]) == (3, 1, [])
        assert HTTP.delete(api.url, headers=ADMIN).json()["turns"] == 3
        assert HTTP.get(f"{url}/sessions", headers=ADMIN).json() == {"sessions": []}


ATIF = {  # allowed keys of each object
    "step": {
        *("step_id", "timestamp", "source", "model_name", "reasoning_effort", "message"),
        *("reasoning_content", "tool_calls", "observation", "metrics", "is_copied_context"),
        *("llm_call_count", "extra"),
    },
    "metrics": {
        *("prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd"),
        *("prompt_token_ids", "completion_token_ids", "logprobs", "extra"),
    },
}


def test_a_session_can_be_exported_as_atif():
    with gateway(RandomEngine()) as (url, sessions):
        api = opened(url, "s")
        agent = ChatAgent(api, stream=False, system="Be brief.")
        converse(agent, Random(1), turns=3)
        agent.messages[2] = {"role": "assistant", "content": "rewritten"}
        agent.messages = [m for m in agent.messages if m["role"] != "tool"]
        agent.turn()
        first, second = exported(url, "s", format="atif", tokens=True)
        session = sessions["s"].session
    assert first["schema_version"] == "ATIF-v1.8" and first["trajectory_id"] == "s/0"
    for found in (first, second):
        steps = found["steps"]
        assert [step["step_id"] for step in steps] == list(range(1, len(steps) + 1))
        for step in steps:
            assert set(step) <= ATIF["step"] and step["source"] in ("system", "user", "agent")
            assert set(step.get("metrics", {})) <= ATIF["metrics"]
            if step.get("llm_call_count") == 0:
                assert "metrics" not in step and "reasoning_content" not in step
    sampled = [step for step in first["steps"] if step.get("llm_call_count")]
    for step, node in zip(sampled, session.tree.nodes, strict=False):
        assert step["metrics"]["completion_token_ids"] == node.ids.tolist()
        assert step["metrics"]["logprobs"] == node.logprobs.tolist()
        prompt = node.token_ids()[: -len(node.ids)].tolist()
        assert step["metrics"]["prompt_token_ids"] == prompt
    copied = [step for step in second["steps"] if step.get("is_copied_context")]
    assert "rewritten" in [step["message"] for step in copied]
