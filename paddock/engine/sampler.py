"""Batched sampling: temperature, penalties, logit constraints and reproducible Gumbel noise.

The noise is a function of (seed, index of the token in its output), so a sample depends neither on
the rest of the batch nor on how many tokens are verified together. A token is sampled by adding
Gumbel noise to the logits and taking the argmax. That makes speculative decoding lossless without
rejection sampling: a draft is accepted if and only if it is what would have been sampled anyway
(see spec_decode.py).

N rows, V vocabulary, R rows with logit constraints.
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
    """Sampling parameters of the running requests as arrays indexed by slot."""

    def __init__(self, slots: int) -> None:
        self.temperature = np.ones(slots, dtype=np.float32)
        self.greedy = np.zeros(slots, dtype=bool)
        self.seed = np.zeros(slots, dtype=np.uint64)

    def set(self, slot: int, sampling: SamplingParams, seed: int) -> None:
        self.temperature[slot] = sampling.logprob_temperature
        self.greedy[slot] = sampling.is_greedy
        self.seed[slot] = seed


@dataclass(frozen=True, slots=True)
class LogitConstraint:
    """Logit constraint of one row: its sequence, the drafts before it, and the grammar mask."""

    row: int
    sequence: Sequence
    drafts: list[int]
    mask: Tensor | None = None  # [V] bool, tokens that the grammar allows

    @property
    def index(self) -> int:
        """Index of the token to be sampled in its output."""
        return self.sequence.next_index + len(self.drafts)


@dataclass(frozen=True, slots=True)
class SamplingBatchInfo:
    """Slot, output index and constraints of the rows to be sampled."""

    slot_N: np.ndarray
    index_N: np.ndarray  # of the token in its output
    constraints: list[LogitConstraint]
    forced: list[tuple[int, int]]  # (row, token to use regardless of the logits)


@dataclass(frozen=True, slots=True, eq=False)
class SamplerOutput:
    """Sampled tokens and log-probabilities."""

    token_N: Tensor
    logprob_N: Tensor
    logprob_NV: Tensor  # of softmax(logits / temperature)


def needs_logit_constraints(sampling: SamplingParams) -> bool:
    """Whether the request needs more than temperature: top-p/k, penalties, bias or grammar."""
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
    """Samples a token for every row of logits."""

    def __init__(self, table: SamplingTable, vocab: int, device: torch.device) -> None:
        self.table, self.device = table, device
        self.hash_V = _hash(torch.arange(vocab, dtype=torch.int32, device=device))

    def sample(self, logits_NV: Tensor, rows: SamplingBatchInfo) -> SamplerOutput:
        temperature_N1 = self._tensor(self.table.temperature[rows.slot_N]).unsqueeze(1)
        scaled_NV = logits_NV.float() / temperature_N1
        logprob_NV = scaled_NV.log_softmax(-1)
        if rows.constraints:
            row_R = torch.tensor([each.row for each in rows.constraints], device=self.device)
            constrained_RV = apply_logit_constraints(
                logits_NV[row_R].float(), temperature_N1[row_R], rows.constraints
            )
            scaled_NV.index_copy_(0, row_R, constrained_RV)
        token_N = self.gumbel_argmax(scaled_NV, rows.slot_N, rows.index_N)
        for row, token in rows.forced:
            token_N[row] = token
        return SamplerOutput(
            token_N, logprob_NV.gather(1, token_N.unsqueeze(1)).squeeze(1), logprob_NV
        )

    def gumbel_argmax(self, scaled_NV: Tensor, slot_N: np.ndarray, index_N: np.ndarray) -> Tensor:
        """The argmax of each row of scaled logits, with the row's Gumbel noise unless greedy."""
        random_N = ~self.table.greedy[slot_N]
        if not random_N.any():
            return scaled_NV.argmax(-1)
        key_N = random_bits(self.table.seed[slot_N], index_N)
        if random_N.all():
            return (scaled_NV + self.gumbel_noise(key_N)).argmax(-1)
        row_R = self._tensor(np.flatnonzero(random_N))
        noisy_RV = scaled_NV[row_R] + self.gumbel_noise(key_N[random_N])
        return scaled_NV.index_copy(0, row_R, noisy_RV).argmax(-1)

    def draft(self, logits_NV: Tensor, slot_N: np.ndarray, index_N: np.ndarray) -> Tensor:
        """A draft of what `sample` will return: same noise, no logit constraints."""
        temperature_N = self._tensor(self.table.temperature[slot_N])
        return self.gumbel_argmax(logits_NV.float() / temperature_N.unsqueeze(1), slot_N, index_N)

    def gumbel_noise(self, key_N: np.ndarray) -> Tensor:
        """Standard Gumbel noise [N, V], a function of key and token only."""
        halves = np.ascontiguousarray(key_N).view(np.int32).reshape(-1, 2)
        half_N2 = self._tensor(halves.copy())
        x_NV = _hash((self.hash_V ^ half_N2[:, :1]) + half_N2[:, 1:])
        # Uniform in (0, 1), finest near 0, which is where the argmax comes from.
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


def _hash(x: Tensor) -> Tensor:
    """Hash int32 numbers in place (bijective)."""
    for shift, odd in ((16, _ODD[0]), (15, _ODD[1]), (16, _ODD[2])):
        x.bitwise_xor_((x >> shift).bitwise_and_(0xFFFFFFFF >> shift)).mul_(odd)
    return x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))


