"""Metrics of evaluation rollouts: mean reward, standard error, pass@k, failures."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import fmean

from paddock.envs import RolloutTrace
from paddock.records import Failure, Verdict


class EvalError(ValueError):
    """Too few rollouts, or no tasks, to compute metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalMetrics:
    """Metrics of a policy in an environment.

    Rollouts that failed through no fault of the policy are excluded and counted; policy failures
    have reward 0.
    """

    mean_reward: float  # over tasks
    stderr: float  # standard error of the mean, over tasks
    num_tasks: int  # with at least one scored rollout
    num_rollouts: int  # scored
    pass_at_k: dict[int, float]  # k: expected share of tasks solved by k rollouts
    reward_parts: dict[str, float]  # components of the reward, means over scored rollouts
    failures: dict[str, int]  # excluded rollouts, by kind and where
    mean_turns: float  # per scored rollout

    def __str__(self) -> str:
        lost = sum(self.failures.values())
        suffix = f", {lost} not scored" if lost else ""
        return f"{self.mean_reward:.3f} ± {self.stderr:.3f} ({self.num_tasks} tasks{suffix})"


def compute_metrics(
    groups: Sequence[Sequence[RolloutTrace]], *, pass_threshold: float = 1.0
) -> EvalMetrics:
    """Metrics of rollouts grouped by task.

    A rollout solves its task if its reward is at least `pass_threshold`. Raises EvalError if fewer
    than half of all rollouts could be scored: the rest would say little about the policy.
    """
    failures: Counter[str] = Counter()
    scored: list[list[tuple[float, RolloutTrace]]] = []
    for group in groups:
        rewarded = []
        for rollout in group:
            reward = scored_reward(rollout)
            if reward is None:
                failures[failure_reason(rollout)] += 1
            else:
                rewarded.append((reward, rollout))
        if rewarded:
            scored.append(rewarded)
    pairs = [pair for rewarded in scored for pair in rewarded]
    if 2 * len(pairs) < sum(len(group) for group in groups) or not pairs:
        outcomes = [(failure_reason(r), r.outcome) for group in groups for r in group]
        messages = {
            reason: " ".join(outcome.what.split())
            for reason, outcome in outcomes
            if isinstance(outcome, Failure)
        }
        reasons = ", ".join(
            f"{count} x {reason} ({messages[reason]:.200})"
            for reason, count in failures.most_common(3)
        )
        raise EvalError(
            f"only {len(pairs)} rollouts could be scored: {reasons or 'there are none'}"
        )
    means = [fmean(reward for reward, _ in rewarded) for rewarded in scored]
    counts = [
        (len(rewarded), sum(reward >= pass_threshold for reward, _ in rewarded))
        for rewarded in scored
    ]
    return EvalMetrics(
        mean_reward=fmean(means),
        stderr=_standard_error(means),
        num_tasks=len(scored),
        num_rollouts=len(pairs),
        pass_at_k={k: _mean_pass_at_k(counts, k) for k in _powers(min(n for n, _ in counts))},
        reward_parts=_mean_parts([rollout for _, rollout in pairs]),
        failures=dict(failures),
        mean_turns=fmean(rollout.turns for _, rollout in pairs),
    )


def scored_reward(rollout: RolloutTrace) -> float | None:
    """The reward of a rollout, 0 for a policy failure; None if it failed for another reason."""
    outcome = rollout.outcome
    if isinstance(outcome, Verdict):
        return outcome.reward
    return 0.0 if outcome.is_policy_failure else None


def failure_reason(rollout: RolloutTrace) -> str:
    outcome = rollout.outcome
    return "" if isinstance(outcome, Verdict) else outcome.label


def pass_at_k(k: int, rollouts: int, solved: int) -> float:
    """pass@k: the probability that k of the rollouts, drawn at random, include a solved one.

    >>> pass_at_k(1, 4, 1), pass_at_k(4, 4, 1), pass_at_k(2, 4, 0)
    (0.25, 1.0, 0.0)
    """
    return 1.0 - comb(rollouts - solved, k) / comb(rollouts, k)


def _mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> float:
    return fmean(pass_at_k(k, rollouts, solved) for rollouts, solved in counts)


def _powers(limit: int) -> list[int]:
    """Powers of 2 up to `limit`.

    >>> _powers(6)
    [1, 2, 4]
    """
    return [1 << i for i in range(limit.bit_length())]


def _standard_error(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = fmean(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return sqrt(variance / len(values))


def _mean_parts(rollouts: Sequence[RolloutTrace]) -> dict[str, float]:
    parts: dict[str, list[float]] = {}
    for rollout in rollouts:
        if isinstance(rollout.outcome, Verdict):
            for name, value in rollout.outcome.parts.items():
                parts.setdefault(name, []).append(value)
    return {name: fmean(values) for name, values in parts.items()}
