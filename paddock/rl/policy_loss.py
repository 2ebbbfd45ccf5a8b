"""Policy loss as configured: reward and teacher advantages, in the form the trainer takes."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paddock.rl.loss import (
    PolicyLossInputs,
    SurrogateObjective,
    double_sided,
    icepop,
    importance_weighted_ppo,
    ppo_clip,
    reinforce,
    teacher_logprob_diff,
)
from paddock.rl.settings import PolicyLossSettings
from paddock.train import policy

LOSSES: dict[str, Callable[[PolicyLossInputs, PolicyLossSettings], SurrogateObjective]] = {
    "icepop": lambda t, s: icepop(
        t, beta=s.icepop_beta, clip_low=s.clip_low, clip_high=s.clip_high
    ),
    "double_sided": lambda t, s: double_sided(t, clip_low=s.clip_low, clip_high=s.clip_high),
    "ppo": lambda t, s: ppo_clip(t, clip_low=s.clip_low, clip_high=s.clip_high),
    "tis": lambda t, s: importance_weighted_ppo(
        t, clip_low=s.clip_low, clip_high=s.clip_high, cap=s.tis_cap
    ),
    "decoupled": lambda t, s: importance_weighted_ppo(
        t, clip_low=s.clip_low, clip_high=s.clip_high
    ),
    "reinforce": lambda t, _: reinforce(t),
}


@dataclass(frozen=True, slots=True, eq=False)
class TokenLossRecord:
    """Per-token inputs and result of one loss call, for the dashboard."""

    log_ratio_N: Tensor  # log importance ratio, trainer over engine
    advantage_N: Tensor  # with the teacher's part
    kept_N: Tensor


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The configured loss. A token's advantage is its rollout's plus the weighted teacher term."""

    settings: PolicyLossSettings
    records: list[TokenLossRecord] = field(default_factory=list)  # of calls since last cleared

    def __call__(self, tokens: policy.PolicyTokens) -> policy.TokenLossOutput:
        teacher_N = teacher_logprob_diff(
            tokens.teacher_logprob_N, tokens.logprob_N, clip=self.settings.teacher_clip
        )
        advantage_N = tokens.advantage_N + tokens.teacher_weight_N * teacher_N
        inputs = PolicyLossInputs(
            tokens.logprob_N, tokens.old_logprob_N, tokens.rollout_logprob_N, advantage_N
        )
        surrogate = LOSSES[self.settings.kind](inputs, self.settings)
        log_ratio_N = tokens.logprob_N.detach() - tokens.rollout_logprob_N
        self.records.append(
            TokenLossRecord(log_ratio_N, advantage_N.detach(), surrogate.kept_N.detach())
        )
        metrics = {"masked": (~surrogate.kept_N).float()}
        if bool(tokens.teacher_weight_N.any()):
            has_teacher_N = tokens.teacher_weight_N > 0
            # Over sampled tokens, so the mean estimates KL(student || teacher).
            metrics["teacher_kl"] = torch.where(
                has_teacher_N, tokens.logprob_N.detach() - tokens.teacher_logprob_N, 0.0
            )
        return policy.TokenLossOutput(-surrogate.objective_N, metrics)
