"""Rollout worker: environments in messages, sessions in tokens, failures as outcomes."""

import asyncio
from dataclasses import replace

import pytest
import torch

from paddock.engine import (
    ContextLengthExceededError,
    Engine,
    EngineError,
    EngineSettings,
    InvalidRequestError,
    Request,
)
from paddock.model import Transformer
from paddock.records import (
    Budget,
    Completion,
    Failure,
    Message,
    SamplingParams,
    Segment,
    Task,
    Verdict,
)
from paddock.rl.reward import is_truncated
from paddock.rollout.client import (
    EngineUnavailableError,
    InProcessClient,
    NonStreamingClient,
    OverlongPromptError,
    RequestOutput,
    RequestRejectedError,
)
from paddock.rollout.context_management import OMITTED, ContextSettings
from paddock.rollout.session import PRESERVED
from paddock.rollout.worker import RolloutWorker
from tests.model.networks import latent_config
from tests.rollout.conversations import assert_each_token_trained_once
from tests.rollout.engines import SPEC, Logged, RandomEngine, renderer, tokenizer

QUESTION = Message(role="user", content="Go.")


class ChatTaskset:
    """An environment that answers every call, otherwise says "Go on.", and gives reward 1."""

    name = "talk"

    def __init__(self, turns=3, breaks=None):
        self.turns, self.breaks = turns, breaks

    def task(self, index, split="train"):
        limits = Budget(turns=self.turns, seconds=60, output_bytes=1000)
        return Task(id=f"talk/{index}", env="talk", messages=(QUESTION,), budget=limits)

    def make_env(self, task):
        return ChatEnv(task, self.breaks)


class ChatEnv:
    tools = SPEC

    def __init__(self, task, breaks):
        self.task, self.breaks, self.steps = task, breaks, 0

    async def reset(self):
        if self.breaks == "start":
            raise OSError("disk full")

    async def step(self, reply):
        self.steps += 1
        if self.breaks == self.steps:
            raise OSError("disk full")
        found = [
            Message(role="tool", content=f"result {self.steps}", tool_call_id=call.id)
            for call in reply.tool_calls
        ]
        return tuple(found) or (Message(role="user", content="Go on."),)

    async def score(self):
        return Verdict(reward=1.0)

    async def close(self):
        pass


def rollout(generate, taskset=None, *, seed=1, session="s", **more):
    worker = RolloutWorker(client=generate, renderer=more.pop("renderer", renderer()), **more)
    taskset = taskset or ChatTaskset()
    sampling = SamplingParams(max_new_tokens=40, seed=seed)
    return asyncio.run(
        worker.rollout(taskset, taskset.task(0), sampling, session_id=session, group_id="g")
    )


def test_a_rollout_is_what_the_engine_has_in_its_log():
    whole = 0
    for number in range(30):
        engine = RandomEngine(seed=number)
        (found,) = rollout(engine, ChatTaskset(turns=4), session=f"s{number}")
        if engine.log[-1].completion.finish == "stop":
            assert found.outcome == Verdict(reward=1.0)
            whole += 1
        assert (found.task_id, found.group_id, found.session_id) == ("talk/0", "g", f"s{number}")
        assert [turn.completion for turn in found.turns] == [e.completion for e in engine.log]
        last = engine.log[-1]
        assert found.token_ids == last.prompt + last.completion.token_ids
    assert whole > 10


class RecordingClient(InProcessClient):
    log: list

    async def generate(self, request):
        answer = await super().generate(request)
        self.log.append(Logged(request.session_id, tuple(request.token_ids), answer.completion))
        return answer


def recording_client(engine):
    found = RecordingClient(
        engine,
        Request,
        overlong_errors=(ContextLengthExceededError,),
        rejection_errors=(InvalidRequestError,),
        engine_errors=(EngineError,),
    )
    object.__setattr__(found, "log", [])
    return found


