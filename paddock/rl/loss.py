"""Policy losses: pure functions of log-probabilities and advantages, token by token.

Every loss returns what is to be *maximised* at each token, and whether the token still moves the
policy. Nothing is averaged: the caller owns the denominator, in which masked tokens stay.

N tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # of log-ratios; e^20 is off any chart, and e^90 would be no number in float32


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLossInputs:
    """Log-probabilities of sampled tokens by three policies, and what the tokens were worth."""

    logprob_N: Tensor  # the network being trained, with gradient
    old_logprob_N: Tensor  # the same network before the first update on this batch
    rollout_logprob_N: Tensor  # the engine that sampled the token, recorded then
    advantage_N: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SurrogateObjective:
    """To maximise, token by token; `kept_N` are those with a gradient (where there is an
    advantage)."""

    objective_N: Tensor
    kept_N: Tensor


def importance_ratio(logp_N: Tensor, other_N: Tensor) -> Tensor:
    return (logp_N - other_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def icepop_weight(ratio_N: Tensor, *, beta: float) -> Tensor:
    """IcePop's weight: the ratio where 1/beta <= ratio <= beta, else 0. Closed, unlike `window`.

    >>> icepop_weight(torch.tensor([0.4, 0.5, 2.0, 2.1]), beta=2.0).tolist()
    [0.0, 0.5, 2.0, 0.0]
    """
    kept_N = (ratio_N >= 1 / beta) & (ratio_N <= beta)
    return torch.where(kept_N, ratio_N, 0.0)


def double_sided_weight(ratio_N: Tensor, *, below: float, above: float) -> Tensor:
    """The ratio where 1 - below < ratio < 1 + above, else 0, whatever the sign of the advantage.

    >>> double_sided_weight(torch.tensor([0.5, 0.75, 1.75, 2.0]), below=0.5, above=1.0).tolist()
    [0.0, 0.75, 1.75, 0.0]
    """
    kept_N = (ratio_N > 1 - below) & (ratio_N < 1 + above)
    return torch.where(kept_N, ratio_N, 0.0)


def ppo_clip(of: PolicyLossInputs, *, below: float, above: float) -> SurrogateObjective:
    """PPO: min(r A, clip(r, 1 - below, 1 + above) A), r against the same network before this batch.
    Clip-higher is above > below."""
    ratio_N = importance_ratio(of.logprob_N, of.old_logprob_N)
    free_N = ratio_N * of.advantage_N
    bound_N = ratio_N.clamp(1 - below, 1 + above) * of.advantage_N
    # Equal (inside, or at the edge) counts as free, as min's gradient would be split between them.
    kept_N = free_N <= bound_N
    return SurrogateObjective(torch.where(kept_N, free_N, bound_N), kept_N)


def icepop(of: PolicyLossInputs, *, beta: float, below: float, above: float) -> SurrogateObjective:
    """pop(old / rollout) times PPO's clipped gain: equation 1. A token that trainer and engine see
    too differently is dropped, the others carry the difference as a weight."""
    weight_N = icepop_weight(
        importance_ratio(of.old_logprob_N, of.rollout_logprob_N), beta=beta
    ).detach()
    gains = ppo_clip(of, below=below, above=above)
    return SurrogateObjective(weight_N * gains.objective_N, gains.kept_N & (weight_N > 0))


def double_sided(of: PolicyLossInputs, *, below: float, above: float) -> SurrogateObjective:
    """Direct double-sided importance sampling: equations 3 to 5. REINFORCE on tokens the rollout
    policy can still vouch for, weighted by how likely they have become; no old policy."""
    weight_N = double_sided_weight(
        importance_ratio(of.logprob_N, of.rollout_logprob_N), below=below, above=above
    ).detach()
    return SurrogateObjective(weight_N * of.advantage_N * of.logprob_N, weight_N > 0)


def importance_weighted_ppo(
    of: PolicyLossInputs, *, below: float, above: float, cap: float = float("inf")
) -> SurrogateObjective:
    """PPO's clipped gain times old / rollout, at most `cap`: truncated importance sampling; without
    a cap, decoupled PPO."""
    weight_N = importance_ratio(of.old_logprob_N, of.rollout_logprob_N).clamp(max=cap).detach()
    gains = ppo_clip(of, below=below, above=above)
    return SurrogateObjective(weight_N * gains.objective_N, gains.kept_N)


def reinforce(of: PolicyLossInputs) -> SurrogateObjective:
    """A log pi: as if every token had been sampled just now. What the others are measured by."""
    return SurrogateObjective(
        of.advantage_N * of.logprob_N, torch.ones_like(of.logprob_N, dtype=torch.bool)
    )


def teacher_logprob_diff(teacher_N: Tensor, logp_N: Tensor, *, clip: float | None) -> Tensor:
    """How much likelier the teacher finds a token than the student does now: equation 2, which has
    no bound; with `clip`, within +-clip nats. A constant to the gradient."""
    lead_N = teacher_N - logp_N.detach()
    return lead_N if clip is None else lead_N.clamp(-clip, clip)
