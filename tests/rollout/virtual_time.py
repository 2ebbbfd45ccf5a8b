"""Time that passes only when nothing else is to be done, an engine whose tokens say which weights
sampled them, and a learner whose weights say what they were trained on."""

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
    """Everybody waits for somebody."""


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
    """What `main` returns, and how many virtual seconds it took."""
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
    """Samples with the weights it was given last. `delay` says how long a token takes."""

    weights: dict = field(default_factory=lambda: {0: "start"})
    version: int = 0
    delay: object = lambda given, rng: rng.expovariate(1.0)
    tokens: object = lambda given, rng: rng.randint(1, 4)
    outcome: object = lambda given, rng: Verdict(reward=float(rng.random() < 0.5))
    seed: int = 0
    eager: bool = False  # the first token is written at once
    waves: RequestBarrier | None = None

    def push(self, version, weights):
        self.weights[version] = weights
        self.version = version

    async def __call__(self, given):
        rng = Random(f"{self.seed} {given.session_id}")
        ids, versions = [], []
        for place in range(self.tokens(given, rng)):
            await asyncio.sleep(0.0 if self.eager and not place else self.delay(given, rng))
            version, token = await self._sampled(given, place)
            versions.append(version)
            ids.append(token)
        return [trajectory(given, ids, versions, self.outcome(given, rng))]

    async def _sampled(self, given, place):
        async def sample():
            state = self.weights[self.version]
            return self.version, self.version * BASE + number(state, given.seed, place) % BASE

        return await (self.waves.submit(given.session_id, sample) if self.waves else sample())


def trajectory(given, ids, versions, outcome):
    segments = tuple(Segment(version, 1) for version in versions)
    completion = Completion(
        token_ids=tuple(ids), logprobs=(-0.5,) * len(ids), versions=segments, finish="stop"
    )
    turns = (Turn(added_ids=(1,), completion=completion),) if ids else ()
    return Trajectory(
        task_id=given.task_id,
        group_id=given.group_id,
        session_id=given.session_id,
        turns=turns,
        outcome=outcome,
    )


def sampled(group):
    """Every token of a group, as the engine wrote it."""
    turns = [turn for attempt in group.rollouts for branch in attempt for turn in branch.turns]
    return [token for turn in turns for token in turn.completion.token_ids]


def content(batch):
    """All that a learner sees of a batch."""
    return [
        (group.task, group.number, [sampled(group), [str(o) for o in group.outcomes]])
        for group in batch.groups
    ]


@dataclass
class Learner:
    """The loop of a learner; an update takes `step_s` and hashes the batch into the weights."""

    collect: LiveBatchSource
    engine: Engine
    step_s: object = lambda: 1.0
    save: object = None  # is told (updates, weights) at every border
    weights: str = "start"
    updates: int = 0
    batches: list = field(default_factory=list)
    history: list = field(default_factory=list)  # the weights after each update

    async def run(self, batches):
        pace = self.collect._settings
        for _ in range(batches):
            batch = await self.collect.next_batch()
            if batch is None:
                return self
            assert batch.update == self.updates
            for _ in range(pace.updates_per_batch):
                await self.collect.await_or_fail(asyncio.sleep(self.step_s()))
                self.weights = str(number(self.weights, content(batch)))
                self.updates += 1
                self.history.append(self.weights)
            self.batches.append(batch)
            self.collect.mark_trained(batch)
            await self.collect.wait_quiescent()
            if self.save:
                self.save(self.updates, self.weights)
            if self.updates - self.engine.version >= pace.sync_weights_every:
                self.engine.push(self.updates, self.weights)
                self.collect.mark_published(self.updates)
        return self


async def learn(engine, pace, *, batches, tasks=None, ledger=None, seed=0, step_s=None, **more):
    """A whole run of a fake learner; returns it with its ledger."""
    ledger = ledger or Ledger(":memory:")
    tasks = tasks or {"sums": TaskSettings(group_size=2)}
    works = {name: TaskSpec(engine, settings) for name, settings in tasks.items()}
    orchestrator = Orchestrator(works, pace, ledger, seed=seed, **more)
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
