"""The next token of every row at once.

Chance is a function of (seed, index of the token in its reply): nothing else in the batch changes
it, and neither does how many tokens are looked at together. A token is drawn by perturbing the
logits with Gumbel noise and taking the best, so a row's draw is the best of its own distribution
under its own noise. That makes speculation lossless without any further rule: a draft is kept if,
and only if, it is what would have been drawn anyway (see speculate.py).

N rows, V vocabulary, R rows with wishes beyond temperature, K kept.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paddock.engine.kv_cache import copy_to_device_async
from paddock.engine.request import Sequence
from paddock.records import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_ODD = (0x7FEB352D, 0x846CA68B - (1 << 32), 0x9E3779B1 - (1 << 32))


class SamplingTable:
    """What every row needs to know of its request, by seat, ready to be looked up all at once."""

    def __init__(self, seats: int) -> None:
        self.temperature = np.ones(seats, dtype=np.float32)
        self.greedy = np.zeros(seats, dtype=bool)
        self.seed = np.zeros(seats, dtype=np.uint64)

    def set(self, seat: int, sampling: SamplingParams, seed: int) -> None:
        self.temperature[seat] = sampling.logprob_temperature
        self.greedy[seat] = sampling.is_greedy
        self.seed[seat] = seed


@dataclass(frozen=True, slots=True)
class LogitConstraint:
    """A row that wants more than a temperature: its request, and the drafts it follows."""

    row: int
    sequence: Sequence
    drafts: list[int]
    mask: Tensor | None = None  # [V] bool, what a grammar allows

    @property
    def index(self) -> int:
        """Of the token to be sampled, in its reply."""
        return self.sequence.num_generated + len(self.drafts)


@dataclass(frozen=True, slots=True)
class SamplingBatchInfo:
    """Whose next token each row is."""

    slot_N: np.ndarray
    index_N: np.ndarray  # of the token in its reply
    constraints: list[LogitConstraint]
    forced: list[tuple[int, int]]  # (row, token that is put there whatever the scores say)


@dataclass(frozen=True, slots=True, eq=False)
class SamplerOutput:
    token_N: Tensor
    logprob_N: Tensor
    logprob_NV: Tensor  # of softmax(logits / temperature)


def needs_logit_constraints(sampling: SamplingParams) -> bool:
    """Whether rows of this request need more than temperature and chance."""
    return (
        sampling.top_p < 1
        or sampling.top_k is not None
        or sampling.min_p > 0
        or sampling.repetition_penalty != 1
        or sampling.frequency_penalty != 0
        or sampling.presence_penalty != 0
        or bool(sampling.logit_bias)
        or sampling.min_new_tokens > 0
        or sampling.grammar is not None
    )


class Sampler:
    def __init__(self, dials: SamplingTable, vocab: int, device: torch.device) -> None:
        self.dials, self.device = dials, device
        self.hash_V = _spread(torch.arange(vocab, dtype=torch.int32, device=device))

    def sample(self, logits_NV: Tensor, rows: SamplingBatchInfo) -> SamplerOutput:
        temperature_N1 = self._tensor(self.dials.temperature[rows.slot_N]).unsqueeze(1)
        scaled_NV = logits_NV.float() / temperature_N1
        logp_NV = scaled_NV.log_softmax(-1)
        if rows.constraints:
            row_R = torch.tensor([wish.row for wish in rows.constraints], device=self.device)
            fulfilled_RV = apply_logit_constraints(
                logits_NV[row_R].float(), temperature_N1[row_R], rows.constraints
            )
            scaled_NV.index_copy_(0, row_R, fulfilled_RV)
        token_N = self.gumbel_argmax(scaled_NV, rows.slot_N, rows.index_N)
        for row, token in rows.forced:
            token_N[row] = token
        return SamplerOutput(token_N, logp_NV.gather(1, token_N.unsqueeze(1)).squeeze(1), logp_NV)

    def gumbel_argmax(self, scaled_NV: Tensor, seat_N: np.ndarray, index_N: np.ndarray) -> Tensor:
        """A token for each row of tempered logits: the best, or the best under the row's noise."""
        chance_N = ~self.dials.greedy[seat_N]
        if not chance_N.any():
            return scaled_NV.argmax(-1)
        key_N = random_bits(self.dials.seed[seat_N], index_N)
        if chance_N.all():
            return (scaled_NV + self.gumbel_noise(key_N)).argmax(-1)
        row_R = self._tensor(np.flatnonzero(chance_N))
        noisy_RV = scaled_NV[row_R] + self.gumbel_noise(key_N[chance_N])
        return scaled_NV.index_copy(0, row_R, noisy_RV).argmax(-1)

    def draft(self, logits_NV: Tensor, seat_N: np.ndarray, index_N: np.ndarray) -> Tensor:
        """A guess at what `sample` will say: the same noise, none of the wishes."""
        temperature_N = self._tensor(self.dials.temperature[seat_N])
        return self.gumbel_argmax(logits_NV.float() / temperature_N.unsqueeze(1), seat_N, index_N)

    def gumbel_noise(self, key_N: np.ndarray) -> Tensor:
        """Standard Gumbel noise [N, V], a function of key and token alone."""
        halves = np.ascontiguousarray(key_N).view(np.int32).reshape(-1, 2)
        half_N2 = self._tensor(halves.copy())
        x_NV = _spread((self.hash_V ^ half_N2[:, :1]) + half_N2[:, 1:])
        # Uniform in (0, 1), finest near 0: that is where the winners come from.
        uniform_NV = x_NV.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)
        return uniform_NV.neg_().log1p_().neg_().log_().neg_()

    def _tensor(self, values: np.ndarray) -> Tensor:
        return copy_to_device_async(values, self.device)


