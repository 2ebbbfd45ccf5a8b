from collections import Counter
from dataclasses import replace

import pytest

from paddock.records import TrainSample, Turn
from paddock.rl.credit import assign_credit, token_loss_weights, with_critic_advantages
from paddock.rl.settings import CreditSettings, RewardSettings
from tests.rl.rollouts import completion, group, rollout, trajectory

MEAN = CreditSettings(advantage_norm="mean")


def advantages(credit):
    return {s.id: s.advantages[-1] for s in credit.samples}


def test_only_sampled_tokens_are_trained():
    first = Turn(added_ids=(1, 7), completion=completion((8, 9, 5), forced=(1,)))
    second = Turn(added_ids=(3, 3), completion=completion((4,), version=2))
    long = (trajectory(1.0, first, second, session="long"),)
    found = assign_credit([long, rollout(0.0, session="short")], 2, MEAN)
    sample = found.samples[0]
    assert sample.token_ids == (1, 7, 8, 9, 5, 3, 3, 4)
    assert sample.loss_mask == (False, False, True, False, True, False, False, True)
    assert sample.advantages == (0.0, 0.0, 0.5, 0.0, 0.5, 0.0, 0.0, 0.5)
    assert sample.logprobs == (0.0, 0.0, -0.5, -0.5, -0.5, 0.0, 0.0, -0.5)
    assert sample.oldest_version == 0


def test_a_turn_shared_by_two_branches_is_trained_once():
    shared = Turn(added_ids=(1, 7), completion=completion((8, 9)))
    again = replace(shared, trained=False)
    own = Turn(added_ids=(2,), completion=completion((5, 6)))
    branches = (
        trajectory(1.0, shared, session="b"),
        trajectory(1.0, again, own, session="b", branch=1),
    )
    found = assign_credit([branches, rollout(0.0, session="other")], 2, MEAN)
    assert [s.id for s in found.samples] == ["b/0", "b/1", "other/0"]
    assert sum(sum(s.loss_mask) for s in found.samples if s.id.startswith("b/")) == 4
    assert token_loss_weights(found.samples, aggregate="sequence") == [1 / 8, 1 / 8, 1 / 4]


def test_an_environment_failure_has_no_reward_and_no_part_in_the_baseline():
    found = assign_credit(group(1.0, "world", 0.0, 1.0, "grader"), 5, MEAN)
    assert found.skip_reason == ""
    assert found.rewards == (1.0, 0.0, 1.0)
    assert found.failures == {"world": 1, "grader": 1}
    # Three of five are valid: the first two are repeated, and the mean is that of the five.
    assert Counter(s.id for s in found.samples) == {"s0/0": 2, "s2/0": 2, "s3/0": 1}
    assert advantages(found) == pytest.approx({"s0/0": 0.4, "s2/0": -0.6, "s3/0": 0.4})


@pytest.mark.parametrize("kind", ["world", "grader", "infrastructure", "time"])
def test_a_group_with_half_valid_rollouts_is_skipped(kind):
    assert (
        assign_credit(group(1.0, 0.0, kind, kind), 4, MEAN).skip_reason == "too few valid rollouts"
    )
    assert assign_credit(group(1.0, 0.0, 0.0, kind), 4, MEAN).skip_reason == ""


def test_a_missing_rollout_counts_as_invalid():
    assert assign_credit(group(1.0, 0.0), 4, MEAN).skip_reason == "too few valid rollouts"


def test_a_policy_failure_has_the_policy_failure_reward():
    found = assign_credit(group(1.0, "policy"), 2, MEAN)
    assert advantages(found) == {"s0/0": 0.5, "s1/0": -0.5}
    harsher = MEAN.model_copy(update={"reward": RewardSettings(policy_failure_reward=-1.0)})
    assert assign_credit(group(1.0, "policy"), 2, harsher).rewards == (1.0, -1.0)


def test_a_zero_variance_group_is_skipped():
    found = assign_credit(group(1.0, 1.0, 1.0), 3, MEAN)
    assert (found.skip_reason, found.samples) == ("zero variance", ())
    kept = assign_credit(group(1.0), 1, MEAN.model_copy(update={"keep_zero_variance": True}))
    assert kept.skip_reason == "" and kept.samples[0].advantages[-1] == 0.0


def test_truncated_rollouts_are_trained_masked_or_excluded():
    cut = rollout(0.0, session="cut", finish="length")
    every = [*group(1.0, 0.0), cut]
    train = assign_credit(every, 3, MEAN)
    assert train.truncated == 1 and advantages(train)["cut/0"] == pytest.approx(-1 / 3)
    mask = assign_credit(every, 3, CreditSettings(advantage_norm="mean", on_truncated="mask"))
    assert advantages(mask) == pytest.approx({"s0/0": 2 / 3, "s1/0": -1 / 3})
    exclude = assign_credit(every, 3, CreditSettings(advantage_norm="mean", on_truncated="exclude"))
    assert exclude.rewards == (1.0, 0.0)  # and one of the two is repeated
    assert len(exclude.samples) == 3


def test_the_overlong_penalty_grows_linearly():
    rule = RewardSettings(overlong_start=2, overlong_end=4, overlong_penalty=0.5)
    settings = CreditSettings(advantage_norm="mean", reward=rule)
    every = [rollout(1.0, session=f"n{n}", reply=range(n)) for n in (2, 3, 4, 5)]
    assert assign_credit(every, 4, settings).rewards == (1.0, 0.75, 0.5, 0.5)


def test_a_group_without_sampled_tokens_is_skipped():
    empty = [(trajectory("policy", session="a"),), (trajectory(1.0, session="b"),)]
    assert assign_credit(empty, 2, MEAN).skip_reason == "no trained tokens"


def test_critic_advantages_replace_group_advantages():
    class Tabular:
        """A value per position, moved towards the returns seen there."""

        def __init__(self):
            self.table = {}

        def values(self, samples):
            return [[self.table.get(p, 0.0) for p in range(len(s.token_ids))] for s in samples]

        def update(self, samples, returns):
            error = 0.0
            for sample, found in zip(samples, returns, strict=True):
                for position, value in enumerate(found):
                    if sample.loss_mask[position]:
                        off = value - self.table.get(position, 0.0)
                        self.table[position] = self.table.get(position, 0.0) + 0.5 * off
                        error += off * off
            return error

    critic = Tabular()
    sample = TrainSample(
        id="s/0",
        token_ids=(1, 8, 3, 9),
        logprobs=(0.0, -0.1, 0.0, -0.1),
        loss_mask=(False, True, False, True),
        advantages=(0.0,) * 4,
        oldest_version=0,
    )
    (first,) = with_critic_advantages([sample], [1.0], critic, gamma=1.0, lam=1.0)
    assert first.advantages == (0.0, 1.0, 0.0, 1.0)
    errors = [critic.update([sample], [[0.0, 1.0, 0.0, 1.0]]) for _ in range(8)]
    assert errors[-1] < 0.01 * errors[0]
    (later,) = with_critic_advantages([sample], [1.0], critic, gamma=1.0, lam=1.0)
    assert max(map(abs, later.advantages)) < 0.01
