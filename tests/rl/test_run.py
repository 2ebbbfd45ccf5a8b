"""`paddock rl` end to end: engine, environments, orchestrator and trainer in one process."""

import asyncio
import shutil
from functools import partial

import pytest

from paddock.checkpoint import CheckpointError
from paddock.cli.errors import UserError
from paddock.cli.rl import run_rl
from paddock.dashboard.rollouts import RolloutQuery, rollout_overview
from paddock.journal import UNUSED_REASON, Journal, Ledger, LedgerView
from paddock.launch.engines import open_model_folder
from paddock.launch.rollout_engines import open_engines, paused
from paddock.launch.rollouts import LEDGER_FILE, _worker, task_spec
from paddock.records import Failure
from paddock.rl.group_filter import GroupFilter
from paddock.rl.learner import Learner, open_learner
from paddock.rl.trainer import policy_samples
from paddock.rollout.deterministic import DeterministicClient, RequestBarrier
from paddock.rollout.group import RolloutGroup
from paddock.rollout.task_health import RunAbortedError
from paddock.rollout.task_schedule import RolloutSpec
from tests.rl.vault_runs import (
    DETERMINISTIC,
    ONE_STEP_OFF,
    SYNCHRONOUS,
    Hashes,
    events,
    numbers,
    recipe_in,
    settings_of,
)

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


class Killed(BaseException):
    """Stands for the end of the process."""


async def by_hand(settings, folder, updates):
    """A minimal synchronous loop: roll out, assign credit, train, publish."""
    model = open_model_folder(folder, None)
    learner = open_learner(settings, folder / "x.npz")
    async with open_engines(settings, model) as sampling:
        barrier = RequestBarrier(partial(paused, sampling.engines[0]))
        generate = DeterministicClient(sampling.generate, barrier)
        common = _worker(settings, model, generate, sampling)
        work = task_spec(settings, "vault", common, GroupFilter(settings))
        size = settings.rollout.groups_per_batch
        for update in range(updates):
            which = range(update * size, (update + 1) * size)
            groups = await run_together(work, barrier, which, settings.seed)
            learner.train([policy_samples(group, settings) for group in groups])
            if settings.reset_optimizer:
                learner.reset_optimizer()
            await asyncio.to_thread(sampling.publish_weights, learner.weights())


async def run_together(work, barrier, which, seed):
    specs = [
        RolloutSpec.derive("vault", number, member, seed=seed)
        for number in which
        for member in range(work.settings.group_size)
    ]
    for each in specs:
        barrier.join(each.session_id)

    async def one(each):
        try:
            return tuple(await work.rollout_fn(each))
        finally:
            barrier.leave(each.session_id)

    outputs = await asyncio.gather(*map(one, specs))
    size = work.settings.group_size
    return [
        RolloutGroup(
            ordinal=n, task="vault", number=n, rollouts=tuple(outputs[i * size : (i + 1) * size])
        )
        for i, n in enumerate(which)
    ]


def test_max_staleness_zero_equals_the_synchronous_loop(start, tmp_path, monkeypatch):
    hashes = Hashes(monkeypatch)
    recipe = recipe_in(tmp_path, start)
    # Every group is kept: a replacement group would start between barriers, and the composition of
    # a batch decides how the engine rounds.
    kept = [*DETERMINISTIC, "credit.keep_zero_variance=true"]
    asyncio.run(by_hand(settings_of(recipe, *kept, *SYNCHRONOUS), start, 3))
    expected = hashes.take()
    assert len({str(found) for found in expected.values()}) == 3
    for depth in (0, 2):
        sets = [*kept, "steps=3", "rollout.max_staleness=0", f"rollout.pipeline_depth={depth}"]
        run_rl(recipe, tmp_path / f"depth{depth}", sets)
        assert hashes.take() == expected


