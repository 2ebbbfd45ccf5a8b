"""An event loop with virtual time, a fake engine whose tokens encode the weights that sampled them,
and a fake learner whose weights encode what they were trained on."""

import asyncio
import selectors
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random

from paddock.journal import Ledger
from paddock.records import Completion, Failure, Segment, Trajectory, Turn, Verdict
from paddock.rl.live_batches import LiveBatchSource
from paddock.rollout.deterministic import RequestBarrier
from paddock.rollout.orchestrator import Orchestrator, TaskSpec
from paddock.rollout.settings import TaskSettings


class Deadlock(Exception):
    """No task is runnable and no timer is scheduled."""


class _Jumping(selectors.DefaultSelector):
    loop: "VirtualLoop"

    def select(self, timeout=None):
        ready = super().select(0)
        if not ready and timeout is None:
            raise Deadlock("nothing is scheduled")
        if not ready:
            self.loop.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self):
        selector = _Jumping()
        selector.loop = self
        self.now = 0.0
        super().__init__(selector)

    def time(self):
        return self.now


def run(main):
    """The result of `main` and the virtual seconds it took."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main), loop.now
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


BASE = 1000  # a token is version * BASE + something that depends on the weights


def number(*parts):
    digest = blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass
class Engine:
    """Samples with the newest weights; `delay` is the time per token."""

    weights: dict = field(default_factory=lambda: {0: "start"})
    version: int = 0
    delay: object = lambda spec, rng: rng.expovariate(1.0)
    tokens: object = lambda spec, rng: rng.randint(1, 4)
    outcome: object = lambda spec, rng: Verdict(reward=float(rng.random() < 0.5))
    seed: int = 0
    eager: bool = False  # the first token is sampled at once
    barrier: RequestBarrier | None = None

    def push(self, version, weights):
        self.weights[version] = weights
        self.version = version

    async def __call__(self, spec):
        rng = Random(f"{self.seed} {spec.session_id}")
        ids, versions = [], []
        for position in range(self.tokens(spec, rng)):
            await asyncio.sleep(0.0 if self.eager and not position else self.delay(spec, rng))
            version, token = await self._sampled(spec, position)
            versions.append(version)
            ids.append(token)
        return [trajectory(spec, ids, versions, self.outcome(spec, rng))]

    async def _sampled(self, spec, position):
        async def sample():
            state = self.weights[self.version]
            return self.version, self.version * BASE + number(state, spec.seed, position) % BASE

        return await (self.barrier.submit(spec.session_id, sample) if self.barrier else sample())


def trajectory(spec, ids, versions, outcome):
    segments = tuple(Segment(version, 1) for version in versions)
    completion = Completion(
        token_ids=tuple(ids), logprobs=(-0.5,) * len(ids), versions=segments, finish="stop"
    )
    turns = (Turn(added_ids=(1,), completion=completion),) if ids else ()
    return Trajectory(
        task_id=spec.task_id,
        group_id=spec.group_id,
        session_id=spec.session_id,
        turns=turns,
        outcome=outcome,
    )


def sampled(group):
    """Every token of a group, as the engine sampled it."""
    turns = [turn for rollout in group.rollouts for branch in rollout for turn in branch.turns]
    return [token for turn in turns for token in turn.completion.token_ids]


def content(batch):
    """All that a learner sees of a batch."""
    return [
        (group.task, group.number, [sampled(group), [str(o) for o in group.outcomes]])
        for group in batch.groups
    ]


@dataclass
class Learner:
    """A training loop; an update takes `step_s` and hashes the batch into the weights."""

    collect: LiveBatchSource
    engine: Engine
    step_s: object = lambda: 1.0
    save: object = None  # called with (updates, weights) after every batch
    weights: str = "start"
    updates: int = 0
    batches: list = field(default_factory=list)
    history: list = field(default_factory=list)  # the weights after each update

    async def run(self, batches):
        settings = self.collect._settings
        for _ in range(batches):
            batch = await self.collect.next_batch()
            if batch is None:
                return self
            assert batch.update == self.updates
            for _ in range(settings.updates_per_batch):
                await self.collect.await_or_fail(asyncio.sleep(self.step_s()))
                self.weights = str(number(self.weights, content(batch)))
                self.updates += 1
                self.history.append(self.weights)
            self.batches.append(batch)
            self.collect.mark_trained(batch)
            await self.collect.wait_quiescent()
            if self.save:
                self.save(self.updates, self.weights)
            if self.updates - self.engine.version >= settings.sync_weights_every:
                self.engine.push(self.updates, self.weights)
                self.collect.mark_published(self.updates)
        return self


async def learn(engine, settings, *, batches, tasks=None, ledger=None, seed=0, step_s=None, **more):
    """A whole run of a fake learner; returns it with its ledger."""
    ledger = ledger or Ledger(":memory:")
    tasks = tasks or {"sums": TaskSettings(group_size=2)}
    task_specs = {name: TaskSpec(engine, task_settings) for name, task_settings in tasks.items()}
    orchestrator = Orchestrator(task_specs, settings, ledger, seed=seed, **more)
    async with LiveBatchSource(orchestrator, batches=batches) as collect:
        learner = Learner(collect, engine, **({"step_s": step_s} if step_s else {}))
        await learner.run(batches)
        return learner, ledger


FAILURES = {
    kind: Failure(kind=kind, where=where, what="planted")
    for kind, where in [
        ("world", "start"),
        ("grader", "grade"),
        ("infrastructure", "engine"),
        ("time", "policy"),
    ]
}
