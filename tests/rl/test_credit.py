from collections import Counter
from dataclasses import replace

import pytest

from paddock.records import TrainSample, Turn
from paddock.rl.credit import assign_credit, token_loss_weights, with_critic_advantages
from paddock.rl.settings import CreditSettings, RewardSettings
from tests.rl.rollouts import attempt, completion, group, trajectory

MEAN = CreditSettings(advantage_norm="mean")


def advantages(judgement):
    return {s.id: s.advantages[-1] for s in judgement.samples}


def test_only_what_the_policy_chose_is_trained():
    first = Turn(added_ids=(1, 7), completion=completion((8, 9, 5), forced=(1,)))
    second = Turn(added_ids=(3, 3), completion=completion((4,), version=2))
    long = (trajectory(1.0, first, second, session="long"),)
    found = assign_credit([long, attempt(0.0, session="short")], 2, MEAN)
    sample = found.samples[0]
    assert sample.token_ids == (1, 7, 8, 9, 5, 3, 3, 4)
    assert sample.loss_mask == (False, False, True, False, True, False, False, True)
    assert sample.advantages == (0.0, 0.0, 0.5, 0.0, 0.5, 0.0, 0.0, 0.5)
    assert sample.logprobs == (0.0, 0.0, -0.5, -0.5, -0.5, 0.0, 0.0, -0.5)
    assert sample.oldest_version == 0


def test_a_turn_that_two_branches_share_is_trained_in_one():
    shared = Turn(added_ids=(1, 7), completion=completion((8, 9)))
    again = replace(shared, trained=False)
    own = Turn(added_ids=(2,), completion=completion((5, 6)))
    branches = (
        trajectory(1.0, shared, session="b"),
        trajectory(1.0, again, own, session="b", branch=1),
    )
    found = assign_credit([branches, attempt(0.0, session="other")], 2, MEAN)
    assert [s.id for s in found.samples] == ["b/0", "b/1", "other/0"]
    assert sum(sum(s.loss_mask) for s in found.samples if s.id.startswith("b/")) == 4
    assert token_loss_weights(found.samples, aggregate="sequence") == [1 / 8, 1 / 8, 1 / 4]


def test_a_broken_world_has_no_reward_and_no_part_in_the_baseline():
    found = assign_credit(group(1.0, "world", 0.0, 1.0, "grader"), 5, MEAN)
    assert found.skip_reason == ""
    assert found.rewards == (1.0, 0.0, 1.0)
    assert found.failures == {"world": 1, "grader": 1}
    # Three of five are valid: the first two are repeated, and the mean is that of the five.
    assert Counter(s.id for s in found.samples) == {"s0/0": 2, "s2/0": 2, "s3/0": 1}
    assert advantages(found) == pytest.approx({"s0/0": 0.4, "s2/0": -0.6, "s3/0": 0.4})


@pytest.mark.parametrize("kind", ["world", "grader", "infrastructure", "time"])
def test_half_valid_is_not_enough(kind):
    assert (
        assign_credit(group(1.0, 0.0, kind, kind), 4, MEAN).skip_reason == "too few valid rollouts"
    )
    assert assign_credit(group(1.0, 0.0, 0.0, kind), 4, MEAN).skip_reason == ""


def test_a_missing_attempt_counts_as_invalid():
    assert assign_credit(group(1.0, 0.0), 4, MEAN).skip_reason == "too few valid rollouts"


def test_breaking_off_by_its_own_doing_is_a_bad_attempt():
    found = assign_credit(group(1.0, "policy"), 2, MEAN)
    assert advantages(found) == {"s0/0": 0.5, "s1/0": -0.5}
    harsher = MEAN.model_copy(update={"reward": RewardSettings(policy_failure_reward=-1.0)})
    assert assign_credit(group(1.0, "policy"), 2, harsher).rewards == (1.0, -1.0)


def test_equal_rewards_have_nothing_to_teach():
    found = assign_credit(group(1.0, 1.0, 1.0), 3, MEAN)
    assert (found.skip_reason, found.samples) == ("zero variance", ())
    kept = assign_credit(group(1.0), 1, MEAN.model_copy(update={"keep_zero_variance": True}))
    assert kept.skip_reason == "" and kept.samples[0].advantages[-1] == 0.0


def test_what_was_cut_off_is_trained_masked_or_left_out():
    cut = attempt(0.0, session="cut", finish="length")
    every = [*group(1.0, 0.0), cut]
    train = assign_credit(every, 3, MEAN)
    assert train.truncated == 1 and advantages(train)["cut/0"] == pytest.approx(-1 / 3)
    mask = assign_credit(every, 3, CreditSettings(advantage_norm="mean", on_truncated="mask"))
    assert advantages(mask) == pytest.approx({"s0/0": 2 / 3, "s1/0": -1 / 3})
    exclude = assign_credit(every, 3, CreditSettings(advantage_norm="mean", on_truncated="exclude"))
    assert exclude.rewards == (1.0, 0.0)  # and one of the two is repeated
    assert len(exclude.samples) == 3


def test_length_costs_in_proportion():
    rule = RewardSettings(overlong_start=2, overlong_end=4, overlong_penalty=0.5)
    settings = CreditSettings(advantage_norm="mean", reward=rule)
    every = [attempt(1.0, session=f"n{n}", reply=range(n)) for n in (2, 3, 4, 5)]
    assert assign_credit(every, 4, settings).rewards == (1.0, 0.75, 0.5, 0.5)


def test_nothing_sampled_is_nothing_to_train():
    empty = [(trajectory("policy", session="a"),), (trajectory(1.0, session="b"),)]
    assert assign_credit(empty, 2, MEAN).skip_reason == "no trained tokens"


def test_a_critic_takes_the_place_of_the_group():
    class Tabular:
        """Expects of a place in the reply what it has seen come of it."""

        def __init__(self):
            self.table = {}

        def values(self, samples):
            return [[self.table.get(p, 0.0) for p in range(len(s.token_ids))] for s in samples]

        def update(self, samples, returns):
            error = 0.0
            for sample, found in zip(samples, returns, strict=True):
                for place, value in enumerate(found):
                    if sample.loss_mask[place]:
                        off = value - self.table.get(place, 0.0)
                        self.table[place] = self.table.get(place, 0.0) + 0.5 * off
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
