"""Credit assignment: from the rollouts of a group to training samples with advantages.

Only tokens that the policy sampled are trained, each once over all branches of its session. A copy
that pads a group keeps the id of the sample it copies.
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
    """Advantages of a group, or the reason it is not trained. An empty reason means it is."""

    skip_reason: SkipReason
    advantages: tuple[tuple[Rollout, float], ...] = ()  # rollouts to train with their advantages
    rewards: tuple[float, ...] = ()  # of the valid rollouts, before padding
    failures: Mapping[str, int] = field(default_factory=dict)  # rollouts without a reward, by kind
    truncated: int = 0

    @property
    def samples(self) -> tuple[TrainSample, ...]:
        """Built on access: the group filter only needs the skip reason."""
        samples = (make_samples(rollout, advantage) for rollout, advantage in self.advantages)
        return tuple(chain.from_iterable(samples))


def assign_credit(rollouts: Sequence[Rollout], group_size: int, settings: CreditSettings) -> Credit:
    """GRPO advantages of one group, or the reason it is skipped.

    Rollouts that failed through no fault of the policy, and truncated ones under `exclude`, have no
    reward and no part in the baseline. If more than half are valid the group is padded by repeating
    them, and the baseline is that of the padded group; otherwise it is dropped. A zero-variance
    group is dropped unless `keep_zero_variance` (its teacher may still have a training signal).
    """
    failures: Counter[str] = Counter(
        rollout[0].outcome.kind
        for rollout in rollouts
        if isinstance(rollout[0].outcome, Failure) and not rollout[0].outcome.is_policy_failure
    )
    truncated = sum(map(is_truncated, rollouts))
    rewarded = [
        (rollout, reward)
        for rollout in rollouts
        if (reward := compute_reward(rollout, settings.reward)) is not None
        and not (settings.on_truncated == "exclude" and is_truncated(rollout))
    ]

    def credit(skip_reason: SkipReason, advantages: Sequence[tuple[Rollout, float]] = ()) -> Credit:
        return Credit(
            skip_reason=skip_reason,
            advantages=tuple(advantages),
            rewards=tuple(reward for _, reward in rewarded),
            failures=dict(failures),
            truncated=truncated,
        )

    group = pad_group(rewarded, group_size)
    if group is None:
        return credit("too few valid rollouts")
    rewards = [reward for _, reward in group]
    if is_zero_variance(rewards) and not settings.keep_zero_variance:
        return credit("zero variance")
    advantages = group_advantages(rewards, norm=settings.advantage_norm)
    trained = [
        (rollout, advantage)
        for (rollout, _), advantage in zip(group, advantages, strict=True)
        if not (settings.on_truncated == "mask" and is_truncated(rollout))
    ]
    if not any(any(branch.loss_mask) for rollout, _ in trained for branch in rollout):
        return credit("no trained tokens")
    return credit("", trained)


def make_samples(rollout: Rollout, advantage: float) -> list[TrainSample]:
    """One sample per branch with trained tokens."""
    return [
        _sample(branch, loss_mask, advantage)
        for branch in rollout
        if any(loss_mask := branch.loss_mask)
    ]


def _sample(branch: Trajectory, loss_mask: tuple[bool, ...], advantage: float) -> TrainSample:
    oldest = branch.oldest_version
    assert oldest is not None
    return TrainSample(
        id=f"{branch.session_id}/{branch.branch}",
        token_ids=branch.token_ids,
        logprobs=branch.logprobs,
        loss_mask=loss_mask,
        advantages=tuple([advantage if flag else 0.0 for flag in loss_mask]),
        oldest_version=oldest,
    )


def session_id_of(sample: TrainSample) -> str:
    """The session whose branch the sample is."""
    return sample.id.rpartition("/")[0]


def token_loss_weights(
    samples: Sequence[TrainSample], *, aggregate: Literal["token", "sequence"]
) -> list[float]:
    """The weight of each sample's trained tokens in the batch loss; all weights sum to 1.

    token     every token has the same weight
    sequence  every rollout has the same weight, shared by its tokens over all branches; a copy is
              a rollout of its own

    >>> def sample(name, count):
    ...     return TrainSample(
    ...         id=name, token_ids=(7,) * (count + 1), logprobs=(0.0,) * (count + 1),
    ...         loss_mask=(False, *[True] * count), advantages=(0.0,) * (count + 1),
    ...         oldest_version=0)
    >>> token_loss_weights([sample("a/0", 1), sample("b/0", 3)], aggregate="token")
    [0.25, 0.25]
    >>> samples = [sample("a/0", 1), sample("b/0", 1), sample("b/1", 3)]
    >>> token_loss_weights(samples, aggregate="sequence")
    [0.5, 0.125, 0.125]
    """
    tokens = {sample.id: sum(sample.loss_mask) for sample in samples}
    if aggregate == "token":
        return [1 / sum(tokens[sample.id] for sample in samples)] * len(samples)
    session_tokens: Counter[str] = Counter()
    for sample_id, count in tokens.items():
        session_tokens[sample_id.rpartition("/")[0]] += count
    copies = Counter(sample.id for sample in samples)
    rollouts = {session_id_of(sample): copies[sample.id] for sample in samples}
    total = sum(rollouts.values())
    return [1 / (total * session_tokens[session_id_of(sample)]) for sample in samples]


class Critic(Protocol):
    """A value function, as in PPO: replaces the group baseline where rollouts of a group cannot be
    compared, for example because their contexts were rewritten differently."""

    def values(self, samples: Sequence[TrainSample]) -> Sequence[Sequence[float]]:
        """The value of the state before each token of each sample."""

    def update(self, samples: Sequence[TrainSample], returns: Sequence[Sequence[float]]) -> float:
        """One regression step towards the returns; the loss."""


def with_critic_advantages(
    samples: Sequence[TrainSample],
    rewards: Sequence[float],
    critic: Critic,
    *,
    gamma: float,
    lam: float,
) -> list[TrainSample]:
    """The samples with GAE advantages of a critic, one reward each, at the last trained token.

    Only trained tokens are steps: prompt and tool tokens in between are not discounted.
    """
    updated = []
    for sample, reward, value_T in zip(samples, rewards, critic.values(samples), strict=True):
        positions = [position for position, flag in enumerate(sample.loss_mask) if flag]
        step_rewards = [0.0] * (len(positions) - 1) + [reward]
        values = [value_T[position] for position in positions]
        advantages = gae(step_rewards, values, gamma=gamma, lam=lam)
        column = [0.0] * len(sample.token_ids)
        for position, advantage in zip(positions, advantages, strict=True):
            column[position] = advantage
        updated.append(replace(sample, advantages=tuple(column)))
    return updated
