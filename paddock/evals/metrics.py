"""Episodes as numbers: how good, how sure, and what could not be judged."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import fmean

from paddock.envs import RolloutTrace
from paddock.records import Failure, Verdict


class EvalError(ValueError):
    """Episodes that do not add up to a score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalMetrics:
    """What a model is worth in a world. Attempts that failed through no fault of the model are
    left out and counted; those it broke off itself are worth nothing."""

    mean_reward: float  # reward, over tasks
    stderr: float  # standard error of the mean, over tasks
    num_tasks: int  # with at least one attempt that could be judged
    num_rollouts: int  # that could be judged
    pass_at_k: dict[int, float]  # k: share of tasks that k attempts are expected to solve (pass@k)
    reward_parts: dict[str, float]  # what rewards were made of, means over judged attempts
    failures: dict[str, int]  # left out, by kind and place
    mean_turns: float  # of a judged attempt, on average

    def __str__(self) -> str:
        lost = sum(self.failures.values())
        beside = f", {lost} not scored" if lost else ""
        return f"{self.mean_reward:.3f} ± {self.stderr:.3f} ({self.num_tasks} tasks{beside})"


def compute_metrics(
    groups: Sequence[Sequence[RolloutTrace]], *, passing: float = 1.0
) -> EvalMetrics:
    """The score of attempts, grouped by task. An attempt solves its task if its reward is at least
    `passing`. Raises `EvalError` where fewer than half of all rollouts could be scored: what is
    left would say little about the model."""
    failures: Counter[str] = Counter()
    judged: list[list[tuple[float, RolloutTrace]]] = []
    for group in groups:
        kept = []
        for episode in group:
            reward = scored_reward(episode)
            if reward is None:
                failures[failure_reason(episode)] += 1
            else:
                kept.append((reward, episode))
        if kept:
            judged.append(kept)
    attempts = [pair for kept in judged for pair in kept]
    if 2 * len(attempts) < sum(len(group) for group in groups) or not attempts:
        ends = [(failure_reason(e), e.outcome) for group in groups for e in group]
        words = {why: " ".join(end.what.split()) for why, end in ends if isinstance(end, Failure)}
        told = ", ".join(
            f"{count} x {why} ({words[why]:.200})" for why, count in failures.most_common(3)
        )
        raise EvalError(f"only {len(attempts)} rollouts could be scored: {told or 'none was made'}")
    means = [fmean(reward for reward, _ in kept) for kept in judged]
    counts = [(len(kept), sum(reward >= passing for reward, _ in kept)) for kept in judged]
    return EvalMetrics(
        mean_reward=fmean(means),
        stderr=_standard_error(means),
        num_tasks=len(judged),
        num_rollouts=len(attempts),
        pass_at_k={k: _solved(counts, k) for k in _powers(min(n for n, _ in counts))},
        reward_parts=_parts([episode for _, episode in attempts]),
        failures=dict(failures),
        mean_turns=fmean(episode.turns for _, episode in attempts),
    )


def scored_reward(episode: RolloutTrace) -> float | None:
    """What an attempt says about the model; None if it says nothing."""
    outcome = episode.outcome
    if isinstance(outcome, Verdict):
        return outcome.reward
    return 0.0 if outcome.is_policy_failure else None


def failure_reason(episode: RolloutTrace) -> str:
    outcome = episode.outcome
    return "" if isinstance(outcome, Verdict) else f"{outcome.kind} in {outcome.where}"


def pass_at_k(k: int, attempts: int, solved: int) -> float:
    """The chance that k of these attempts, chosen at random, hold one that solved its task.

    >>> pass_at_k(1, 4, 1), pass_at_k(4, 4, 1), pass_at_k(2, 4, 0)
    (0.25, 1.0, 0.0)
    """
    return 1.0 - comb(attempts - solved, k) / comb(attempts, k)


def _solved(counts: Sequence[tuple[int, int]], k: int) -> float:
    return fmean(pass_at_k(k, attempts, solved) for attempts, solved in counts)


def _powers(most: int) -> list[int]:
    """
    >>> _powers(6)
    [1, 2, 4]
    """
    return [1 << i for i in range(most.bit_length())]


def _standard_error(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = fmean(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return sqrt(variance / len(values))


def _parts(episodes: Sequence[RolloutTrace]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for episode in episodes:
        if isinstance(episode.outcome, Verdict):
            for name, value in episode.outcome.parts.items():
                found.setdefault(name, []).append(value)
    return {name: fmean(values) for name, values in found.items()}