def random_bits(seed_N: np.ndarray, index_N: np.ndarray) -> np.ndarray:
    """64 random bits for each (seed, index)."""
    with np.errstate(over="ignore"):
        x = (
            seed_N.astype(np.uint64) * _MIX[0]
            + (index_N.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        )
        x = (x ^ (x >> np.uint64(30))) * _MIX[0]
        x = (x ^ (x >> np.uint64(27))) * _MIX[1]
        return x ^ (x >> np.uint64(31))


def _spread(x: Tensor) -> Tensor:
    """int32 numbers turned, where they lie, into others that look random, one to one."""
    for shift, odd in ((16, _ODD[0]), (15, _ODD[1]), (16, _ODD[2])):
        x.bitwise_xor_((x >> shift).bitwise_and_(0xFFFFFFFF >> shift)).mul_(odd)
    return x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))


# --- what requests may wish -----------------------------------------------------------------------


def apply_logit_constraints(
    logits_RV: Tensor, temperature_R1: Tensor, wishes: list[LogitConstraint]
) -> Tensor:
    """Tempered logits with every wish granted; what may not be said is -inf."""
    _penalize(logits_RV, wishes)
    _bias(logits_RV, wishes)
    _forbid(logits_RV, wishes)
    logits_RV /= temperature_R1
    _truncate(logits_RV, wishes)
    return logits_RV


def _column(values: Iterable[float], like: Tensor) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float32, device=like.device).unsqueeze(1)


def _penalize(logits_RV: Tensor, wishes: list[LogitConstraint]) -> None:
    asks = [(wish.sequence.request.sampling_params, wish) for wish in wishes]
    if any(s.frequency_penalty or s.presence_penalty for s, _ in asks):
        count_RV = _counts(
            logits_RV, [w.sequence.tokens[w.sequence.num_prompt :] for w in wishes], asks
        )
        logits_RV -= count_RV * _column((s.frequency_penalty for s, _ in asks), logits_RV)
        logits_RV -= (count_RV > 0) * _column((s.presence_penalty for s, _ in asks), logits_RV)
    if any(s.repetition_penalty != 1 for s, _ in asks):
        seen_RV = _counts(logits_RV, [w.sequence.tokens for w in wishes], asks) > 0
        penalty_R1 = _column((s.repetition_penalty for s, _ in asks), logits_RV)
        less_RV = torch.where(logits_RV > 0, logits_RV / penalty_R1, logits_RV * penalty_R1)
        torch.where(seen_RV, less_RV, logits_RV, out=logits_RV)


