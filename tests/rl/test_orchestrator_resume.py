"""Killed at any moment and taken up again: nothing lost, nothing twice, nothing of lost weights."""

import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest

import paddock
from paddock.journal import Ledger, LedgerError
from paddock.journal.rollout_codec import pack_rollout
from paddock.records import Verdict
from paddock.rl.batch_source import LedgerBatchSource
from paddock.rl.live_batches import LiveBatchSource
from paddock.rollout.deterministic import RequestBarrier
from paddock.rollout.orchestrator import Orchestrator, TaskSpec
from paddock.rollout.settings import RolloutSettings, TaskSettings
from paddock.rollout.task_schedule import RolloutSpec
from tests.rollout.schedules import lags, schedule
from tests.rollout.virtual_time import BASE, FAILURES, Engine, Learner, content, number, run


class Killed(BaseException):
    """As by kill -9: what was committed stays, an open transaction does not."""


class Mortal(Ledger):
    """Dies at its n-th statement, before or after it, and balances at every one until then."""

    def __init__(self, path, *, lives):
        super().__init__(path)
        self._base = _Mortal(self._base, lives, self)


class _Mortal:
    def __init__(self, base, lives, ledger):
        self._real, self._lives, self._ledger, self._after = base, lives, ledger, lives % 2

    def execute(self, *args):
        self._lives -= 1
        if self._lives < 0 or (self._lives == 0 and not self._after):
            raise Killed
        found = self._real.execute(*args)
        if self._lives <= 0:
            raise Killed
        if not self._real.in_transaction and self._lives % 7 == 0:
            self.check()
        return found

    def check(self):
        base, self._ledger._base = self._ledger._base, self._real
        assert self._ledger.group_counts().is_consistent
        self._ledger._base = base

    def __getattr__(self, name):
        return getattr(self._real, name)


class Disk:
    """What outlives a process: the ledger's file and the checkpoints."""

    def __init__(self, folder, *, every):
        self.path, self.every = folder / "ledger.sqlite", every
        self.saved = {0: "start"}

    def save(self, updates, weights):
        if updates % self.every == 0:
            self.saved[updates] = weights


async def live(disk, pace, tasks, engine, *, batches, step_s, lives=None, of=None):
    """One process: takes up the newest checkpoint, and goes on until it is done or dies."""
    ledger = Mortal(disk.path, lives=lives) if lives else Ledger(disk.path)
    updates = max(disk.saved)
    engine.weights = dict(disk.saved)
    engine.version = updates
    works = {name: TaskSpec(engine, settings) for name, settings in tasks.items()}
    engine.waves = RequestBarrier() if pace.deterministic else None
    orchestrator = Orchestrator(works, pace, ledger, seed=5, barrier=engine.waves)
    try:
        async with LiveBatchSource(orchestrator, batches=of or batches) as collect:
            collect.resume(updates)
            learner = Learner(collect, engine, step_s, disk.save, disk.saved[updates], updates)
            await learner.run(batches)
            return learner
    finally:
        if lives:
            ledger._base._real.close()  # an open transaction is rolled back
        else:
            ledger.close()


def die_and_live(disk, make, *, deaths, batches):
    """Die so many times at random moments, then finish; the last learner."""
    rng = Random(deaths)
    died = 0
    for lives in [*(rng.randint(5, 90) for _ in range(deaths)), None]:
        pace, tasks, engine, step_s = make()
        try:
            learner, _ = run(
                live(disk, pace, tasks, engine, batches=batches, step_s=step_s, lives=lives)
            )
            assert died > 2  # or the deaths come too late to mean anything
            return learner
        except Killed:
            died += 1
        with Ledger(disk.path) as ledger:
            assert ledger.group_counts().is_consistent
    raise AssertionError("never finished")


@pytest.mark.parametrize("n", range(12))
def test_free_running_none_is_skipped_and_none_is_repeated(tmp_path, n):
    """And no token is trained that weights sampled which the resumed run does not have."""
    disk = Disk(tmp_path, every=2 * schedule(n)[0].updates_per_batch)

    def make():
        return schedule(n)

    pace = make()[0]
    learner = die_and_live(disk, make, deaths=8, batches=8)
    ledger = Ledger(disk.path)
    trained = ledger.batches()
    assert [update for update, _, _ in trained] == list(
        range(0, 8 * pace.updates_per_batch, pace.updates_per_batch)
    )
    ids = Counter((e.task, e.number) for _, _, entries in trained for e in entries)
    assert max(ids.values()) == 1 and len(ids) == 8 * pace.groups_per_batch
    for task in {task for task, _ in ids}:
        numbers = sorted(e.number for e in ledger.groups() if e.task == task)
        assert numbers == list(range(len(numbers)))
    balance = ledger.group_counts()
    assert balance.is_consistent and balance.trained == 8 * pace.groups_per_batch
    assert balance.filtered == 0 or pace.on_stale == "drop"
    check_tokens(disk, ledger, pace, learner)