@pytest.fixture(scope="module")
def through(start, tmp_path_factory):
    """An uninterrupted one-step-off run: its folder and its weights."""
    folder = tmp_path_factory.mktemp("through")
    with pytest.MonkeyPatch.context() as patch:
        hashes = Hashes(patch)
        run_rl(recipe_in(folder, start), folder / "run", [*DETERMINISTIC, *ONE_STEP_OFF])
    return folder / "run", hashes.take()


def test_a_one_step_off_run_has_staleness_one(through):
    run, hashes = through
    assert sorted(hashes) == [1, 2, 3, 4]
    token_staleness = [line["staleness_max"] for line in numbers(run).values()]
    assert token_staleness == [0, 1, 1, 1]
    with Ledger(run / LEDGER_FILE) as ledger:
        assert ledger.group_counts().in_flight == 0


@pytest.mark.parametrize("moment", ["train", "publish", "save", "rollout"])
def test_a_killed_run_resumes_bitwise_identically(through, start, tmp_path, monkeypatch, moment):
    """Killed twice at the given point, then run to its end."""
    undisturbed, expected = through
    hashes, found = Hashes(monkeypatch), {}
    recipe = recipe_in(tmp_path, start)
    for countdown in (2, 1, None):
        with pytest.MonkeyPatch.context() as patch:
            kill_during(patch, moment, countdown)
            try:
                run_rl(recipe, tmp_path / "run", [*DETERMINISTIC, *ONE_STEP_OFF])
            except Killed:
                assert countdown is not None
            else:
                assert countdown is None
        found |= hashes.take()
    assert found == expected
    assert numbers(tmp_path / "run") == numbers(undisturbed)


def kill_during(patch, moment, countdown):
    """Raise `Killed` in the call after `countdown` more calls."""
    import paddock.launch.rollout_engines as rl_engines
    from paddock.rollout.worker import RolloutWorker

    owner, name = {
        "train": (Learner, "train"),
        "save": (Learner, "save"),
        "publish": (rl_engines, "_publisher"),
        "rollout": (RolloutWorker, "rollout"),
    }[moment]
    left = {"n": countdown}
    whole = getattr(owner, name)

    def due():
        if left["n"] is None:
            return False
        left["n"] -= 1
        return left["n"] < 0

    if moment == "publish":

        def publisher(*args):
            publish = whole(*args)

            def broken(new_weights):
                if due():
                    raise Killed
                publish(new_weights)

            return broken

        patch.setattr(owner, name, publisher)
        return

    def broken(*args, **kwargs):
        if due():
            raise Killed
        return whole(*args, **kwargs)

    if moment == "rollout":
        left["n"] = None if countdown is None else 9 * countdown
    patch.setattr(owner, name, broken)


def test_training_from_recorded_batches_gives_the_same_weights(
    through, start, tmp_path, monkeypatch
):
    run, expected = through
    hashes = Hashes(monkeypatch)
    recipe = recipe_in(tmp_path, start)
    run_rl(
        recipe,
        tmp_path / "again",
        [*DETERMINISTIC, *ONE_STEP_OFF],
        debug="train-only",
        replay=run,
    )
    assert hashes.take() == expected


def test_rollout_only_records_batches_and_leaves_the_weights_unchanged(start, tmp_path):
    recipe = recipe_in(tmp_path, start)
    run_rl(recipe, tmp_path / "run", ["steps=2", *SYNCHRONOUS], debug="rollout-only")
    with Ledger(tmp_path / "run" / LEDGER_FILE) as ledger:
        balance = ledger.group_counts()
        assert balance.trained == 4
    found = (tmp_path / "run" / "checkpoints" / "step-00000002" / "model").glob("*.safetensors")
    assert [f.read_bytes() for f in found] == [f.read_bytes() for f in start.glob("*.safetensors")]


def test_a_recipe_chooses_the_context_management_of_its_task(start, tmp_path):
    rule = [
        f"tasks.vault.context_management.{key}" for key in ("strategy=discard_all", "max_tokens=1")
    ]
    sets = ["steps=1", *rule, *SYNCHRONOUS]
    run_rl(recipe_in(tmp_path, start), tmp_path / "run", sets, debug="rollout-only")
    with Ledger(tmp_path / "run" / LEDGER_FILE) as ledger:
        found = [b for e in ledger.groups() for b in ledger.rollouts(e.ordinal).values()]
    assert max(len(branches) for branches in found) > 1
    assert {len(branch.turns) for branches in found for branch in branches} == {1}