def test_concurrent_rollouts_of_a_real_network_have_the_logprobs_of_the_trainer():
    """Batched, cached, sampled: ids as the engine's log has them, log-probabilities as one forward
    pass over the trajectory gives them."""
    words = tokenizer()
    config = latent_config(
        vocab=words.vocab_size, context=2048, eos=words.special_token_ids.stop_token_ids
    )
    network = Transformer.from_config(config, seed=3).eval()
    settings = EngineSettings(page_size=8, kv_cache_bytes=1 << 24, max_running_requests=16)
    with Engine(network, words, settings) as engine:
        seam = recording_client(engine)
        worker = RolloutWorker(client=seam, renderer=renderer(), context_length=2048)
        taskset = ChatTaskset(turns=3)

        async def play_all():
            return await asyncio.gather(
                *(
                    worker.rollout(
                        taskset,
                        taskset.task(i),
                        SamplingParams(max_new_tokens=12, temperature=0.8, seed=i),
                        session_id=f"s{i}",
                        group_id="g",
                    )
                    for i in range(12)
                )
            )

        rollouts = asyncio.run(play_all())
        assert engine.audit() == []
        assert engine.stats().prefix_cache_hit_tokens > 0
        for (found,) in rollouts:
            log = [entry for entry in seam.log if entry.session == found.session_id]
            assert [turn.completion for turn in found.turns] == [e.completion for e in log]
            assert found.token_ids == log[-1].prompt + log[-1].completion.token_ids
            logits = engine.run_between_steps(lambda n, f=found: n.logits(f.token_ids)).result()
            logp = (logits[:-1] / 0.8).log_softmax(-1)
            chosen = logp.gather(1, torch.tensor(found.token_ids[1:]).unsqueeze(1)).squeeze(1)
            trained = torch.tensor(found.loss_mask[1:])
            ours = torch.tensor(found.logprobs[1:])
            assert trained.sum() > 0
            torch.testing.assert_close(ours[trained], chosen[trained], atol=1e-5, rtol=0)


def test_the_same_seed_gives_the_same_rollout_and_every_turn_has_its_own_seed():
    class Seeing(RandomEngine):
        def sample_completion(self, request):
            seen.append(request.sampling_params.seed)
            return super().sample_completion(request)

    runs = []
    for seed in (1, 1, 2):
        seen = []
        rollout(Seeing(), seed=seed)
        runs.append(tuple(seen))
    assert runs[0] == runs[1] != runs[2]
    assert len(set(runs[0])) == 3


class Broken(NonStreamingClient):
    def __init__(self, error, after=0):
        self.error, self.inner, self.after, self.ended = error, RandomEngine(), after, []

    async def generate(self, request):
        if len(self.inner.log) >= self.after:
            raise self.error
        return await self.inner.generate(request)

    def end_session(self, session):
        self.ended.append(session)


@pytest.mark.parametrize(
    ("error", "kind", "where"),
    [
        (EngineUnavailableError("gone"), "infrastructure", "engine"),
        (OverlongPromptError("too long"), "policy", "context"),
        (RequestRejectedError("the 'replay' setting is off"), "infrastructure", "request"),
    ],
)
def test_an_engine_error_is_an_outcome(error, kind, where):
    engine = Broken(error, after=2)
    (found,) = rollout(engine, ChatTaskset(turns=5))
    assert found.outcome == Failure(kind=kind, where=where, what=str(error))
    assert len(found.turns) == 2, "what was sampled before is kept"
    assert engine.ended == ["s"]


def test_an_aborted_reply_is_an_engine_failure():
    class Aborting(NonStreamingClient):
        async def generate(self, request):
            done = Completion(
                token_ids=(5,), logprobs=(-1.0,), versions=(Segment(0, 1),), finish="abort"
            )
            return RequestOutput(completion=done, abort_reason="shutting down")

    (found,) = rollout(Aborting())
    assert found.turns == () and found.outcome.kind == "infrastructure"
    assert "shutting down" in found.outcome.what


def test_a_bug_raises():
    with pytest.raises(KeyError):
        rollout(Broken(KeyError("a bug of ours")))


@pytest.mark.parametrize(("breaks", "turns"), [("start", 0), (1, 1), (2, 2)])
def test_a_failing_environment_keeps_the_sampled_turns(breaks, turns):
    (found,) = rollout(RandomEngine(), ChatTaskset(turns=4, breaks=breaks))
    assert found.outcome.kind == "world" and len(found.turns) == turns


