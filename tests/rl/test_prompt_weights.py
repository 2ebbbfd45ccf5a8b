"""Prompt weights and task files in real runs: fewer tries of what teaches nothing, exact resume."""

import json

import pytest

from paddock.cli.errors import UserError
from paddock.cli.rl import run_rl
from paddock.envs import make
from paddock.journal import Ledger
from paddock.launch.rollouts import LEDGER_FILE
from paddock.rl.learner import Learner
from tests.rl.vault_runs import DETERMINISTIC, ONE_STEP_OFF, Hashes, numbers, recipe_in

WEIGHTED = (
    *DETERMINISTIC,
    *ONE_STEP_OFF,
    "steps=5",
    "tasks.vault.num_tasks=5",
    "tasks.vault.prompt_weights.min_weight=0.05",
)


class Killed(BaseException):
    """Stands for the end of the process."""


def drawn(run):
    """Every group in the order of issue, and every number that was skipped."""
    with Ledger(run / LEDGER_FILE) as ledger:
        assert ledger.group_counts().is_consistent
        skipped = ledger._base.execute("SELECT task, number, issued FROM skipped").fetchall()
        return [(g.task, g.number, g.status, g.ended) for g in ledger.groups()], skipped


def kill_at(patch, update):
    train = Learner.train

    def dying(learner, groups):
        if learner.updates == update:
            raise Killed
        return train(learner, groups)

    patch.setattr(Learner, "train", dying)


def test_a_resumed_run_draws_the_same_prompts(start, tmp_path, monkeypatch):
    hashes = Hashes(monkeypatch)
    recipe = recipe_in(tmp_path, start)
    run_rl(recipe, tmp_path / "through", WEIGHTED)
    expected, found = hashes.take(), {}
    for update in (3, 4, None):
        with pytest.MonkeyPatch.context() as patch:
            if update is None:
                run_rl(recipe, tmp_path / "killed", WEIGHTED)
            else:
                kill_at(patch, update)
                with pytest.raises(Killed):
                    run_rl(recipe, tmp_path / "killed", WEIGHTED)
        found |= hashes.take()
    groups, skipped = drawn(tmp_path / "through")
    assert len(skipped) >= 3
    assert (groups, skipped) == drawn(tmp_path / "killed")
    assert found == expected
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "through")


def test_a_task_file_selects_the_tasks(start, tmp_path):
    vaults = make("vault")
    rows = [{"task_index": i, "task_id": vaults.task(i).id, "pass_rate": 0.5} for i in (7, 2)]
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    chosen = [f"tasks.vault.task_file={file}", "steps=2", "credit.keep_zero_variance=true"]
    run_rl(recipe_in(tmp_path, start), tmp_path / "run", chosen)
    with Ledger(tmp_path / "run" / LEDGER_FILE) as ledger:
        tasks = {
            (g.number, rollout[0].task_id)
            for g in ledger.groups()
            for rollout in ledger.rollouts(g.ordinal).values()
        }
    expected = {number: rows[number % 2]["task_id"] for number, _ in tasks}
    assert len(expected) > 2 and tasks == set(expected.items())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["tasks.vault.prompt_weights.min_weight=0.2"], "set 'tasks.vault.num_tasks'"),
        (["tasks.vault.task_file={file}"], "it was sampled with other settings"),
        (["tasks.vault.task_file={file}", "tasks.vault.num_tasks=3"], "exclude each other"),
    ],
)
def test_what_cannot_be_drawn_is_refused(start, tmp_path, overrides, message):
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"task_index": 1, "task_id": "chain/1"}) + "\n")
    sets = [each.format(file=file) for each in overrides]
    with pytest.raises((UserError, ValueError), match=message):
        run_rl(recipe_in(tmp_path, start), tmp_path / "run", sets)