# --- logit constraints ----------------------------------------------------------------------------


def apply_logit_constraints(
    logits_RV: Tensor, temperature_R1: Tensor, constraints: list[LogitConstraint]
) -> Tensor:
    """Scaled logits after penalties, bias, grammar and truncation; forbidden tokens are -inf."""
    _penalize(logits_RV, constraints)
    _bias(logits_RV, constraints)
    _forbid(logits_RV, constraints)
    logits_RV /= temperature_R1
    _truncate(logits_RV, constraints)
    return logits_RV


def _column(values: Iterable[float], like: Tensor) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float32, device=like.device).unsqueeze(1)


def _penalize(logits_RV: Tensor, constraints: list[LogitConstraint]) -> None:
    params = [(c.sequence.request.sampling_params, c) for c in constraints]
    if any(s.frequency_penalty or s.presence_penalty for s, _ in params):
        outputs = [c.sequence.tokens[c.sequence.num_prompt :] for c in constraints]
        count_RV = _counts(logits_RV, outputs, params)
        logits_RV -= count_RV * _column((s.frequency_penalty for s, _ in params), logits_RV)
        logits_RV -= (count_RV > 0) * _column((s.presence_penalty for s, _ in params), logits_RV)
    if any(s.repetition_penalty != 1 for s, _ in params):
        seen_RV = _counts(logits_RV, [c.sequence.tokens for c in constraints], params) > 0
        penalty_R1 = _column((s.repetition_penalty for s, _ in params), logits_RV)
        penalized_RV = torch.where(logits_RV > 0, logits_RV / penalty_R1, logits_RV * penalty_R1)
        torch.where(seen_RV, penalized_RV, logits_RV, out=logits_RV)


def _counts(
    logits_RV: Tensor, texts: list[list[int]], params: list[tuple[SamplingParams, LogitConstraint]]
) -> Tensor:
    """[R, V] how often each token occurs in a row's text and in the drafts before it."""
    rows, tokens = [], []
    for row, (text, (_, constraint)) in enumerate(zip(texts, params, strict=True)):
        rows += [row] * (len(text) + len(constraint.drafts))
        tokens += text + constraint.drafts
    count_RV = torch.zeros_like(logits_RV)
    index = torch.tensor([rows, tokens], dtype=torch.int64, device=logits_RV.device)
    one = torch.ones(len(rows), device=logits_RV.device)
    return count_RV.index_put_((index[0], index[1]), one, accumulate=True)


def _bias(logits_RV: Tensor, constraints: list[LogitConstraint]) -> None:
    entries = [
        (row, bias.token_id, bias.amount)
        for row, constraint in enumerate(constraints)
        for bias in constraint.sequence.request.sampling_params.logit_bias
    ]
    if entries:
        rows, tokens, amounts = zip(*entries, strict=True)
        device = logits_RV.device
        index = (torch.tensor(rows, device=device), torch.tensor(tokens, device=device))
        amount = torch.tensor(amounts, dtype=logits_RV.dtype, device=device)
        logits_RV.index_put_(index, amount, accumulate=True)


def _forbid(logits_RV: Tensor, constraints: list[LogitConstraint]) -> None:
    """Mask tokens the grammar forbids, and stop tokens below `min_new_tokens` (unless the grammar
    allows nothing else)."""
    for row, constraint in enumerate(constraints):
        mask, sequence = constraint.mask, constraint.sequence
        if mask is not None:
            logits_RV[row].masked_fill_(~mask.to(logits_RV.device), float("-inf"))
        early = constraint.index < sequence.request.sampling_params.min_new_tokens
        if early and sequence.stop_token_ids:
            stops = sorted(sequence.stop_token_ids)  # a list: mask and logits differ in device
            if mask is None or int(mask.sum()) > int(mask[stops].sum()):
                logits_RV[row, stops] = float("-inf")


def _truncate(logits_RV: Tensor, constraints: list[LogitConstraint]) -> None:
    """Top-k, then top-p of what is left, then min-p; ties go to the lowest id."""
    params = [c.sequence.request.sampling_params for c in constraints]
    some = [
        row
        for row, s in enumerate(params)
        if not s.is_greedy and (s.top_p < 1 or s.top_k is not None or s.min_p > 0)
    ]
    if not some:
        return
    vocab = logits_RV.shape[1]
    row_R = torch.tensor(some, device=logits_RV.device)
    sorted_RV, order_RV = logits_RV[row_R].sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(vocab, device=logits_RV.device)
    sorted_RV.masked_fill_(
        rank_V >= _column((params[r].top_k or vocab for r in some), logits_RV), float("-inf")
    )
    prob_RV = sorted_RV.softmax(-1)
    before_RV = prob_RV.cumsum(-1) - prob_RV
    # A sum of rounded probabilities may exceed 1 before the last one: for 1 (all), compare with 2.
    limit = (params[r].top_p if params[r].top_p < 1 else 2.0 for r in some)
    kept_RV = before_RV < _column(limit, logits_RV)
    kept_RV &= prob_RV >= _column((params[r].min_p for r in some), logits_RV) * prob_RV[:, :1]
    kept_RV[:, 0] = True
    sorted_RV.masked_fill_(~kept_RV, float("-inf"))
    logits_RV[row_R] = sorted_RV.scatter(1, order_RV, sorted_RV)
