"""Model runner: launches scheduled steps, reads what they sampled and verifies drafts.

T tokens of the step, N rows to sample from (for each sequence that is complete in this step, the
last token and the drafts after it), D hidden, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from paddock.engine.async_step import FutureTokens, HostCopy, StepInFlight
from paddock.engine.cuda_graphs import CudaGraphRunner, UniformDecodeBatch
from paddock.engine.kv_cache import (
    PagedKVCache,
    PagedKVCacheView,
    PrefillChunks,
    build_attention_metadata,
    copy_to_device_async,
)
from paddock.engine.logprobs import score_prompts
from paddock.engine.output_processor import (
    FinishedSequence,
    SampledRows,
    SampledTokens,
    append_sampled,
)
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

_LOGITS_COPIES = 6  # held at once while sampling: logits, scaled, noise, log-softmax, ...


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
        wanted = settings.async_scheduling
        self.async_scheduling = (self.graphs is not None if wanted is None else wanted) and not (
            settings.capture_routing or steps
        )

    @torch.inference_mode()
    def launch_step(
        self, step: ScheduledStep, previous: StepInFlight | None, now: float
    ) -> StepInFlight:
        """Queue all device work of a step. Tokens that `previous` samples and the host has not read
        yet are taken on the device."""
        output = self._forward(step, previous.future_tokens(step) if previous else None)
        max_bytes = self.settings.logits_chunk_bytes
        score_prompts(step, output.hidden_TD, self.network, max_bytes)
        rows = self._rows(step)
        sampled = self._sample(output, rows)
        token_N, host_copy = None, None
        if rows:
            token_N = torch.cat(sampled.tokens)
            host_copy = HostCopy.of(token_N, torch.cat(sampled.logprobs))
        for each in step.scheduled:
            each.sequence.num_computed = each.stop
            each.sequence.num_in_flight += each.num_sampled > 0
        extend = output.mtp_extend if self.drafter is not None else None
        return StepInFlight(step, now, rows, sampled, token_N, host_copy, extend)

    @torch.inference_mode()
    def read_step(self, launched: StepInFlight, version: int) -> list[FinishedSequence]:
        """Wait for a step, append the sampled tokens and propose drafts; returns the sequences that
        ended. Tokens of sequences that were removed since the launch are dropped."""
        token_N, logprob_N = launched.host_copy.read() if launched.host_copy else ([], [])
        rows = [row for row in launched.rows if not row.sequence.removed]
        ended = append_sampled(rows, token_N, logprob_N, launched.sampled, version)
        if launched.mtp_extend is not None:
            state_TD = launched.mtp_extend(self._next_tokens(launched.step, token_N))
            self._propose_drafts(state_TD, rows, ended)
        return ended

    def _forward(self, step: ScheduledStep, future: FutureTokens | None) -> _ForwardOutput:
        """Forward pass; replays a CUDA graph if the step is decode-only: prompts have any length,
        and a capture costs several steps."""
        token_T = np.fromiter(chain(*(p.token_ids for p in step.scheduled)), dtype=np.int64)
        if self.graphs is not None and step.is_decode_only:
            return self._replay_graph(step, token_T, future)
        metadata, kv_slot_T = self._attention_metadata(step)
        kv_cache = PagedKVCacheView(self.cache, kv_slot_T, [s.states for s in step.sequences])
        aux = AuxRequest(routing_and_topk=self.routing_capturer is not None)
        input_T = copy_to_device_async(token_T, self.device)
        if future is not None:
            input_T = future.fill(input_T)
        output = self.network(input_T, metadata, kv_cache, aux)
        if self.routing_capturer is not None:
            self.routing_capturer.capture(output.aux, metadata, kv_slot_T)

        def mtp_extend(next_T: np.ndarray) -> Tensor:
            context = self.network.make_context(metadata, kv_cache)
            return self.network.mtp_draft(
                output.hidden_TD, copy_to_device_async(next_T, self.device), context
            )

        return _ForwardOutput(output.hidden_TD, None, mtp_extend)

    def _replay_graph(
        self, step: ScheduledStep, token_T: np.ndarray, future: FutureTokens | None
    ) -> _ForwardOutput:
        assert self.graphs is not None
        graphs, scheduled = self.graphs, step.scheduled
        slot_B = np.array([each.sequence.slot for each in scheduled], dtype=np.int64)
        past_B = np.array([each.start for each in scheduled], dtype=np.int64)
        batch = UniformDecodeBatch(slot_B, past_B, scheduled[0].tokens)
        hidden_TD, logits_TV = graphs.decode(batch, token_T, future)
        return _ForwardOutput(hidden_TD, logits_TV, lambda next_T: graphs.mtp_extend(batch, next_T))

    def recheck_weight_addresses(self) -> None:
        if self.graphs is not None:
            self.graphs.recheck_weight_addresses()

    def _attention_metadata(self, step: ScheduledStep) -> tuple[AttentionMetadata, Tensor]:
        prefill, batch = PrefillChunks(), step.scheduled[len(step.scheduled) - step.num_batched :]
        for each in step.scheduled[: len(step.scheduled) - step.num_batched]:
            assert each.sequence.slot is not None
            slot, stop = each.sequence.slot, each.start + each.tokens
            prefill.add(slot, self.cache.slot_mapping(slot, 0, stop), each.start)
        slots = np.array([each.sequence.slot for each in batch], dtype=np.int64)
        past_B = np.array([each.start for each in batch], dtype=np.int64)
        return build_attention_metadata(
            self.cache, prefill, slots, past_B, batch[0].tokens if batch else 0
        )

    def _rows(self, step: ScheduledStep) -> list[SampledRows]:
        rows, token, first = [], 0, 0
        for each in step.scheduled:
            if each.num_sampled:
                last = token + each.stop - each.start - 1
                rows.append(SampledRows(each.sequence, first, each.num_sampled, last))
            token, first = token + each.tokens, first + each.num_sampled
        return rows

    def _sample(self, output: _ForwardOutput, rows: list[SampledRows]) -> SampledTokens:
        """Sample a token for every row, in chunks, so that logits never take more than
        `logits_chunk_bytes`."""
        result = SampledTokens([], [], {})
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

    def _sample_chunk(self, output: _ForwardOutput, rows: list[SampledRows]) -> SamplerOutput:
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
                index_N=np.repeat([row.sequence.next_index for row in rows], counts) + offset_N,
                constraints=constraints,
                forced=forced,
            ),
        )

    def _logit_constraints(self, row: SampledRows, first: int) -> list[LogitConstraint]:
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
        self, state_TD: Tensor, rows: list[SampledRows], ended: list[FinishedSequence]
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


def _row_chunks(rows: list[SampledRows], max_rows: int) -> Iterator[list[SampledRows]]:
    """Chunks of at most `max_rows` rows, at least one sequence each."""
    chunk: list[SampledRows] = []
    for row in rows:
        if chunk and row.first + row.count - chunk[0].first > max_rows:
            yield chunk
            chunk = []
        chunk.append(row)
    if chunk:
        yield chunk
