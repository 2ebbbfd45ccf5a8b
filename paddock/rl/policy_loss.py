"""The loss that settings ask for, in the form a trainer takes: rewards and teachers in one."""

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
    "icepop": lambda of, s: icepop(of, beta=s.icepop_beta, below=s.clip_low, above=s.clip_high),
    "double_sided": lambda of, s: double_sided(of, below=s.clip_low, above=s.clip_high),
    "ppo": lambda of, s: ppo_clip(of, below=s.clip_low, above=s.clip_high),
    "tis": lambda of, s: importance_weighted_ppo(
        of, below=s.clip_low, above=s.clip_high, cap=s.tis_cap
    ),
    "decoupled": lambda of, s: importance_weighted_ppo(of, below=s.clip_low, above=s.clip_high),
    "reinforce": lambda of, _: reinforce(of),
}


@dataclass(frozen=True, slots=True, eq=False)
class TokenLossRecord:
    """What a loss saw of its tokens and made of them, for those who look at a run."""

    log_ratio_N: Tensor  # of the trainer's probability over the sampler's
    advantage_N: Tensor  # with the teacher's part
    kept_N: Tensor


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """At each token the advantage its attempt earned, plus what its teacher thinks of it."""

    settings: PolicyLossSettings
    records: list[TokenLossRecord] = field(
        default_factory=list
    )  # of every call since it was last emptied

    def __call__(self, of: policy.PolicyTokens) -> policy.TokenLossOutput:
        lead_N = teacher_logprob_diff(
            of.teacher_logprob_N, of.logprob_N, clip=self.settings.teacher_clip
        )
        advantage_N = of.advantage_N + of.teacher_weight_N * lead_N
        tokens = PolicyLossInputs(of.logprob_N, of.old_logprob_N, of.rollout_logprob_N, advantage_N)
        gains = LOSSES[self.settings.kind](tokens, self.settings)
        log_ratio_N = of.logprob_N.detach() - of.rollout_logprob_N
        self.records.append(
            TokenLossRecord(log_ratio_N, advantage_N.detach(), gains.kept_N.detach())
        )
        parts = {"masked": (~gains.kept_N).float()}
        if bool(of.teacher_weight_N.any()):
            taught_N = of.teacher_weight_N > 0
            # Of the sampled tokens, so its mean is KL(student || teacher), estimated.
            parts["teacher_kl"] = torch.where(
                taught_N, of.logprob_N.detach() - of.teacher_logprob_N, 0.0
            )
        return policy.TokenLossOutput(-gains.objective_N, parts)
