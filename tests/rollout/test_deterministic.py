import asyncio
from contextlib import asynccontextmanager
from random import Random

import pytest

from paddock.journal import Ledger
from paddock.records import Completion, SamplingParams, Segment, Verdict
from paddock.rl.live_batches import LiveBatchSource
from paddock.rollout.client import InferenceRequest, NonStreamingClient, RequestOutput
from paddock.rollout.deterministic import DeterministicClient, RequestBarrier
from paddock.rollout.orchestrator import Orchestrator, TaskSpec
from paddock.rollout.settings import RolloutSettings, TaskSettings
from tests.rollout.virtual_time import Learner, number, run, trajectory


class Batcher(NonStreamingClient):
    """An engine whose tokens depend on what it computes together, as those of real ones may: on
    all that was asked before it was let go, in the order of asking."""

    def __init__(self):
        self.weights, self.version = {0: "start"}, 0
        self.held = False
        self.waiting = []
        self.steps = []  # what was computed together

    def push(self, version, weights):
        self.weights[version], self.version = weights, version

    @asynccontextmanager
    async def hold(self):
        self.held = True
        yield
        self.held = False
        self._step()

    async def generate(self, ask):
        answer = asyncio.get_running_loop().create_future()
        self.waiting.append((ask, answer))
        if not self.held:
            self._step()
        return await answer

    def _step(self):
        wave, self.waiting = self.waiting, []
        self.steps.append([ask.session_id for ask, _ in wave])
        together = number(
            self.weights[self.version], [(a.session_id, list(a.token_ids)) for a, _ in wave]
        )
        for ask, answer in wave:
            token = number(together, ask.session_id) % 1000
            completion = Completion(
                token_ids=(token,),
                logprobs=(-0.5,),
                versions=(Segment(self.version, 1),),
                finish="stop",
            )
            answer.set_result(RequestOutput(completion=completion))


def attempts_by(generate, *, delays):
    """Agents of one to four turns, whose worlds take their time."""

    async def attempt(given):
        rng = Random(f"{delays} {given.session_id}")
        ids = []
        for _ in range(1 + given.seed % 4):
            await asyncio.sleep(rng.expovariate(1.0))
            ask = InferenceRequest(
                token_ids=(1, *ids), sampling_params=SamplingParams(), session_id=given.session_id
            )
            ids += (await generate.generate(ask)).completion.token_ids
        await asyncio.sleep(rng.expovariate(1.0))  # to be judged
        versions = [0] * len(ids)
        return [trajectory(given, ids, versions, Verdict(reward=float(ids[-1] % 2)))]

    return attempt


def flat(group):
    return "zero variance" if len({outcome.reward for outcome in group.outcomes}) == 1 else ""


def history(delays, *, in_waves, concurrency=5):
    engine = Batcher()
    waves = RequestBarrier(engine.hold) if in_waves else None
    generate = DeterministicClient(engine, waves) if waves else engine
    pace = RolloutSettings(
        groups_per_batch=3,
        pipeline_depth=1,
        max_staleness=9,
        order="in_order",
        deterministic=in_waves,
        max_concurrent=concurrency,
        min_concurrent=1,
    )

    async def main():
        attempt = attempts_by(generate, delays=delays)
        works = {
            name: TaskSpec(attempt, TaskSettings(group_size=size, ratio=size), flat)
            for name, size in (("sums", 3), ("words", 2))
        }
        ledger = Ledger(":memory:")
        orchestrator = Orchestrator(works, pace, ledger, seed=3, barrier=waves)
        async with LiveBatchSource(orchestrator) as collect:
            learner = await Learner(collect, engine).run(9)
        return learner.history, engine.steps, ledger.groups()

    return run(main())[0]


@pytest.mark.parametrize("concurrency", [2, 5, 100])
def test_waves_do_not_depend_on_who_was_quick(concurrency):
    expected = history(0, in_waves=True, concurrency=concurrency)
    assert max(map(len, expected[1])) > 1
    for delays in range(1, 4):
        assert history(delays, in_waves=True, concurrency=concurrency) == expected


def test_without_waves_they_do():
    assert history(0, in_waves=False)[1] != history(1, in_waves=False)[1]


def test_a_session_that_is_given_up_does_not_hold_up_the_wave():
    engine = Batcher()
    waves = RequestBarrier(engine.hold)
    generate = DeterministicClient(engine, waves)

    async def session(name, *, hangs):
        if hangs:
            await asyncio.sleep(1e9)
        ask = InferenceRequest(token_ids=(1,), sampling_params=SamplingParams(), session_id=name)
        return await generate.generate(ask)

    async def main():
        for name in ("a", "b", "c"):
            waves.join(name)
        tasks = {n: asyncio.ensure_future(session(n, hangs=n == "b")) for n in ("a", "b", "c")}
        await asyncio.sleep(5)
        assert waves.rounds == 0
        tasks["b"].cancel()
        waves.leave("b")
        await asyncio.wait_for(asyncio.gather(tasks["a"], tasks["c"]), 10)
        assert engine.steps == [["a", "c"]]

    run(main())


def test_an_engine_that_cannot_be_held_is_heard_of():
    @asynccontextmanager
    async def broken():
        raise OSError("gone")
        yield

    async def main():
        waves = RequestBarrier(broken)
        waves.join("a")
        ask = InferenceRequest(token_ids=(1,), sampling_params=SamplingParams(), session_id="a")
        await asyncio.wait_for(DeterministicClient(Batcher(), waves).generate(ask), 10)

    with pytest.raises(OSError, match="gone"):
        run(main())
