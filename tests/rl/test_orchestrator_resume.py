"""Killed at any point and resumed: no group is lost or trained twice, no token of lost weights."""

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
from tests.rollout.schedules import schedule, token_staleness
from tests.rollout.virtual_time import BASE, FAILURES, Engine, Learner, content, number, run


class Killed(BaseException):
    """As by kill -9: what was committed stays, an open transaction does not."""


class KillableLedger(Ledger):
    """Raises `Killed` at its n-th statement, before or after it; counts are checked until then."""

    def __init__(self, path, *, dies_at):
        super().__init__(path)
        self._base = _KillableConnection(self._base, dies_at, self)


class _KillableConnection:
    def __init__(self, base, dies_at, ledger):
        self._real, self._statements_left, self._ledger, self._after = (
            base,
            dies_at,
            ledger,
            dies_at % 2,
        )

    def execute(self, *args):
        self._statements_left -= 1
        if self._statements_left < 0 or (self._statements_left == 0 and not self._after):
            raise Killed
        found = self._real.execute(*args)
        if self._statements_left <= 0:
            raise Killed
        if not self._real.in_transaction and self._statements_left % 7 == 0:
            self.check()
        return found

    def check(self):
        base, self._ledger._base = self._ledger._base, self._real
        assert self._ledger.group_counts().is_consistent
        self._ledger._base = base

    def __getattr__(self, name):
        return getattr(self._real, name)


class Disk:
    """What survives a process: the ledger file and the checkpoints."""

    def __init__(self, folder, *, every):
        self.path, self.every = folder / "ledger.sqlite", every
        self.saved = {0: "start"}

    def save(self, updates, weights):
        if updates % self.every == 0:
            self.saved[updates] = weights


async def run_process(disk, settings, tasks, engine, *, batches, step_s, dies_at=None, of=None):
    """One process: resumes from the newest checkpoint and runs until it finishes or is killed."""
    ledger = KillableLedger(disk.path, dies_at=dies_at) if dies_at else Ledger(disk.path)
    updates = max(disk.saved)
    engine.weights = dict(disk.saved)
    engine.version = updates
    task_specs = {name: TaskSpec(engine, task_settings) for name, task_settings in tasks.items()}
    engine.barrier = RequestBarrier() if settings.deterministic else None
    orchestrator = Orchestrator(task_specs, settings, ledger, seed=5, barrier=engine.barrier)
    try:
        async with LiveBatchSource(orchestrator, batches=of or batches) as collect:
            collect.resume(updates)
            learner = Learner(collect, engine, step_s, disk.save, disk.saved[updates], updates)
            await learner.run(batches)
            return learner
    finally:
        if dies_at:
            ledger._base._real.close()  # an open transaction is rolled back
        else:
            ledger.close()


def kill_and_resume(disk, make, *, deaths, batches):
    """Be killed `deaths` times at random points, then finish; returns the last learner."""
    rng = Random(deaths)
    died = 0
    for dies_at in [*(rng.randint(5, 90) for _ in range(deaths)), None]:
        settings, tasks, engine, step_s = make()
        try:
            learner, _ = run(
                run_process(
                    disk, settings, tasks, engine, batches=batches, step_s=step_s, dies_at=dies_at
                )
            )
            assert died > 2  # otherwise the kills come too late to test anything
            return learner
        except Killed:
            died += 1
        with Ledger(disk.path) as ledger:
            assert ledger.group_counts().is_consistent
    raise AssertionError("never finished")


@pytest.mark.parametrize("n", range(12))
def test_an_asynchronous_run_skips_and_repeats_no_group(tmp_path, n):
    """And no token is trained that was sampled with weights the resumed run does not have."""
    disk = Disk(tmp_path, every=2 * schedule(n)[0].updates_per_batch)

    def make():
        return schedule(n)

    settings = make()[0]
    learner = kill_and_resume(disk, make, deaths=8, batches=8)
    ledger = Ledger(disk.path)
    trained = ledger.batches()
    assert [update for update, _, _ in trained] == list(
        range(0, 8 * settings.updates_per_batch, settings.updates_per_batch)
    )
    ids = Counter((e.task, e.number) for _, _, entries in trained for e in entries)
    assert max(ids.values()) == 1 and len(ids) == 8 * settings.groups_per_batch
    for task in {task for task, _ in ids}:
        numbers = sorted(e.number for e in ledger.groups() if e.task == task)
        assert numbers == list(range(len(numbers)))
    balance = ledger.group_counts()
    assert balance.is_consistent and balance.trained == 8 * settings.groups_per_batch
    assert balance.filtered == 0 or settings.on_stale == "drop"
    check_tokens(disk, ledger, settings, learner)


