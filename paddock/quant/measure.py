"""Quantization error: NLL, KL divergence by position, top-1 agreement and needle recall.

T tokens, A tokens of an answer, D hidden, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp, log

import torch
from torch import Tensor

from paddock.kernels.workspace import chunks, scratch_bytes
from paddock.quant.calibration_data import CalibrationBatch

LMHead = Callable[[Tensor], Tensor]
# Position buckets of the reported KL divergence: upper bounds in tokens.
BUCKETS = (128, 512, 2048, 8192, 32_768, 131_072, 1 << 40)
MIN_KL = 1e-12  # nats: the resolution of float32 logits


@dataclass(slots=True)
class KLDivergenceStats:
    """Sums over tokens of the KL divergence and of its logarithm."""

    tokens: int = 0
    nats: float = 0.0
    log_nats: float = 0.0

    def add(self, nats: float) -> None:
        self.tokens += 1
        self.nats += nats
        self.log_nats += log(max(nats, MIN_KL))


@dataclass(slots=True)
class QuantEvalStats:
    """Sums over tokens for the exact and the quantized network."""

    tokens: int = 0
    exact_nats: float = 0.0
    integer_nats: float = 0.0
    answers: float = 0.0
    exact_right: float = 0.0
    integer_right: float = 0.0
    agreed: int = 0  # tokens with the same top-1 prediction
    divergence: dict[int, KLDivergenceStats] = field(default_factory=dict)  # by position bucket

    def summary(self) -> dict[str, object]:
        """Means for the report; metrics without data are left out."""
        report: dict[str, object] = {"tokens": self.tokens}
        if self.tokens:
            before, after = self.exact_nats / self.tokens, self.integer_nats / self.tokens
            report |= {"nll": [before, after], "top1_agreement": self.agreed / self.tokens}
        if self.divergence:
            report |= self._divergence()
        if self.answers:
            report["needle_recall"] = [
                self.exact_right / self.answers,
                self.integer_right / self.answers,
            ]
            report["needle_tasks"] = int(self.answers)
        return report

    def _divergence(self) -> dict[str, object]:
        """The mean is dominated by the few tokens that were routed to another expert or selected
        another key; the geometric mean describes the others."""
        buckets = self.divergence.values()
        tokens = sum(kl.tokens for kl in buckets)
        return {
            "kl_by_position": {
                str(bucket): kl.nats / kl.tokens for bucket, kl in sorted(self.divergence.items())
            },
            "kl_mean": sum(kl.nats for kl in buckets) / tokens,
            "kl_geometric_mean": exp(sum(kl.log_nats for kl in buckets) / tokens),
        }


@torch.no_grad()
def update_stats(
    batch: CalibrationBatch,
    exact_TD: Tensor,
    integer_TD: Tensor,
    head: LMHead,
    stats: QuantEvalStats,
) -> None:
    """Add a batch of final normed states of both networks, which share the output head."""
    row = 0
    for passage in batch.passages:
        count = len(passage.ids)
        token_T = torch.tensor(passage.ids, device=exact_TD.device)
        states = exact_TD[row : row + count], integer_TD[row : row + count]
        if batch.purpose == "validation":
            _add_text(token_T, states, head, stats)
        for start, stop in passage.answers:
            target_A = token_T[start:stop]
            predicted = [head(state[start - 1 : stop - 1]).argmax(-1) for state in states]
            share = 1 / len(passage.answers)
            stats.answers += share
            stats.exact_right += share * torch.equal(predicted[0], target_A)
            stats.integer_right += share * torch.equal(predicted[1], target_A)
        row += count


def _add_text(
    token_T: Tensor, states: tuple[Tensor, Tensor], head: LMHead, stats: QuantEvalStats
) -> None:
    num_targets = len(token_T) - 1
    vocab = head(states[0][:1]).shape[-1]
    for part in chunks(num_targets, 40 * vocab, scratch_bytes(token_T.device)):
        target_T1 = token_T[part.start + 1 : part.stop + 1].unsqueeze(-1)
        # In float64: differences of 1e-7 nats would be lost in float32 rounding.
        exact_TV, integer_TV = (head(state[part]).double().log_softmax(-1) for state in states)
        stats.tokens += len(target_T1)
        stats.exact_nats -= float(exact_TV.gather(1, target_T1).sum())
        stats.integer_nats -= float(integer_TV.gather(1, target_T1).sum())
        stats.agreed += int((exact_TV.argmax(-1) == integer_TV.argmax(-1)).sum())
        kl_T = (exact_TV.exp() * (exact_TV - integer_TV)).sum(-1)
        for position, nats in zip(range(part.start, part.stop), kl_T.tolist(), strict=True):
            bucket = next(limit for limit in BUCKETS if position < limit)
            stats.divergence.setdefault(bucket, KLDivergenceStats()).add(nats)