def test_a_bug_ends_the_run_with_its_traceback(start, tmp_path, monkeypatch):
    from paddock.rollout.worker import SessionPolicy

    async def broken(*_):
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(SessionPolicy, "__call__", broken)
    with pytest.raises(ZeroDivisionError, match="a bug of ours"):
        run_rl(recipe_in(tmp_path, start), tmp_path / "run", [])


def test_an_environment_that_always_fails_ends_the_run_with_the_reason(start, tmp_path):
    sets = ["tasks.vault.args.breaks=1.0", "tasks.vault.max_consecutive_failed=3"]
    with pytest.raises(ValueError, match="consecutive groups failed"):
        run_rl(recipe_in(tmp_path, start), tmp_path / "run", sets)


@pytest.mark.parametrize("where", ["task", "open", "grade"])
def test_sys_exit_in_an_environment_is_counted_against_its_budget(start, tmp_path, where):
    sets = [f"tasks.vault.args.exits={where}", "tasks.vault.max_consecutive_failed=2"]
    kind = "grader" if where == "grade" else "world"
    label = Failure.kind_label(kind)
    with pytest.raises(RunAbortedError, match=f"2 consecutive groups failed.*{label} at {where}"):
        run_rl(recipe_in(tmp_path, start), tmp_path / "run", sets)
    with Ledger(tmp_path / "run" / LEDGER_FILE) as ledger:
        found = [a for e in ledger.groups() for a in ledger.rollouts(e.ordinal).values()]
    assert {branches[0].outcome.what for branches in found} == {"SystemExit: 0"}


def test_sys_exit_in_a_callback_is_an_error_and_not_a_success(start, tmp_path):
    """`sys.exit` in a callback or task that the environment started."""
    with pytest.raises(UserError, match=r"sys\.exit\(0\)"):
        run_rl(recipe_in(tmp_path, start), tmp_path / "run", ["tasks.vault.args.exits=aside"])


def test_environment_failures_are_counted_and_have_no_reward(start, tmp_path):
    sets = ["tasks.vault.args.breaks=0.2", "steps=2", "tasks.vault.max_consecutive_failed=100"]
    run_rl(recipe_in(tmp_path, start), tmp_path / "run", [*sets, *SYNCHRONOUS])
    failed = sum(line.get("failures/world", 0) for line in numbers(tmp_path / "run").values())
    with Ledger(tmp_path / "run" / LEDGER_FILE) as ledger:
        entries = ledger.groups()
        outputs = [a for e in entries for a in ledger.rollouts(e.ordinal).values()]
    assert failed > 0
    assert {type(a[0].outcome).__name__ for a in outputs} == {"Verdict", "Failure"}


def test_experts_of_every_trained_token_are_compared(start, tmp_path):
    sets = ["steps=2", *SYNCHRONOUS, "routing_replay=compare"]
    run_rl(recipe_in(tmp_path, start), tmp_path / "run", sets)
    found = [line["routing_mismatch"] for line in numbers(tmp_path / "run").values()]
    assert found == [0.0, 0.0]  # present, and the same network selects the same experts


def test_a_run_that_has_reached_stop_at_reward_is_finished(start, tmp_path):
    recipe, sets = recipe_in(tmp_path, start), ["steps=4", "stop_at_reward=0.01", "stop_window=2"]
    for _ in range(2):
        run_rl(recipe, tmp_path / "run", [*sets, *SYNCHRONOUS])
        assert [e["step"] for e in events(tmp_path / "run", "finished")][-1] == 2
        assert list(numbers(tmp_path / "run")) == [1, 2]