def check_tokens(disk, ledger, pace, learner):
    """Every trained token is what the surviving weights of its version write."""
    weights = replayed(disk.path, pace)
    assert weights[-1] == learner.weights
    for update, until, entries in ledger.batches():
        for entry in entries:
            for member, attempt in ledger.rollouts(entry.ordinal).items():
                given = RolloutSpec.derive(entry.task, entry.number, member, seed=5)
                ids = [t for b in attempt for turn in b.turns for t in turn.completion.token_ids]
                for place, token in enumerate(ids):
                    version = token // BASE
                    assert until - 1 - version <= pace.max_staleness
                    state = weights[version]
                    assert token % BASE == number(state, given.seed, place) % BASE, update


def replayed(path, pace):
    """The weights at the beginning and after each update, from the ledger alone."""

    async def main():
        history, queue = ["start"], LedgerBatchSource(path)
        while (batch := await queue.next_batch()) is not None:
            assert max(lags(batch, pace)) <= pace.max_staleness
            for _ in range(pace.updates_per_batch):
                history.append(await queue.await_or_fail(_hashed(history[-1], batch)))
            queue.mark_trained(batch)
            await queue.wait_quiescent()
        return history

    return run(main())[0]


def test_the_trainer_can_be_run_again_from_the_ledger_alone(tmp_path):
    disk = Disk(tmp_path, every=1)
    pace, tasks, engine, step_s = schedule(3, on_stale="drop")
    learner, _ = run(live(disk, pace, tasks, engine, batches=6, step_s=step_s))

    assert replayed(disk.path, pace) == ["start", *learner.history]


def test_a_replay_of_nothing_is_refused(tmp_path):
    with pytest.raises(LedgerError, match="no such ledger"):
        LedgerBatchSource(tmp_path / "ledger.sqlite")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("said", ["", "x", "no ledger at all\n" * 100])
def test_a_file_that_is_no_ledger_is_refused_and_left_as_it_is(tmp_path, said):
    file = tmp_path / "notes.txt"
    file.write_text(said)
    with pytest.raises(LedgerError, match=r"notes\.txt: "):
        LedgerBatchSource(file)
    assert (file.read_text(), list(tmp_path.iterdir())) == (said, [file])


def test_a_replay_of_a_ledger_of_another_format_is_refused(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.set_metadata("format", 99)
    with pytest.raises(LedgerError, match="expected ledger format 1, got 99"):
        LedgerBatchSource(tmp_path / "ledger.sqlite")


async def _hashed(weights, batch):
    return str(number(weights, content(batch)))


def lockstep(depth, *, delays=0):
    """A run whose attempts fail or are of different lengths, and one of whose tasks is down for a
    while; `delays` changes only when something happens."""
    pace = RolloutSettings(
        groups_per_batch=3,
        pipeline_depth=depth,
        max_staleness=depth,
        order="in_order",
        deterministic=True,
        max_concurrent=7,
        min_concurrent=1,
        retry_disabled_after=1,
    )
    tasks = {
        "t0": TaskSettings(group_size=2, ratio=2.0),
        "t1": TaskSettings(group_size=3, max_consecutive_failed=2),
    }

    def outcome(given, rng):
        chance, down = given.seed % 10, given.task == "t1" and given.number in (1, 2, 3)
        return FAILURES["world"] if chance < 2 or down else Verdict(reward=float(chance % 2))

    engine = Engine(
        tokens=lambda given, rng: 1 + given.seed % 3,
        delay=lambda given, rng: Random(f"{delays} {given.session_id}").expovariate(1.0),
        outcome=outcome,
    )
    return pace, tasks, engine, lambda: 1.0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_lockstep_does_not_depend_on_who_was_quick(tmp_path, depth):
    histories = []
    for delays in range(4):
        disk = Disk(tmp_path / str(delays), every=100)
        disk.path.parent.mkdir()
        pace, tasks, engine, step_s = lockstep(depth, delays=delays)
        learner, _ = run(live(disk, pace, tasks, engine, batches=9, step_s=step_s))
        histories.append(learner.history)
    assert len(histories[0]) == 9
    assert histories == [histories[0]] * 4
    with Ledger(disk.path) as ledger:
        whys = [row.why for row in ledger.task_weights()]
        assert whys[0] == "recipe" and whys[1].startswith("2 consecutive groups failed")
        assert "recovered" in whys


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("every", [1, 3])
def test_lockstep_resumes_bit_by_bit(tmp_path, depth, every):
    whole = Disk(tmp_path / "whole", every=100)
    whole.path.parent.mkdir()
    pace, tasks, engine, step_s = lockstep(depth)
    expected, _ = run(live(whole, pace, tasks, engine, batches=8, step_s=step_s))
    disk = Disk(tmp_path / "killed", every=every)
    disk.path.parent.mkdir()
    deaths = 0

    def make():
        nonlocal deaths
        deaths += 1
        return lockstep(depth, delays=deaths)  # nor on how long anything took the next time

    learner = die_and_live(disk, make, deaths=12, batches=8)
    assert learner.weights == expected.weights
    for updates, weights in disk.saved.items():
        assert weights == ["start", *expected.history][updates]
    ledgers = [Ledger(whole.path), Ledger(disk.path)]
    rows = [
        [(e.ordinal, e.task, e.number, e.status, e.reason, e.trained) for e in ledger.groups()]
        for ledger in ledgers
    ]
    assert rows[0] == rows[1]


def test_a_task_may_leave_the_recipe(tmp_path):
    """What was begun for it is not trained, and says why."""
    disk = Disk(tmp_path, every=1)
    pace, _, engine, step_s = schedule(0, pipeline_depth=3, max_staleness=9, on_stale="wait")
    tasks = {"a": TaskSettings(group_size=2), "b": TaskSettings(group_size=2)}
    run(live(disk, pace, tasks, engine, batches=3, step_s=step_s, of=9))
    del tasks["b"]
    learner, _ = run(live(disk, pace, tasks, engine, batches=6, step_s=step_s))
    assert {group.task for batch in learner.batches for group in batch.groups} == {"a"}
    with Ledger(disk.path) as ledger:
        reasons = {e.reason for e in ledger.groups("filtered")}
        assert reasons == {"its task is not in the recipe any more"}
        assert ledger.group_counts().is_consistent


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    disk = Disk(tmp_path, every=1)
    pace, tasks, engine, step_s = schedule(
        0, updates_per_batch=2, sync_weights_every=2, max_staleness=3
    )
    run(live(disk, pace, tasks, engine, batches=2, step_s=step_s))
    ledger = Ledger(disk.path)
    with pytest.raises(LedgerError, match="has 9 updates, but the ledger has 4"):
        ledger.rewind(9, whole=False)
    with pytest.raises(LedgerError, match="inside the batch trained from 2 to 4"):
        ledger.rewind(3, whole=False)
    works = {name: TaskSpec(engine, settings) for name, settings in tasks.items()}

    async def other_seed():
        LiveBatchSource(Orchestrator(works, pace, ledger, seed=6)).resume(4)

    with pytest.raises(LedgerError, match="the ledger has seed 5, the run has 6"):
        run(other_seed())


def lived(folder, seed, *, calls=0):
    """A conductor's weights at last and the calls it made; nothing if it died after `calls`."""
    command = [sys.executable, "-m", "tests.rl.orchestrator_process", folder, str(seed), str(calls)]
    root = Path(paddock.__file__).parents[1]
    said = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True).stdout.split()
    assert said[:1] in ([], ["done"])
    return said[1:]