def check_tokens(disk, ledger, settings, learner):
    """Every trained token is what the surviving weights of its version sample."""
    weights = replayed(disk.path, settings)
    assert weights[-1] == learner.weights
    for update, until, entries in ledger.batches():
        for entry in entries:
            for member, rollout in ledger.rollouts(entry.ordinal).items():
                spec = RolloutSpec.derive(entry.task, entry.number, member, seed=5)
                ids = [t for b in rollout for turn in b.turns for t in turn.completion.token_ids]
                for position, token in enumerate(ids):
                    version = token // BASE
                    assert until - 1 - version <= settings.max_staleness
                    state = weights[version]
                    assert token % BASE == number(state, spec.seed, position) % BASE, update


def replayed(path, settings):
    """The initial weights and those after each update, recomputed from the ledger."""

    async def main():
        history, queue = ["start"], LedgerBatchSource(path)
        while (batch := await queue.next_batch()) is not None:
            assert max(token_staleness(batch, settings)) <= settings.max_staleness
            for _ in range(settings.updates_per_batch):
                history.append(await queue.await_or_fail(_hashed(history[-1], batch)))
            queue.mark_trained(batch)
            await queue.wait_quiescent()
        return history

    return run(main())[0]


def test_training_can_be_replayed_from_the_ledger(tmp_path):
    disk = Disk(tmp_path, every=1)
    settings, tasks, engine, step_s = schedule(3, on_stale="drop")
    learner, _ = run(run_process(disk, settings, tasks, engine, batches=6, step_s=step_s))

    assert replayed(disk.path, settings) == ["start", *learner.history]


def test_replaying_a_missing_ledger_raises(tmp_path):
    with pytest.raises(LedgerError, match="ledger not found"):
        LedgerBatchSource(tmp_path / "ledger.sqlite")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "x", "no ledger at all\n" * 100])
def test_a_file_that_is_not_a_ledger_is_rejected_and_left_unchanged(tmp_path, text):
    file = tmp_path / "notes.txt"
    file.write_text(text)
    with pytest.raises(LedgerError, match=r"notes\.txt: "):
        LedgerBatchSource(file)
    assert (file.read_text(), list(tmp_path.iterdir())) == (text, [file])