def test_a_finished_run_has_no_group_in_flight(start, tmp_path):
    """It stops while rollouts of the next batch are running; a second call reports the same."""
    recipe, out = recipe_in(tmp_path, start), tmp_path / "run"
    sets = ["steps=4", "stop_at_reward=0.01", "stop_window=1", "rollout.pipeline_depth=2"]
    for _ in range(2):
        run_rl(recipe, out, [*sets, "rollout.max_staleness=2", "credit.keep_zero_variance=true"])
        with LedgerView(out / LEDGER_FILE) as ledger:
            found = rollout_overview(ledger, RolloutQuery(status="filtered"))
        assert found["counts"]["in_flight"] == 0
        assert found["counts"]["filtered"] > 0
        assert sum(found["counts"].values()) == 2 * found["counts"]["issued"]
        assert {group["reason"] for group in found["groups"]} == {UNUSED_REASON}


def test_a_run_with_other_settings_is_rejected_in_the_same_folder(start, tmp_path):
    recipe = recipe_in(tmp_path, start)
    run_rl(recipe, tmp_path / "run", ["steps=1"])
    with pytest.raises(ValueError, match="holds a run with other settings"):
        run_rl(recipe, tmp_path / "run", ["steps=2"])
    shutil.rmtree(tmp_path / "run")


def test_rollouts_of_another_recipe_are_not_trained_even_without_a_checkpoint(start, tmp_path):
    recipe = recipe_in(tmp_path, start)
    with pytest.MonkeyPatch.context() as patch:
        kill_during(patch, "train", 0)
        with pytest.raises(Killed):
            run_rl(recipe, tmp_path / "run", [])
    assert not (tmp_path / "run" / "checkpoints").exists()
    with pytest.raises(ValueError, match="holds a run with other settings"):
        run_rl(recipe, tmp_path / "run", ["sampling.temperature=0.5"])


def test_a_second_process_does_not_overwrite_the_recipe_of_a_running_one(start, tmp_path):
    recipe, theirs = recipe_in(tmp_path, start), tmp_path / "run" / "recipe.toml"
    with Journal(tmp_path / "run"):
        theirs.write_text("recipe of the running process")
        with pytest.raises(BlockingIOError, match="is in use by another process"):
            run_rl(recipe, tmp_path / "run", [])
    assert theirs.read_text() == "recipe of the running process"


def test_a_run_resumes_bitwise_identically_from_the_checkpoint_before_a_damaged_one(
    through, start, tmp_path, monkeypatch
):
    undisturbed, expected = through
    run, recipe = shutil.copytree(undisturbed, tmp_path / "run"), recipe_in(tmp_path, start)
    newest = max((run / "checkpoints").glob("step-*"))
    file = newest / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(
        CheckpointError, match=r"step-00000003 is intact: .*`rm -r .*step-00000004`"
    ):
        run_rl(recipe, run, [*DETERMINISTIC, *ONE_STEP_OFF])
    shutil.rmtree(newest)
    hashes = Hashes(monkeypatch)
    run_rl(recipe, run, [*DETERMINISTIC, *ONE_STEP_OFF])
    assert hashes.take() == {4: expected[4]}


def test_a_run_writes_metrics_events_and_a_report(through):
    run, _ = through
    assert [e["step"] for e in events(run, "finished")] == [4]
    line = numbers(run)[4]
    for name in (
        "reward",
        "reward/vault",
        "logprob_diff",
        "masked",
        "entropy",
        "staleness",
        "zero_variance",
        "tokens",
    ):
        assert name in line, name
    assert (run / "report.html").is_file()


def test_the_default_thread_count_does_not_change_a_deterministic_run(
    through, start, tmp_path, monkeypatch
):
    """Several threads round differently from run to run: deterministic mode uses one."""
    monkeypatch.setattr("paddock.train.run.DEFAULT_THREADS", 2)
    _, expected = through
    hashes = Hashes(monkeypatch)
    run_rl(recipe_in(tmp_path, start), tmp_path / "run", [*DETERMINISTIC, *ONE_STEP_OFF])
    assert hashes.take() == expected
