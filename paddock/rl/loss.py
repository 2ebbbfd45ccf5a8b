"""Policy losses: importance sampling, clipping and masking as pure functions of log-probabilities.

Every loss returns the surrogate objective to *maximise* at each token, and which tokens have a
gradient. Nothing is averaged: the caller owns the denominator, in which masked tokens still count.

N tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # clamp of log-ratios: e^90 would overflow float32


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLossInputs:
    """Log-probabilities of sampled tokens under three policies, and their advantages."""

    logprob_N: Tensor  # the network being trained, with gradient
    old_logprob_N: Tensor  # the same network before the first update on this batch
    rollout_logprob_N: Tensor  # the engine that sampled the token, recorded at sampling time
    advantage_N: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SurrogateObjective:
    """Objective to maximise at each token; `kept_N` marks tokens that are not clipped or masked."""

    objective_N: Tensor
    kept_N: Tensor


def importance_ratio(logprob_N: Tensor, other_logprob_N: Tensor) -> Tensor:
    return (logprob_N - other_logprob_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def icepop_weight(ratio_N: Tensor, *, beta: float) -> Tensor:
    """IcePop weight: the ratio where 1/beta <= ratio <= beta, else 0.

    The interval is closed, unlike that of `double_sided_weight`.

    >>> icepop_weight(torch.tensor([0.4, 0.5, 2.0, 2.1]), beta=2.0).tolist()
    [0.0, 0.5, 2.0, 0.0]
    """
    kept_N = (ratio_N >= 1 / beta) & (ratio_N <= beta)
    return torch.where(kept_N, ratio_N, 0.0)


def double_sided_weight(ratio_N: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """The ratio where 1 - clip_low < ratio < 1 + clip_high, else 0, for either sign of advantage.

    >>> ratio_N = torch.tensor([0.5, 0.75, 1.75, 2.0])
    >>> double_sided_weight(ratio_N, clip_low=0.5, clip_high=1.0).tolist()
    [0.0, 0.75, 1.75, 0.0]
    """
    kept_N = (ratio_N > 1 - clip_low) & (ratio_N < 1 + clip_high)
    return torch.where(kept_N, ratio_N, 0.0)


def ppo_clip(tokens: PolicyLossInputs, *, clip_low: float, clip_high: float) -> SurrogateObjective:
    """PPO: min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r against the old policy.

    Clip-higher (DAPO) is clip_high > clip_low.
    """
    ratio_N = importance_ratio(tokens.logprob_N, tokens.old_logprob_N)
    unclipped_N = ratio_N * tokens.advantage_N
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high) * tokens.advantage_N
    # Equal values (inside the window or at its edge) take the unclipped branch: min() would split
    # the gradient between the two.
    kept_N = unclipped_N <= clipped_N
    return SurrogateObjective(torch.where(kept_N, unclipped_N, clipped_N), kept_N)


def icepop(
    tokens: PolicyLossInputs, *, beta: float, clip_low: float, clip_high: float
) -> SurrogateObjective:
    """IcePop: icepop_weight(old / rollout) times the PPO objective (equation 1).

    Tokens on which trainer and engine differ too much are masked; the others are weighted by the
    train-inference ratio.
    """
    weight_N = icepop_weight(
        importance_ratio(tokens.old_logprob_N, tokens.rollout_logprob_N), beta=beta
    ).detach()
    ppo = ppo_clip(tokens, clip_low=clip_low, clip_high=clip_high)
    return SurrogateObjective(weight_N * ppo.objective_N, ppo.kept_N & (weight_N > 0))


def double_sided(
    tokens: PolicyLossInputs, *, clip_low: float, clip_high: float
) -> SurrogateObjective:
    """Direct double-sided importance sampling (equations 3 to 5).

    REINFORCE weighted by the ratio of current to rollout policy, masked outside the window. It
    needs no old policy.
    """
    ratio_N = importance_ratio(tokens.logprob_N, tokens.rollout_logprob_N)
    weight_N = double_sided_weight(ratio_N, clip_low=clip_low, clip_high=clip_high).detach()
    return SurrogateObjective(weight_N * tokens.advantage_N * tokens.logprob_N, weight_N > 0)


def importance_weighted_ppo(
    tokens: PolicyLossInputs, *, clip_low: float, clip_high: float, cap: float = float("inf")
) -> SurrogateObjective:
    """The PPO objective times min(old / rollout, cap): truncated importance sampling (TIS).

    Without a cap it is decoupled PPO.
    """
    ratio_N = importance_ratio(tokens.old_logprob_N, tokens.rollout_logprob_N)
    weight_N = ratio_N.clamp(max=cap).detach()
    ppo = ppo_clip(tokens, clip_low=clip_low, clip_high=clip_high)
    return SurrogateObjective(weight_N * ppo.objective_N, ppo.kept_N)


def reinforce(tokens: PolicyLossInputs) -> SurrogateObjective:
    """REINFORCE: A log pi, without importance sampling. The baseline for the other losses."""
    return SurrogateObjective(
        tokens.advantage_N * tokens.logprob_N, torch.ones_like(tokens.logprob_N, dtype=torch.bool)
    )


def teacher_logprob_diff(teacher_N: Tensor, logprob_N: Tensor, *, clip: float | None) -> Tensor:
    """Teacher minus student log-probability of each token (equation 2), without gradient.

    With `clip`, clamped to +-clip nats.
    """
    diff_N = teacher_N - logprob_N.detach()
    return diff_N if clip is None else diff_N.clamp(-clip, clip)
