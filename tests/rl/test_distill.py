import asyncio

import numpy as np
import pytest

from paddock.cli.rl import run_rl
from paddock.launch.rollout_engines import EngineTeacher
from paddock.rl.distill import DistillError, TaskTeacher, add_teacher_logprobs
from paddock.train.policy import compute_logprobs, pack_samples
from tests.rl.learners import learner, policy_samples
from tests.rl.nets import engine_for, network, prompts, rolled
from tests.rl.vault_env import pretrained_on_vault
from tests.rl.vault_runs import numbers, recipe_in

RECIPE = """
stage = "distill"
steps = 12
[init]
checkpoint = "{start}"
[teachers.opener]
checkpoint = "TEACHER"
[tasks.vault]
env = "vault"
teacher = "opener"
[rollout]
groups_per_batch = 64
deterministic = true
order = "in_order"
[loss]
aggregate = "token"
[sampling]
max_new_tokens = 24
[optim]
lr = 2e-3
weight_decay = 0.0
[compute]
device = "cpu"
[engines]
kv_cache_bytes = 8388608
"""


def test_teacher_logprobs_equal_those_of_a_trainer(tmp_path):
    made = learner(tmp_path, network(), credit={"keep_zero_variance": True})
    groups = policy_samples(rolled_by(network()), made.settings)
    every = [each for group in groups for each in group]
    with engine_for(network(seed=9)) as engine:
        found = asyncio.run(
            add_teacher_logprobs(
                every,
                ["even"] * len(every),
                {"even": TaskTeacher("wise", 0.5)},
                {"wise": EngineTeacher(engine)},
            )
        )
    other = learner(tmp_path / "other", network(seed=9), credit={"keep_zero_variance": True})
    batch = pack_samples(found)
    expected = compute_logprobs(other.trainer.network, batch)
    diff = np.abs(batch.columns["teacher_logprobs"] - expected)[batch.loss_mask_T]
    assert diff.max() < 1e-5
    assert set(batch.columns["teacher_weight"].tolist()) == {0.5}


def rolled_by(net):
    with engine_for(net) as engine:
        return rolled(engine, prompts(3))


def test_tasks_without_a_teacher_are_skipped_and_copies_scored_once(tmp_path):
    made = learner(tmp_path, network())
    (group, *_) = policy_samples(rolled_by(network()), made.settings)
    scored = []

    async def wise(token_ids, start):
        scored.append(len(token_ids))
        return [-0.5] * (len(token_ids) - start)

    every = [group[0], group[0], group[1]]
    tasks = ["taught", "taught", "free"]
    found = asyncio.run(
        add_teacher_logprobs(every, tasks, {"taught": TaskTeacher("w", 1.0)}, {"w": wise})
    )
    assert len(scored) == 1
    assert found[0].teacher_logprob_S is found[1].teacher_logprob_S is not None
    assert found[2] is every[2]


@pytest.mark.parametrize("logprobs", [[-1.0], [float("nan")] * 99])
def test_an_invalid_teacher_score_names_the_teacher(tmp_path, logprobs):
    made = learner(tmp_path, network())
    (group, *_) = policy_samples(rolled_by(network()), made.settings)

    async def broken(token_ids, start):
        return logprobs[: len(token_ids) - start]

    with pytest.raises(DistillError, match="teacher 'w'"):
        asyncio.run(
            add_teacher_logprobs(group[:1], ["t"], {"t": TaskTeacher("w", 1.0)}, {"w": broken})
        )


@pytest.mark.slow
def test_the_student_approaches_its_teacher(start, tmp_path):
    teacher = pretrained_on_vault(tmp_path / "teacher", start=start, steps=80, full=1.0)
    text = RECIPE.replace("TEACHER", str(teacher))
    run_rl(recipe_in(tmp_path, start, text), tmp_path / "run", [])
    found = numbers(tmp_path / "run")
    # Rounding differs between machines: only the ends of the curve are compared.
    first, ends = found[1], ("reward", "teacher_kl")
    last = {name: (found[11][name] + found[12][name]) / 2 for name in ends}
    assert last["reward"] > first["reward"] + 0.2
    assert last["teacher_kl"] < 0.5 * first["teacher_kl"]