def _counts(
    logits_RV: Tensor, texts: list[list[int]], asks: list[tuple[SamplingParams, LogitConstraint]]
) -> Tensor:
    """How often each token stands in a row's text and in the drafts it follows."""
    rows, tokens = [], []
    for row, (text, (_, wish)) in enumerate(zip(texts, asks, strict=True)):
        rows += [row] * (len(text) + len(wish.drafts))
        tokens += text + wish.drafts
    count_RV = torch.zeros_like(logits_RV)
    index = torch.tensor([rows, tokens], dtype=torch.int64, device=logits_RV.device)
    one = torch.ones(len(rows), device=logits_RV.device)
    return count_RV.index_put_((index[0], index[1]), one, accumulate=True)


def _bias(logits_RV: Tensor, wishes: list[LogitConstraint]) -> None:
    entries = [
        (row, bias.token_id, bias.amount)
        for row, wish in enumerate(wishes)
        for bias in wish.sequence.request.sampling_params.logit_bias
    ]
    if entries:
        rows, tokens, amounts = zip(*entries, strict=True)
        device = logits_RV.device
        place = (torch.tensor(rows, device=device), torch.tensor(tokens, device=device))
        amount = torch.tensor(amounts, dtype=logits_RV.dtype, device=device)
        logits_RV.index_put_(place, amount, accumulate=True)


def _forbid(logits_RV: Tensor, wishes: list[LogitConstraint]) -> None:
    """What grammars do not allow, and ends before their time (unless a grammar allows no more)."""
    for row, wish in enumerate(wishes):
        if wish.mask is not None:
            logits_RV[row].masked_fill_(~wish.mask.to(logits_RV.device), float("-inf"))
        early = wish.index < wish.sequence.request.sampling_params.min_new_tokens
        if early and wish.sequence.stop_token_ids:
            stops = sorted(wish.sequence.stop_token_ids)  # no tensor: masks and logits live apart
            if wish.mask is None or int(wish.mask.sum()) > int(wish.mask[stops].sum()):
                logits_RV[row, stops] = float("-inf")


def _truncate(logits_RV: Tensor, wishes: list[LogitConstraint]) -> None:
    """Top-k, of its survivors top-p, of those min-p; the lowest id wins a tie."""
    asks = [wish.sequence.request.sampling_params for wish in wishes]
    some = [
        row
        for row, s in enumerate(asks)
        if not s.is_greedy and (s.top_p < 1 or s.top_k is not None or s.min_p > 0)
    ]
    if not some:
        return
    vocab = logits_RV.shape[1]
    row_R = torch.tensor(some, device=logits_RV.device)
    sorted_RV, order_RV = logits_RV[row_R].sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(vocab, device=logits_RV.device)
    sorted_RV.masked_fill_(
        rank_V >= _column((asks[r].top_k or vocab for r in some), logits_RV), float("-inf")
    )
    prob_RV = sorted_RV.softmax(-1)
    before_RV = prob_RV.cumsum(-1) - prob_RV
    # A sum of rounded probabilities may pass 1 before the last of them: 1 means all, so say 2.
    most = (asks[r].top_p if asks[r].top_p < 1 else 2.0 for r in some)
    kept_RV = before_RV < _column(most, logits_RV)
    kept_RV &= prob_RV >= _column((asks[r].min_p for r in some), logits_RV) * prob_RV[:, :1]
    kept_RV[:, 0] = True
    sorted_RV.masked_fill_(~kept_RV, float("-inf"))
    logits_RV[row_R] = sorted_RV.scatter(1, order_RV, sorted_RV)