@pytest.mark.parametrize("error", [KeyError("no such room"), SystemExit(0), TimeoutError("slow")])
def test_an_environment_that_cannot_be_opened_is_a_failure(error):
    class Shut(ChatTaskset):
        def make_env(self, task):
            raise error

    engine = Broken(EngineUnavailableError("must not be called"))
    (found,) = rollout(engine, Shut())
    kind = "time" if isinstance(error, TimeoutError) else "world"
    assert (found.outcome.kind, found.outcome.where) == (kind, "open")
    assert type(error).__name__ in found.outcome.what
    assert found.turns == () and engine.ended == ["s"]


def test_the_remaining_context_bounds_a_reply_and_then_ends_the_rollout():
    class Rambling(RandomEngine):
        """Generates until max_new_tokens."""

        def sample_completion(self, request):
            count = request.sampling_params.max_new_tokens
            sizes.append((len(request.token_ids), count))
            return Completion(
                token_ids=(10,) * count,
                logprobs=(-1.0,) * count,
                versions=(Segment(0, count),),
                finish="length",
            )

    sizes = []
    room = 150 + len(renderer().render_prompt([QUESTION], tools=SPEC, thinking=PRESERVED).token_ids)
    (found,) = rollout(Rambling(), ChatTaskset(turns=50), context_length=room)
    assert all(prompt + count <= room for prompt, count in sizes)
    assert sizes[0][1] == 40 and sizes[-1][1] <= 40
    assert found.outcome.kind == "policy" and "no room" in found.outcome.what


def test_tool_calls_of_a_truncated_reply_are_not_executed():
    """Otherwise repeating calls up to the limit would be as good as one call and a stop."""

    class Endless(ToolCallingEngine):
        def sample_completion(self, request):
            done = super().sample_completion(request)
            return replace(done, finish="length") if len(self.log) == 1 else done

    engine = Endless()
    (found,) = rollout(engine, ChatTaskset(turns=5))
    assert len(engine.log) == len(found.turns) == 2, "one turn ended well, the next did not"
    assert found.outcome.is_policy_failure
    assert "truncated" in found.outcome.what
    assert found.turns[-1].completion == engine.log[-1].completion, "it is trained on, for its cost"
    assert is_truncated((found,))


# --- context management -------------------------------------------------------------------------


def run_with_context(turns=6, **settings):
    taskset, engine = ChatTaskset(turns=turns), ToolCallingEngine()
    worker = RolloutWorker(
        client=engine, renderer=renderer(), context_management=ContextSettings(**settings)
    )
    sampling = SamplingParams(max_new_tokens=40)
    return asyncio.run(worker.run_episode(taskset, taskset.task(0), sampling, "s")), engine


class ToolCallingEngine(RandomEngine):
    """Always calls the clock tool."""

    def sample_completion(self, request):
        specials = tokenizer().special_token_ids
        name = tokenizer().encode("now", specials=False)
        ids = (
            *tokenizer().encode(f"thought {len(self.log)}", specials=False),
            *(specials.ids["</think>"], specials.ids["<tool_call>"], *name),
            *(specials.ids["</tool_call>"], specials.ids["<|observation|>"]),
        )
        return Completion(
            token_ids=ids,
            logprobs=(-1.0,) * len(ids),
            versions=(Segment(0, len(ids)),),
            finish="stop",
        )


def shown(entry):
    return tokenizer().decode(list(entry.prompt))


def test_keeping_recent_results_omits_older_ones_and_forks():
    found, engine = run_with_context(strategy="keep_recent", recent_turns=2)
    last = shown(engine.log[-1])
    assert "result 5" in last and "result 4" in last and "result 3" not in last
    assert f"<tool_response>{OMITTED}</tool_response>" in last
    assert "thought 4" in last, "replies of the policy stay"
    assert len(list(found.session.tree.leaves())) == 4
    assert_each_token_trained_once(found.session)


def test_discarding_all_restarts_from_the_task():
    fourth = len(run_with_context()[1].log[3].prompt)
    found, engine = run_with_context(strategy="discard_all", max_tokens=fourth)
    prompts = [len(entry.prompt) for entry in engine.log]
    assert prompts[0] < prompts[1] < prompts[2] < prompts[3] and prompts[4] == prompts[0]
    assert "thought" not in shown(engine.log[4]) and "thought 4" in shown(engine.log[5])
    assert_each_token_trained_once(found.session)
