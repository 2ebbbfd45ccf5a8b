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


class BatchingEngine(NonStreamingClient):
    """An engine whose tokens depend on batch composition, as those of real engines may: on all
    requests submitted before it is released, in their order."""

    def __init__(self):
        self.weights, self.version = {0: "start"}, 0
        self.held = False
        self.waiting = []
        self.steps = []  # sessions of each batch

    def push(self, version, weights):
        self.weights[version], self.version = weights, version

    @asynccontextmanager
    async def hold(self):
        self.held = True
        yield
        self.held = False
        self._step()

    async def generate(self, request):
        answer = asyncio.get_running_loop().create_future()
        self.waiting.append((request, answer))
        if not self.held:
            self._step()
        return await answer

    def _step(self):
        batch, self.waiting = self.waiting, []
        self.steps.append([request.session_id for request, _ in batch])
        together = number(
            self.weights[self.version], [(a.session_id, list(a.token_ids)) for a, _ in batch]
        )
        for request, answer in batch:
            token = number(together, request.session_id) % 1000
            completion = Completion(
                token_ids=(token,),
                logprobs=(-0.5,),
                versions=(Segment(self.version, 1),),
                finish="stop",
            )
            answer.set_result(RequestOutput(completion=completion))


def rollouts_by(generate, *, delays):
    """Agents of one to four turns with slow environments."""

    async def rollout(spec):
        rng = Random(f"{delays} {spec.session_id}")
        ids = []
        for _ in range(1 + spec.seed % 4):
            await asyncio.sleep(rng.expovariate(1.0))
            request = InferenceRequest(
                token_ids=(1, *ids), sampling_params=SamplingParams(), session_id=spec.session_id
            )
            ids += (await generate.generate(request)).completion.token_ids
        await asyncio.sleep(rng.expovariate(1.0))  # scoring
        versions = [0] * len(ids)
        return [trajectory(spec, ids, versions, Verdict(reward=float(ids[-1] % 2)))]

    return rollout


def is_zero_variance(group):
    return "zero variance" if len({outcome.reward for outcome in group.outcomes}) == 1 else ""


def history(delays, *, use_barrier, concurrency=5):
    engine = BatchingEngine()
    barrier = RequestBarrier(engine.hold) if use_barrier else None
    generate = DeterministicClient(engine, barrier) if barrier else engine
    settings = RolloutSettings(
        groups_per_batch=3,
        pipeline_depth=1,
        max_staleness=9,
        order="in_order",
        deterministic=use_barrier,
        max_concurrent=concurrency,
        min_concurrent=1,
    )

    async def main():
        rollout = rollouts_by(generate, delays=delays)
        task_specs = {
            name: TaskSpec(rollout, TaskSettings(group_size=size, ratio=size), is_zero_variance)
            for name, size in (("sums", 3), ("words", 2))
        }
        ledger = Ledger(":memory:")
        orchestrator = Orchestrator(task_specs, settings, ledger, seed=3, barrier=barrier)
        async with LiveBatchSource(orchestrator) as collect:
            learner = await Learner(collect, engine).run(9)
        return learner.history, engine.steps, ledger.groups()

    return run(main())[0]


@pytest.mark.parametrize("concurrency", [2, 5, 100])
def test_with_a_barrier_results_do_not_depend_on_timing(concurrency):
    expected = history(0, use_barrier=True, concurrency=concurrency)
    assert max(map(len, expected[1])) > 1
    for delays in range(1, 4):
        assert history(delays, use_barrier=True, concurrency=concurrency) == expected


def test_without_a_barrier_results_depend_on_timing():
    assert history(0, use_barrier=False)[1] != history(1, use_barrier=False)[1]


def test_an_abandoned_session_does_not_block_the_barrier():
    engine = BatchingEngine()
    barrier = RequestBarrier(engine.hold)
    generate = DeterministicClient(engine, barrier)

    async def session(name, *, hangs):
        if hangs:
            await asyncio.sleep(1e9)
        request = InferenceRequest(
            token_ids=(1,), sampling_params=SamplingParams(), session_id=name
        )
        return await generate.generate(request)

    async def main():
        for name in ("a", "b", "c"):
            barrier.join(name)
        tasks = {n: asyncio.ensure_future(session(n, hangs=n == "b")) for n in ("a", "b", "c")}
        await asyncio.sleep(5)
        assert barrier.rounds == 0
        tasks["b"].cancel()
        barrier.leave("b")
        await asyncio.wait_for(asyncio.gather(tasks["a"], tasks["c"]), 10)
        assert engine.steps == [["a", "c"]]

    run(main())


def test_an_error_while_holding_the_engine_is_raised():
    @asynccontextmanager
    async def broken():
        raise OSError("gone")
        yield

    async def main():
        barrier = RequestBarrier(broken)
        barrier.join("a")
        request = InferenceRequest(token_ids=(1,), sampling_params=SamplingParams(), session_id="a")
        await asyncio.wait_for(DeterministicClient(BatchingEngine(), barrier).generate(request), 10)

    with pytest.raises(OSError, match="gone"):
        run(main())
