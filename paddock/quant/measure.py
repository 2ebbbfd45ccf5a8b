"""What quantization cost: nats, needles, and how far apart two networks' opinions are.

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
# Positions at which divergence is reported: up to so many tokens into a text.
BUCKETS = (128, 512, 2048, 8192, 32_768, 131_072, 1 << 40)
LEAST = 1e-12  # nats: what float32 logits can tell apart at all


@dataclass(slots=True)
class KLDivergenceStats:
    """Sums of divergences over tokens, and of their logarithms."""

    tokens: int = 0
    nats: float = 0.0
    log_nats: float = 0.0

    def add(self, nats: float) -> None:
        self.tokens += 1
        self.nats += nats
        self.log_nats += log(max(nats, LEAST))


@dataclass(slots=True)
class QuantEvalStats:
    """Sums over tokens, of the exact network and of the quantized one."""

    tokens: int = 0
    exact_nats: float = 0.0
    integer_nats: float = 0.0
    answers: float = 0.0
    exact_right: float = 0.0
    integer_right: float = 0.0
    agreed: int = 0  # tokens at which both would say the same
    divergence: dict[int, KLDivergenceStats] = field(default_factory=dict)  # by bucket

    def summary(self) -> dict[str, object]:
        """As numbers a report can print; what was not asked is left out."""
        found: dict[str, object] = {"tokens": self.tokens}
        if self.tokens:
            before, after = self.exact_nats / self.tokens, self.integer_nats / self.tokens
            found |= {"nats": [before, after], "agreement": self.agreed / self.tokens}
        if self.divergence:
            found |= self._divergence()
        if self.answers:
            found["needles"] = [
                self.exact_right / self.answers,
                self.integer_right / self.answers,
            ]
            found["questions"] = int(self.answers)
        return found

    def _divergence(self) -> dict[str, object]:
        """The mean is made by the few tokens at which another expert or key was chosen; what the
        others suffered is in the typical value, the geometric mean."""
        every = self.divergence.values()
        tokens = sum(apart.tokens for apart in every)
        return {
            "divergence": {
                str(bucket): apart.nats / apart.tokens
                for bucket, apart in sorted(self.divergence.items())
            },
            "mean_divergence": sum(apart.nats for apart in every) / tokens,
            "typical_divergence": exp(sum(apart.log_nats for apart in every) / tokens),
        }


@torch.no_grad()
def update_stats(
    batch: CalibrationBatch,
    exact_TD: Tensor,
    integer_TD: Tensor,
    head: LMHead,
    tally: QuantEvalStats,
) -> None:
    """Add a batch: the final normed states of both networks, which share a head."""
    row = 0
    for passage in batch.passages:
        count = len(passage.ids)
        token_T = torch.tensor(passage.ids, device=exact_TD.device)
        states = exact_TD[row : row + count], integer_TD[row : row + count]
        if batch.purpose == "held_out":
            _weigh_text(token_T, states, head, tally)
        for start, stop in passage.answers:
            wanted_A = token_T[start:stop]
            said = [head(state[start - 1 : stop - 1]).argmax(-1) for state in states]
            share = 1 / len(passage.answers)
            tally.answers += share
            tally.exact_right += share * torch.equal(said[0], wanted_A)
            tally.integer_right += share * torch.equal(said[1], wanted_A)
        row += count


def _weigh_text(
    token_T: Tensor, states: tuple[Tensor, Tensor], head: LMHead, tally: QuantEvalStats
) -> None:
    last = len(token_T) - 1
    vocab = head(states[0][:1]).shape[-1]
    for part in chunks(last, 40 * vocab, scratch_bytes(token_T.device)):
        target_T1 = token_T[part.start + 1 : part.stop + 1].unsqueeze(-1)
        # In float64: opinions that differ by 1e-7 nats would drown in the rounding of float32.
        exact_TV, integer_TV = (head(state[part]).double().log_softmax(-1) for state in states)
        tally.tokens += len(target_T1)
        tally.exact_nats -= float(exact_TV.gather(1, target_T1).sum())
        tally.integer_nats -= float(integer_TV.gather(1, target_T1).sum())
        tally.agreed += int((exact_TV.argmax(-1) == integer_TV.argmax(-1)).sum())
        apart_T = (exact_TV.exp() * (exact_TV - integer_TV)).sum(-1)
        for place, nats in zip(range(part.start, part.stop), apart_T.tolist(), strict=True):
            bucket = next(limit for limit in BUCKETS if place < limit)
            tally.divergence.setdefault(bucket, KLDivergenceStats()).add(nats)