def test_replaying_a_ledger_of_another_format_raises(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.set_metadata("format", 99)
    with pytest.raises(LedgerError, match="expected ledger format 1, got 99"):
        LedgerBatchSource(tmp_path / "ledger.sqlite")


async def _hashed(weights, batch):
    return str(number(weights, content(batch)))


def deterministic_run(depth, *, delays=0):
    """Failing rollouts of different lengths, and a task that is down for a while; `delays` changes
    only when things happen."""
    settings = RolloutSettings(
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

    def outcome(spec, rng):
        draw, down = spec.seed % 10, spec.task == "t1" and spec.number in (1, 2, 3)
        return FAILURES["world"] if draw < 2 or down else Verdict(reward=float(draw % 2))

    engine = Engine(
        tokens=lambda spec, rng: 1 + spec.seed % 3,
        delay=lambda spec, rng: Random(f"{delays} {spec.session_id}").expovariate(1.0),
        outcome=outcome,
    )
    return settings, tasks, engine, lambda: 1.0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_deterministic_mode_does_not_depend_on_timing(tmp_path, depth):
    histories = []
    for delays in range(4):
        disk = Disk(tmp_path / str(delays), every=100)
        disk.path.parent.mkdir()
        settings, tasks, engine, step_s = deterministic_run(depth, delays=delays)
        learner, _ = run(run_process(disk, settings, tasks, engine, batches=9, step_s=step_s))
        histories.append(learner.history)
    assert len(histories[0]) == 9
    assert histories == [histories[0]] * 4
    with Ledger(disk.path) as ledger:
        whys = [row.why for row in ledger.task_weights()]
        assert whys[0] == "recipe" and whys[1].startswith("2 consecutive groups failed")
        assert "recovered" in whys


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("every", [1, 3])
def test_deterministic_mode_resumes_bitwise_identically(tmp_path, depth, every):
    whole = Disk(tmp_path / "whole", every=100)
    whole.path.parent.mkdir()
    settings, tasks, engine, step_s = deterministic_run(depth)
    expected, _ = run(run_process(whole, settings, tasks, engine, batches=8, step_s=step_s))
    disk = Disk(tmp_path / "killed", every=every)
    disk.path.parent.mkdir()
    deaths = 0

    def make():
        nonlocal deaths
        deaths += 1
        return deterministic_run(depth, delays=deaths)  # other delays after each resume

    learner = kill_and_resume(disk, make, deaths=12, batches=8)
    assert learner.weights == expected.weights
    for updates, weights in disk.saved.items():
        assert weights == ["start", *expected.history][updates]
    ledgers = [Ledger(whole.path), Ledger(disk.path)]
    rows = [
        [(e.ordinal, e.task, e.number, e.status, e.reason, e.trained) for e in ledger.groups()]
        for ledger in ledgers
    ]
    assert rows[0] == rows[1]


def test_a_task_may_be_removed_from_the_recipe(tmp_path):
    """Its groups are filtered with that reason."""
    disk = Disk(tmp_path, every=1)
    settings, _, engine, step_s = schedule(0, pipeline_depth=3, max_staleness=9, on_stale="wait")
    tasks = {"a": TaskSettings(group_size=2), "b": TaskSettings(group_size=2)}
    run(run_process(disk, settings, tasks, engine, batches=3, step_s=step_s, of=9))
    del tasks["b"]
    learner, _ = run(run_process(disk, settings, tasks, engine, batches=6, step_s=step_s))
    assert {group.task for batch in learner.batches for group in batch.groups} == {"a"}
    with Ledger(disk.path) as ledger:
        reasons = {e.reason for e in ledger.groups("filtered")}
        assert reasons == {"its task is not in the recipe any more"}
        assert ledger.group_counts().is_consistent


def test_a_checkpoint_of_another_run_is_rejected(tmp_path):
    disk = Disk(tmp_path, every=1)
    settings, tasks, engine, step_s = schedule(
        0, updates_per_batch=2, sync_weights_every=2, max_staleness=3
    )
    run(run_process(disk, settings, tasks, engine, batches=2, step_s=step_s))
    ledger = Ledger(disk.path)
    with pytest.raises(LedgerError, match="has 9 updates, but the ledger has 4"):
        ledger.rewind(9, whole=False)
    with pytest.raises(LedgerError, match="inside the batch trained from 2 to 4"):
        ledger.rewind(3, whole=False)
    task_specs = {name: TaskSpec(engine, task_settings) for name, task_settings in tasks.items()}

    async def other_seed():
        LiveBatchSource(Orchestrator(task_specs, settings, ledger, seed=6)).resume(4)

    with pytest.raises(LedgerError, match="the ledger has seed 5, the run has 6"):
        run(other_seed())


def run_orchestrator(folder, seed, *, calls=0):
    """Final weights and call count of an orchestrator process; empty if killed after `calls`."""
    command = [sys.executable, "-m", "tests.rl.orchestrator_process", folder, str(seed), str(calls)]
    root = Path(paddock.__file__).parents[1]
    text = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True).stdout.split()
    assert text[:1] in ([], ["done"])
    return text[1:]


@pytest.mark.slow
def test_an_orchestrator_killed_repeatedly_ends_with_the_same_weights(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    *expected, calls = run_orchestrator(whole, 0)
    rng = Random(1)
    for death in range(1, 5):  # each a fifth of the way at most
        assert run_orchestrator(killed, death, calls=rng.randrange(int(calls) // 5)) == []
        with Ledger(killed / "ledger.sqlite") as ledger:
            assert ledger.group_counts().is_consistent
    assert run_orchestrator(killed, 99)[:-1] == expected


def poison(ledger, ordinal):
    """Give a group's first rollout a reward outside the valid range."""
    branches = ledger.rollouts(ordinal)[0]
    for branch in branches:
        object.__setattr__(branch.outcome, "reward", 1e308)
    ledger._base.execute(
        "UPDATE attempts SET packed = ?, reward = 1e308 WHERE ordinal = ? AND member = 0",
        (pack_rollout(branches), ordinal),
    )


@pytest.mark.parametrize("status", ["finished", "in flight"])
def test_a_group_with_an_invalid_reward_is_dropped_with_an_event(tmp_path, status):
    settings = RolloutSettings(groups_per_batch=2, pipeline_depth=2, max_staleness=3)
    task_specs = {"sums": TaskSpec(Engine(), TaskSettings(group_size=2))}
    events = []

    async def main(batches):
        with Ledger(tmp_path / "ledger.sqlite") as ledger:
            orchestrator = Orchestrator(
                task_specs,
                settings,
                ledger,
                seed=0,
                log_event=lambda kind, **more: events.append((kind, more)),
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
        if status == "in flight":  # as if killed before its end was recorded
            ledger._base.execute(
                "UPDATE groups SET status = 'in flight', ended = NULL WHERE ordinal = ?",
                (poisoned,),
            )
    run(main(2))
    dropped = [more for kind, more in events if kind == "group_dropped"]
    assert [(more["group"], more["task"]) for more in dropped] == [(poisoned, "sums")]
    assert "reward" in dropped[0]["why"] and "1e+308" in dropped[0]["why"]
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        (entry,) = [e for e in ledger.groups() if e.ordinal == poisoned]
        assert entry.status == "filtered" and "1e+308" in entry.reason
        assert len(ledger.groups("trained")) == 4 and ledger.group_counts().is_consistent
