"""From the attempts of a group to samples: who learns from what, and how much.

Only tokens that the policy chose are trained, each once over all branches of its session. A copy
that fills up a group keeps the id of what it copies.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal, Protocol

from paddock.records import Failure, TrainSample, Trajectory
from paddock.rl.advantage import gae, group_advantages, is_zero_variance, pad_group
from paddock.rl.reward import Rollout, compute_reward, is_truncated
from paddock.rl.settings import CreditSettings

SkipReason = Literal["", "zero variance", "too few valid rollouts", "no trained tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What a group is good for. `why` says why it is not trained; nothing: it is."""

    skip_reason: SkipReason
    advantages: tuple[tuple[Rollout, float], ...] = ()  # attempts to train, with their advantages
    rewards: tuple[float, ...] = ()  # of the valid attempts, before any was repeated
    failures: Mapping[str, int] = field(default_factory=dict)  # attempts without a reward, by kind
    truncated: int = 0

    @property
    def samples(self) -> tuple[TrainSample, ...]:
        """Made when asked for: most who judge only want to know why not."""
        every = (make_samples(attempt, advantage) for attempt, advantage in self.advantages)
        return tuple(chain.from_iterable(every))


def assign_credit(attempts: Sequence[Rollout], size: int, rule: CreditSettings) -> Credit:
    """The samples of a group of `size` attempts, or why there are none.

    Attempts that failed through no fault of the policy, and truncated ones under `exclude`, are
    invalid: they have no reward and no part in the baseline. A group with more than half valid
    ones is filled up by repeating them, and compared as it is then; any other is dropped. A group
    whose rewards are all equal has nothing to teach by comparison and is dropped too, unless
    `keep_flat` (a teacher may still have something to say).
    """
    failures: Counter[str] = Counter(
        attempt[0].outcome.kind
        for attempt in attempts
        if isinstance(attempt[0].outcome, Failure) and not attempt[0].outcome.is_policy_failure
    )
    truncated = sum(map(is_truncated, attempts))
    rewarded = [
        (attempt, reward)
        for attempt in attempts
        if (reward := compute_reward(attempt, rule.reward)) is not None
        and not (rule.on_truncated == "exclude" and is_truncated(attempt))
    ]

    def found(why: SkipReason, picked: Sequence[tuple[Rollout, float]] = ()) -> Credit:
        return Credit(
            skip_reason=why,
            advantages=tuple(picked),
            rewards=tuple(reward for _, reward in rewarded),
            failures=dict(failures),
            truncated=truncated,
        )

    group = pad_group(rewarded, size)
    if group is None:
        return found("too few valid rollouts")
    if is_zero_variance([reward for _, reward in group]) and not rule.keep_zero_variance:
        return found("zero variance")
    advantages = group_advantages([reward for _, reward in group], baseline=rule.advantage_norm)
    picked = [
        (attempt, advantage)
        for (attempt, _), advantage in zip(group, advantages, strict=True)
        if not (rule.on_truncated == "mask" and is_truncated(attempt))
    ]
    if not any(any(branch.loss_mask) for attempt, _ in picked for branch in attempt):
        return found("no trained tokens")
    return found("", picked)


def make_samples(attempt: Rollout, advantage: float) -> list[TrainSample]:
    """A sample for each branch that has something to train."""
    return [
        _sample(branch, trained, advantage)
        for branch in attempt
        if any(trained := branch.loss_mask)
    ]


def _sample(branch: Trajectory, trained: tuple[bool, ...], advantage: float) -> TrainSample:
    oldest = branch.oldest_version
    assert oldest is not None
    return TrainSample(
        id=f"{branch.session_id}/{branch.branch}",
        token_ids=branch.token_ids,
        logprobs=branch.logprobs,
        loss_mask=trained,
        advantages=tuple([advantage if flag else 0.0 for flag in trained]),
        oldest_version=oldest,
    )


def session_id_of(sample: TrainSample) -> str:
    """Whose branch a sample is."""
    return sample.id.rpartition("/")[0]


def token_loss_weights(
    samples: Sequence[TrainSample], *, per: Literal["token", "sequence"]
) -> list[float]:
    """What each trained token of a sample weighs in the batch's loss, so that the whole weighs 1.

    token     every token alike
    sequence  every attempt alike, its tokens (over all branches) sharing its weight; a copy is an
              attempt of its own

    >>> def sample(name, count):
    ...     return TrainSample(id=name, tokens=(7,) * (count + 1), logprobs=(0.0,) * (count + 1),
    ...                   trained=(False, *[True] * count), advantages=(0.0,) * (count + 1),
    ...                   oldest_version=0)
    >>> token_loss_weights([sample("a/0", 1), sample("b/0", 3)], per="token")
    [0.25, 0.25]
    >>> token_loss_weights([sample("a/0", 1), sample("b/0", 1), sample("b/1", 3)], per="sequence")
    [0.5, 0.125, 0.125]
    """
    tokens = {sample.id: sum(sample.loss_mask) for sample in samples}
    if per == "token":
        return [1 / sum(tokens[sample.id] for sample in samples)] * len(samples)
    of_session: Counter[str] = Counter()
    for name, count in tokens.items():
        of_session[name.rpartition("/")[0]] += count
    copies = Counter(sample.id for sample in samples)
    attempts = {session_id_of(sample): copies[sample.id] for sample in samples}
    total = sum(attempts.values())
    return [1 / (total * of_session[session_id_of(sample)]) for sample in samples]


class Critic(Protocol):
    """Expects something of every state, and learns what came of it: PPO's other half. Where
    attempts of a group cannot be compared (their contexts were rewritten on the way), it takes the
    place of the group's mean."""

    def values(self, samples: Sequence[TrainSample]) -> Sequence[Sequence[float]]:
        """Of each token of each sample, what is expected before it is written."""

    def update(self, samples: Sequence[TrainSample], returns: Sequence[Sequence[float]]) -> float:
        """One step towards what came; returns the loss."""


def with_critic_advantages(
    samples: Sequence[TrainSample],
    rewards: Sequence[float],
    critic: Critic,
    *,
    discount: float,
    trace: float,
) -> list[TrainSample]:
    """The samples with a critic's advantages, one reward each, paid with the last trained token.
    Steps are trained tokens: what was read in between takes no time."""
    found = []
    for sample, reward, value_T in zip(samples, rewards, critic.values(samples), strict=True):
        places = [place for place, flag in enumerate(sample.loss_mask) if flag]
        paid = [0.0] * (len(places) - 1) + [reward]
        advantage = gae(paid, [value_T[place] for place in places], discount=discount, trace=trace)
        column = [0.0] * len(sample.token_ids)
        for place, amount in zip(places, advantage, strict=True):
            column[place] = amount
        found.append(replace(sample, advantages=tuple(column)))
    return found