@pytest.mark.slow
def test_a_conductor_that_is_killed_again_and_again_ends_with_the_same_weights(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    *expected, calls = lived(whole, 0)
    rng = Random(1)
    for death in range(1, 5):  # each a fifth of the way at most
        assert lived(killed, death, calls=rng.randrange(int(calls) // 5)) == []
        with Ledger(killed / "ledger.sqlite") as ledger:
            assert ledger.group_counts().is_consistent
    assert lived(killed, 99)[:-1] == expected


def poison(ledger, ordinal):
    """Make a group's first attempt what a grader without a range once wrote."""
    branches = ledger.rollouts(ordinal)[0]
    for branch in branches:
        object.__setattr__(branch.outcome, "reward", 1e308)
    ledger._base.execute(
        "UPDATE attempts SET packed = ?, reward = 1e308 WHERE ordinal = ? AND member = 0",
        (pack_rollout(branches), ordinal),
    )


@pytest.mark.parametrize("status", ["finished", "in flight"])
def test_a_poisoned_group_is_dropped_with_an_event_and_the_run_goes_on(tmp_path, status):
    pace = RolloutSettings(groups_per_batch=2, pipeline_depth=2, max_staleness=3)
    works = {"sums": TaskSpec(Engine(), TaskSettings(group_size=2))}
    told = []

    async def main(batches):
        with Ledger(tmp_path / "ledger.sqlite") as ledger:
            orchestrator = Orchestrator(
                works,
                pace,
                ledger,
                seed=0,
                log_event=lambda kind, **more: told.append((kind, more)),
            )
            async with LiveBatchSource(orchestrator) as collect:
                if batches is None:  # one batch is ready and nothing of it is trained
                    await collect.next_batch()
                else:
                    await Learner(collect, Engine()).run(batches)

    run(main(None))
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        poisoned = ledger.groups("finished")[0].ordinal
        poison(ledger, poisoned)
        if status == "in flight":  # as if killed before its end was written
            ledger._base.execute(
                "UPDATE groups SET status = 'in flight', ended = NULL WHERE ordinal = ?",
                (poisoned,),
            )
    run(main(2))
    dropped = [more for kind, more in told if kind == "group_dropped"]
    assert [(more["group"], more["task"]) for more in dropped] == [(poisoned, "sums")]
    assert "reward" in dropped[0]["why"] and "1e+308" in dropped[0]["why"]
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        (entry,) = [e for e in ledger.groups() if e.ordinal == poisoned]
        assert entry.status == "filtered" and "1e+308" in entry.reason
        assert len(ledger.groups("trained")) == 4 and ledger.group_counts().is_consistent
