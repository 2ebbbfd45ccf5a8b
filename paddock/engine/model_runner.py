"""Model runner: executes one scheduled step, samples and verifies drafts.

T tokens of the step, N rows to sample from (for each sequence that is complete in this step, the
last token and the drafts after it), D hidden, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from paddock.engine.cuda_graphs import CudaGraphRunner, UniformDecodeBatch
from paddock.engine.kv_cache import (
    PagedKVCache,
    PagedKVCacheView,
    PrefillChunks,
    build_attention_metadata,
    copy_to_device_async,
)
from paddock.engine.logprobs import logprobs_of_ids, score_prompts, top_logprobs
from paddock.engine.request import Sequence
from paddock.engine.routing_capture import RoutingCapturer
from paddock.engine.sampler import (
    LogitConstraint,
    Sampler,
    SamplerOutput,
    SamplingBatchInfo,
    SamplingTable,
    needs_logit_constraints,
)
from paddock.engine.scheduler import ScheduledStep
from paddock.engine.settings import EngineSettings
from paddock.engine.spec_decode import Drafter
from paddock.kernels.dispatch import is_enabled
from paddock.model import AttentionMetadata, AuxRequest, Transformer
from paddock.records import FinishReason

_LOGITS_COPIES = 6  # held at once while sampling: logits, scaled, noise, log-softmax, ...


@dataclass(frozen=True, slots=True)
class FinishedSequence:
    """A sequence that ended in this step, and why."""

    sequence: Sequence
    finish: FinishReason
    matched_stop: int | str | None = None
    error: str | None = None  # set if the request failed


@dataclass(slots=True)
class _SampledRows:
    """The rows of one sequence: first sampled row and number of rows."""

    sequence: Sequence
    first: int
    count: int
    token: int  # index of the first row among the step's tokens
    accepted: int = 0  # sampled tokens that were appended


@dataclass(frozen=True, slots=True)
class _SampledTokens:
    """Sampled tokens, in chunks."""

    tokens: list[Tensor]
    logprobs: list[Tensor]
    full_logprobs: dict[int, Tensor]  # by first row, for requests that need the whole row


@dataclass(frozen=True, slots=True, eq=False)
class _ForwardOutput:
    """Output of the forward pass of a step."""

    hidden_TD: Tensor
    logits_TV: Tensor | None  # None: computed by `_sample` in chunks
    mtp_extend: Callable[[np.ndarray], Tensor]  # next token of each -> MTP states


class ModelRunner:
    """Runs scheduled steps on the device. Used by the engine thread only."""

    def __init__(
        self,
        network: Transformer,
        cache: PagedKVCache,
        settings: EngineSettings,
        sampling_table: SamplingTable,
    ) -> None:
        self.network, self.cache, self.settings = network, cache, settings
        device = network.device
        self.sampler = Sampler(sampling_table, network.config.vocab, device)
        if device.type == "cuda" and is_enabled("mla_prepare"):
            network.fuse_weights()  # before CUDA graphs capture weight addresses
        steps = settings.num_speculative_tokens
        self.graphs = CudaGraphRunner.create_if_supported(network, cache, settings)
        self.drafter = Drafter(network, cache, self.sampler, steps, self.graphs) if steps else None
        self.routing_capturer = (
            RoutingCapturer(network.config, cache) if settings.capture_routing else None
        )
        self.device = device

    @torch.inference_mode()
    def execute_step(
        self, step: ScheduledStep, version: int, before_sync: Callable[[], None]
    ) -> list[FinishedSequence]:
        """Run the step, append the sampled tokens and propose drafts; returns the sequences that
        ended. `before_sync` is called when all device work is queued and nothing read back yet."""
        output = self._forward(step)
        max_bytes = self.settings.logits_chunk_bytes
        score_prompts(step, output.hidden_TD, self.network, max_bytes)
        rows = self._rows(step)
        sampled = self._sample(output, rows)
        for each in step.scheduled:
            each.sequence.num_computed = each.stop
        before_sync()
        token_N, logprob_N = _to_host(sampled) if rows else ([], [])
        ended = self._append_sampled(rows, token_N, logprob_N, sampled, version)
        if self.drafter is not None:
            state_TD = output.mtp_extend(self._next_tokens(step, token_N))
            self._propose_drafts(state_TD, rows, ended)
        return ended

    def _forward(self, step: ScheduledStep) -> _ForwardOutput:
        """Forward pass; replays a CUDA graph if the step is decode-only: prompts have any length,
        and a capture costs several steps."""
        token_T = np.fromiter(
            chain(*((*p.sequence.tokens[p.start : p.stop], *p.drafts) for p in step.scheduled)),
            dtype=np.int64,
        )
        if self.graphs is not None and step.is_decode_only:
            return self._replay_graph(step, token_T)
        metadata, kv_slot_T = self._attention_metadata(step)
        kv_cache = PagedKVCacheView(self.cache, kv_slot_T, [s.states for s in step.sequences])
        aux = AuxRequest(routing_and_topk=self.routing_capturer is not None)
        output = self.network(copy_to_device_async(token_T, self.device), metadata, kv_cache, aux)
        if self.routing_capturer is not None:
            self.routing_capturer.capture(output.aux, metadata, kv_slot_T)

        def mtp_extend(next_T: np.ndarray) -> Tensor:
            context = self.network.make_context(metadata, kv_cache)
            return self.network.mtp_draft(
                output.hidden_TD, copy_to_device_async(next_T, self.device), context
            )

        return _ForwardOutput(output.hidden_TD, None, mtp_extend)

    def _replay_graph(self, step: ScheduledStep, token_T: np.ndarray) -> _ForwardOutput:
        assert self.graphs is not None
        graphs, scheduled = self.graphs, step.scheduled
        slot_B = np.array([each.sequence.slot for each in scheduled], dtype=np.int64)
        past_B = np.array([each.start for each in scheduled], dtype=np.int64)
        batch = UniformDecodeBatch(slot_B, past_B, scheduled[0].tokens)
        hidden_TD, logits_TV = graphs.decode(batch, token_T)
        return _ForwardOutput(hidden_TD, logits_TV, lambda next_T: graphs.mtp_extend(batch, next_T))

    def recheck_weight_addresses(self) -> None:
        if self.graphs is not None:
            self.graphs.recheck_weight_addresses()

    def _attention_metadata(self, step: ScheduledStep) -> tuple[AttentionMetadata, Tensor]:
        prefill, batch = PrefillChunks(), step.scheduled[len(step.scheduled) - step.num_batched :]
        for each in step.scheduled[: len(step.scheduled) - step.num_batched]:
            assert each.sequence.slot is not None
            prefill.add(
                self.cache.slot_mapping(each.sequence.slot, 0, each.start + each.tokens), each.start
            )
        slots = np.array([each.sequence.slot for each in batch], dtype=np.int64)
        past_B = np.array([each.start for each in batch], dtype=np.int64)
        return build_attention_metadata(
            self.cache, prefill, slots, past_B, batch[0].tokens if batch else 0
        )

    def _rows(self, step: ScheduledStep) -> list[_SampledRows]:
        rows, token, first = [], 0, 0
        for each in step.scheduled:
            if each.num_sampled:
                last = token + each.stop - each.start - 1
                rows.append(_SampledRows(each.sequence, first, each.num_sampled, last))
            token, first = token + each.tokens, first + each.num_sampled
        return rows

    def _sample(self, output: _ForwardOutput, rows: list[_SampledRows]) -> _SampledTokens:
        """Sample a token for every row, in chunks, so that logits never take more than
        `logits_chunk_bytes`."""
        result = _SampledTokens([], [], {})
        max_rows = max(
            1, self.settings.logits_chunk_bytes // (_LOGITS_COPIES * 4 * self.network.config.vocab)
        )
        for chunk in _row_chunks(rows, max_rows):
            first = chunk[0].first
            sampled = self._sample_chunk(output, chunk)
            result.tokens.append(sampled.token_N)
            result.logprobs.append(sampled.logprob_N)
            for row in chunk:
                request = row.sequence.request
                if request.top_logprobs or request.logprob_token_ids or row.sequence.must_complete:
                    n = slice(row.first - first, row.first - first + row.count)
                    result.full_logprobs[row.first] = sampled.logprob_NV[n].clone()
        return result

    def _sample_chunk(self, output: _ForwardOutput, rows: list[_SampledRows]) -> SamplerOutput:
        counts, first = [row.count for row in rows], rows[0].first
        start_N = np.repeat([row.first - first for row in rows], counts)
        offset_N = np.arange(len(start_N)) - start_N
        token_N = np.repeat([row.token for row in rows], counts) + offset_N
        row_TX = output.hidden_TD if output.logits_TV is None else output.logits_TV
        if len(token_N) < len(row_TX):
            row_TX = row_TX[copy_to_device_async(token_N, self.device)]
        constraints, forced = [], []
        for row in rows:
            constraints += self._logit_constraints(row, row.first - first)
            if row.sequence.thinking_budget is not None:
                drafts = row.sequence.drafts[: row.count - 1]
                closes = row.sequence.thinking_budget.forced_rows(drafts)
                close_id = row.sequence.thinking_budget.close_id
                forced += [(row.first - first + j, close_id) for j in closes]
        return self.sampler.sample(
            self.network.head(row_TX) if output.logits_TV is None else row_TX,
            SamplingBatchInfo(
                slot_N=np.repeat([row.sequence.slot for row in rows], counts),
                index_N=np.repeat([row.sequence.num_generated for row in rows], counts) + offset_N,
                constraints=constraints,
                forced=forced,
            ),
        )

    def _logit_constraints(self, row: _SampledRows, first: int) -> list[LogitConstraint]:
        sequence = row.sequence
        if not needs_logit_constraints(sequence.request.sampling_params):
            return []
        drafts = sequence.drafts[: row.count - 1]
        masks: list[Tensor | None] = [None] * row.count
        if sequence.constraint is not None:
            masks = sequence.constraint.allowed_masks(drafts)
        return [
            LogitConstraint(first + j, sequence, drafts[:j], masks[j])
            for j in range(min(row.count, len(masks)))
        ]

    # --- sampled tokens ---------------------------------------------------------------------------

    def _append_sampled(
        self,
        rows: list[_SampledRows],
        token_N: list[int],
        logprob_N: list[float],
        sampled: _SampledTokens,
        version: int,
    ) -> list[FinishedSequence]:
        ended = []
        for row in rows:
            n = slice(row.first, row.first + row.count)
            end = self._append_verified(row, token_N[n], logprob_N[n], sampled, version)
            self._count(row)
            if sampled.full_logprobs:
                self._add_requested_logprobs(row, sampled)
            if end is not None:
                ended.append(end)
        return ended

    def _append_verified(
        self,
        row: _SampledRows,
        tokens: list[int],
        logprobs: list[float],
        sampled: _SampledTokens,
        version: int,
    ) -> FinishedSequence | None:
        """Append sampled tokens up to and including the first that differs from its draft."""
        sequence = row.sequence
        for j, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            if not isfinite(logprob):
                where = f"at token {len(sequence.tokens)}"
                return FinishedSequence(
                    sequence, "abort", error=f"the logits {where} are not finite"
                )
            forced = _towards_completion(sequence, token)
            if forced != token:
                if j:
                    return None  # the next step forces it: only row 0 has the log-probability
                token, logprob = forced, float(sampled.full_logprobs[row.first][0, forced])
                sequence.forced.append(sequence.num_generated)
            self._append(sequence, token, logprob, version)
            row.accepted += 1
            error = sequence.constraint.accept_token(token) if sequence.constraint else None
            if error is not None:
                return FinishedSequence(sequence, "abort", error=error)
            end = self._check_finished(sequence)
            if end is not None or j + 1 == row.count or sequence.drafts[j] != token:
                return end
        return None

    def _append(self, sequence: Sequence, token: int, logprob: float, version: int) -> None:
        thinking = sequence.thinking_budget
        if thinking is not None:
            if thinking.is_exhausted:
                sequence.forced.append(sequence.num_generated)
            thinking.feed(token)
        sequence.append(token, logprob, version)

    def _check_finished(self, sequence: Sequence) -> FinishedSequence | None:
        """Whether the token just appended ends the sequence."""
        token, check_stop = sequence.tokens[-1], True
        if sequence.num_generated < sequence.request.sampling_params.min_new_tokens:
            check_stop = False
        matched = (
            sequence.stop_checker.feed(token, check=check_stop) if sequence.stop_checker else None
        )
        if check_stop and token in sequence.stop_token_ids:
            return FinishedSequence(sequence, "stop", token)
        if matched is not None:
            return FinishedSequence(sequence, "stop", matched)
        if sequence.constraint is not None and sequence.constraint.finished:
            return FinishedSequence(sequence, "stop", token)
        if sequence.num_generated >= sequence.max_new_tokens:
            return FinishedSequence(sequence, "length")
        return None

    def _count(self, row: _SampledRows) -> None:
        sequence = row.sequence
        sequence.verify_steps += 1
        if row.accepted:
            sequence.num_computed = len(sequence.tokens) - 1
            if row.count > 1:
                sequence.draft_tokens += row.count - 1
                sequence.accepted_draft_tokens += row.accepted - 1
                sequence.draft_stats.observe_draft(
                    proposed=row.count - 1, accepted=row.accepted - 1
                )

    def _add_requested_logprobs(self, row: _SampledRows, sampled: _SampledTokens) -> None:
        """Add the extra log-probabilities requested for the sequence."""
        if row.accepted and row.first in sampled.full_logprobs:
            request, logprob_NV = (
                row.sequence.request,
                sampled.full_logprobs[row.first][: row.accepted],
            )
            row.sequence.top_logprobs += top_logprobs(logprob_NV, request.top_logprobs)
            row.sequence.requested_logprobs += logprobs_of_ids(
                logprob_NV, request.logprob_token_ids
            )

    # --- drafts -----------------------------------------------------------------------------------

    def _next_tokens(self, step: ScheduledStep, token_N: list[int]) -> np.ndarray:
        """The token after each token of the step. After a rejected draft it is arbitrary: those
        KV entries are beyond the end of their sequence and will be overwritten."""
        following: list[int] = []
        first = 0
        for each in step.scheduled:
            following += each.sequence.tokens[each.start + 1 : each.stop]
            if each.num_sampled:
                following += token_N[first : first + each.num_sampled]
            else:
                following.append(each.sequence.tokens[each.stop])
            first += each.num_sampled
        return np.array(following)

    def _propose_drafts(
        self, state_TD: Tensor, rows: list[_SampledRows], ended: list[FinishedSequence]
    ) -> None:
        assert self.drafter is not None
        finished = {id(end.sequence) for end in ended}
        live = [row for row in rows if id(row.sequence) not in finished]
        if live:
            # Draft from the last accepted token's state, i.e. the token before the newest.
            last_N = np.array([row.token + row.accepted - 1 for row in live])
            self.drafter.propose(
                state_TD[copy_to_device_async(last_N, self.device)], [row.sequence for row in live]
            )


def _towards_completion(sequence: Sequence, token: int) -> int:
    """The token to append instead of `token`, so that the grammar completes in time."""
    left, constraint = sequence.max_new_tokens - sequence.num_generated - 1, sequence.constraint
    return token if constraint is None else constraint.token_towards_completion(token, left)


def _to_host(sampled: _SampledTokens) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities in one transfer: float64 holds both exactly."""
    both = (torch.cat(sampled.tokens).double(), torch.cat(sampled.logprobs).double())
    token_N, logprob_N = torch.stack(both).tolist()
    return [int(token) for token in token_N], logprob_N


def _row_chunks(rows: list[_SampledRows], max_rows: int) -> Iterator[list[_SampledRows]]:
    """Chunks of at most `max_rows` rows, at least one sequence each."""
    chunk: list[_SampledRows] = []
    for row in rows:
        if chunk and row.first + row.count - chunk[0].first > max_rows:
            yield chunk
            chunk = []
        chunk.append(row)
    if chunk:
        yield chunk
