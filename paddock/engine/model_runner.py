"""One step on the device: the plan's tokens through the network, and what comes of them.

T tokens of the step, N rows that are sampled from (of each part that ends its sequence, the last
token and the drafts behind it), D hidden, V vocabulary.
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
from paddock.engine.request import FinishReason, Sequence, TokenLogprob
from paddock.engine.routing_capture import RoutingCapturer
from paddock.engine.sampler import (
    LogitConstraint,
    Sampler,
    SamplerOutput,
    SamplingBatchInfo,
    SamplingTable,
    needs_logit_constraints,
)
from paddock.engine.scheduler import ScheduledSequence, ScheduledStep
from paddock.engine.settings import EngineSettings
from paddock.engine.spec_decode import Drafter
from paddock.kernels.dispatch import is_enabled
from paddock.kernels.workspace import chunks
from paddock.model import AttentionMetadata, AuxRequest, Transformer

_COPIES = 6  # of the scores that sampling holds at once: logits, tempered, noise, log-softmax, ...


@dataclass(frozen=True, slots=True)
class FinishedSequence:
    """A sequence that wrote its last token."""

    sequence: Sequence
    finish: FinishReason
    matched_stop: int | str | None = None
    error: str | None = None  # it could not be written


@dataclass(slots=True)
class _Rows:
    """A sequence's rows: where they begin among those sampled, and how many there are."""

    sequence: Sequence
    first: int
    count: int
    token: int  # where they begin among the step's tokens
    wrote: int = 0  # of the tokens sampled, those that were kept


@dataclass(frozen=True, slots=True)
class _SampledTokens:
    """What was sampled, in parts."""

    tokens: list[Tensor]
    logprobs: list[Tensor]
    asked: dict[int, Tensor]  # by first row: the log-probabilities of those who want more of them


@dataclass(frozen=True, slots=True, eq=False)
class _Computed:
    """What the network made of a step's tokens."""

    hidden_TD: Tensor
    logits_TV: Tensor | None  # None: not yet asked for
    read: Callable[[np.ndarray], Tensor]  # the token after each -> MTP states


class ModelRunner:
    def __init__(
        self,
        network: Transformer,
        cache: PagedKVCache,
        settings: EngineSettings,
        dials: SamplingTable,
    ) -> None:
        self.network, self.cache, self.settings = network, cache, settings
        device = network.embed.weight.device
        self.sampler = Sampler(dials, network.config.vocab, device)
        if device.type == "cuda" and is_enabled("mla_prepare"):
            network.fuse_weights()  # before recordings remember where the weights lie
        steps = settings.num_speculative_tokens
        self.graphs = CudaGraphRunner.create_if_supported(network, cache, settings)
        self.drafter = Drafter(network, cache, self.sampler, steps, self.graphs) if steps else None
        self.decisions = (
            RoutingCapturer(network.config, cache) if settings.capture_routing else None
        )
        self.device = device

    @torch.inference_mode()
    def execute_step(
        self, plan: ScheduledStep, version: int, meanwhile: Callable[[], None]
    ) -> list[FinishedSequence]:
        """Read the plan's tokens, write the next ones; who is done, and how. `meanwhile` is called
        when all is queued and nothing read back yet."""
        done = self._compute(plan)
        self._score_prompts(plan, done.hidden_TD)
        rows = self._rows(plan)
        drawn = self._sample(done, rows)
        for part in plan.scheduled:
            part.sequence.num_computed = part.stop
        meanwhile()
        token_N, logprob_N = _on_the_host(drawn) if rows else ([], [])
        ended = self._write(rows, token_N, logprob_N, drawn, version)
        if self.drafter is not None:
            state_TD = done.read(self._next_tokens(plan, token_N))
            self._guess(state_TD, rows, ended)
        return ended

    def _compute(self, plan: ScheduledStep) -> _Computed:
        """The plan's tokens through the network; repeated from a recording if all it does is write:
        prompts come in any length, and a recording costs several steps."""
        token_T = np.fromiter(
            chain(*((*p.sequence.tokens[p.start : p.stop], *p.drafts) for p in plan.scheduled)),
            dtype=np.int64,
        )
        if self.graphs is not None and plan.is_decode_only:
            return self._repeat(plan, token_T)
        layout, slot_T = self._arrange(plan)
        memory = PagedKVCacheView(self.cache, slot_T, [s.states for s in plan.sequences])
        ask = AuxRequest(routing_and_topk=self.decisions is not None)
        output = self.network(copy_to_device_async(token_T, self.device), layout, memory, ask)
        if self.decisions is not None:
            self.decisions.capture(output.aux, layout, slot_T)

        def read(next_T: np.ndarray) -> Tensor:
            step = self.network.make_context(layout, memory)
            return self.network.mtp_draft(
                output.hidden_TD, copy_to_device_async(next_T, self.device), step
            )

        return _Computed(output.hidden_TD, None, read)

    def _repeat(self, plan: ScheduledStep, token_T: np.ndarray) -> _Computed:
        assert self.graphs is not None
        graphs, parts = self.graphs, plan.scheduled
        seat_B = np.array([part.sequence.slot for part in parts], dtype=np.int64)
        past_B = np.array([part.start for part in parts], dtype=np.int64)
        asked = UniformDecodeBatch(seat_B, past_B, parts[0].tokens)
        hidden_TD, logits_TV = graphs.decode(asked, token_T)
        return _Computed(hidden_TD, logits_TV, lambda next_T: graphs.mtp_extend(asked, next_T))

    def recheck_weight_addresses(self) -> None:
        if self.graphs is not None:
            self.graphs.recheck_weight_addresses()

    def _arrange(self, plan: ScheduledStep) -> tuple[AttentionMetadata, Tensor]:
        loose, batch = PrefillChunks(), plan.scheduled[len(plan.scheduled) - plan.num_batched :]
        for part in plan.scheduled[: len(plan.scheduled) - plan.num_batched]:
            assert part.sequence.slot is not None
            loose.add(
                self.cache.slot_mapping(part.sequence.slot, 0, part.start + part.tokens), part.start
            )
        seats = np.array([part.sequence.slot for part in batch], dtype=np.int64)
        past_B = np.array([part.start for part in batch], dtype=np.int64)
        return build_attention_metadata(
            self.cache, loose, seats, past_B, batch[0].tokens if batch else 0
        )

    def _rows(self, plan: ScheduledStep) -> list[_Rows]:
        rows, token, first = [], 0, 0
        for part in plan.scheduled:
            if part.num_sampled:
                last = token + part.stop - part.start - 1
                rows.append(_Rows(part.sequence, first, part.num_sampled, last))
            token, first = token + part.tokens, first + part.num_sampled
        return rows

    def _sample(self, done: _Computed, rows: list[_Rows]) -> _SampledTokens:
        """A token for every row, a few rows at a time, so that scores over the vocabulary never
        take more than `logits_bytes`."""
        drawn = _SampledTokens([], [], {})
        most = max(1, self.settings.logits_chunk_bytes // (_COPIES * 4 * self.network.config.vocab))
        for part in _parted(rows, most):
            first = part[0].first
            sampled = self._sample_part(done, part)
            drawn.tokens.append(sampled.token_N)
            drawn.logprobs.append(sampled.logprob_N)
            for row in part:
                request = row.sequence.request
                if request.top_logprobs or request.logprob_token_ids or row.sequence.must_complete:
                    n = slice(row.first - first, row.first - first + row.count)
                    drawn.asked[row.first] = sampled.logprob_NV[n].clone()
        return drawn

    def _sample_part(self, done: _Computed, rows: list[_Rows]) -> SamplerOutput:
        counts, first = [row.count for row in rows], rows[0].first
        start_N = np.repeat([row.first - first for row in rows], counts)
        offset_N = np.arange(len(start_N)) - start_N
        token_N = np.repeat([row.token for row in rows], counts) + offset_N
        known_TX = done.hidden_TD if done.logits_TV is None else done.logits_TV
        if len(token_N) < len(known_TX):
            known_TX = known_TX[copy_to_device_async(token_N, self.device)]
        wishes, forced = [], []
        for row in rows:
            wishes += self._wishes(row, row.first - first)
            if row.sequence.thinking_budget is not None:
                drafts = row.sequence.drafts[: row.count - 1]
                closes = row.sequence.thinking_budget.forced_rows(drafts)
                close_id = row.sequence.thinking_budget.close_id
                forced += [(row.first - first + j, close_id) for j in closes]
        return self.sampler.sample(
            self.network.head(known_TX) if done.logits_TV is None else known_TX,
            SamplingBatchInfo(
                slot_N=np.repeat([row.sequence.slot for row in rows], counts),
                index_N=np.repeat([row.sequence.num_generated for row in rows], counts) + offset_N,
                constraints=wishes,
                forced=forced,
            ),
        )

    def _wishes(self, row: _Rows, first: int) -> list[LogitConstraint]:
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

    # --- what was sampled -------------------------------------------------------------------------

    def _write(
        self,
        rows: list[_Rows],
        token_N: list[int],
        logprob_N: list[float],
        drawn: _SampledTokens,
        version: int,
    ) -> list[FinishedSequence]:
        ended = []
        for row in rows:
            n = slice(row.first, row.first + row.count)
            end = self._keep(row, token_N[n], logprob_N[n], drawn, version)
            self._account(row)
            if drawn.asked:
                self._report(row, drawn)
            if end is not None:
                ended.append(end)
        return ended

    def _keep(
        self,
        row: _Rows,
        tokens: list[int],
        logprobs: list[float],
        drawn: _SampledTokens,
        version: int,
    ) -> FinishedSequence | None:
        """Append sampled tokens for as long as each follows what was drafted."""
        sequence = row.sequence
        for j, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            if not isfinite(logprob):
                where = f"at token {len(sequence.tokens)}"
                return FinishedSequence(
                    sequence, "abort", error=f"the network's scores {where} are no numbers"
                )
            turned = _turned(sequence, token)
            if turned != token:
                if j:
                    return None  # the next step turns
                token, logprob = turned, float(drawn.asked[row.first][0, turned])
                sequence.forced.append(sequence.num_generated)
            self._append(sequence, token, logprob, version)
            row.wrote += 1
            wrong = sequence.constraint.accept_token(token) if sequence.constraint else None
            if wrong is not None:
                return FinishedSequence(sequence, "abort", error=wrong)
            end = self._end(sequence)
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

    def _end(self, sequence: Sequence) -> FinishedSequence | None:
        """Whether the token just written is the last."""
        token, heed = sequence.tokens[-1], True
        if sequence.num_generated < sequence.request.sampling_params.min_new_tokens:
            heed = False
        matched = sequence.stop_checker.feed(token, heed=heed) if sequence.stop_checker else None
        if heed and token in sequence.stop_token_ids:
            return FinishedSequence(sequence, "stop", token)
        if matched is not None:
            return FinishedSequence(sequence, "stop", matched)
        if sequence.constraint is not None and sequence.constraint.finished:
            return FinishedSequence(sequence, "stop", token)
        if sequence.num_generated >= sequence.max_new_tokens:
            return FinishedSequence(sequence, "length")
        return None

    def _account(self, row: _Rows) -> None:
        sequence = row.sequence
        sequence.verify_steps += 1
        if row.wrote:
            sequence.num_computed = len(sequence.tokens) - 1
            if row.count > 1:
                sequence.draft_tokens += row.count - 1
                sequence.accepted_draft_tokens += row.wrote - 1
                sequence.draft_stats.observe_draft(made=row.count - 1, kept=row.wrote - 1)

    def _report(self, row: _Rows, drawn: _SampledTokens) -> None:
        """The log-probabilities a request asked for, of the tokens it got."""
        if row.wrote and row.first in drawn.asked:
            request, logp_NV = row.sequence.request, drawn.asked[row.first][: row.wrote]
            row.sequence.top_logprobs += top_logprobs(logp_NV, request.top_logprobs)
            row.sequence.requested_logprobs += logprobs_of_ids(logp_NV, request.logprob_token_ids)

    # --- prompts ----------------------------------------------------------------------------------

    def _score_prompts(self, plan: ScheduledStep, hidden_TD: Tensor) -> None:
        first = 0
        for part in plan.scheduled:
            if part.sequence.next_prompt_logprob is not None:
                self._score(part, hidden_TD[first : first + part.tokens])
            first += part.tokens

    def _score(self, read: ScheduledSequence, hidden_TD: Tensor) -> None:
        """Log-probabilities of the prompt tokens that this part's states predict."""
        sequence, request = read.sequence, read.sequence.request
        start = sequence.next_prompt_logprob
        if start == 0:  # nothing comes before the first token
            sequence.prompt_logprobs.append(None)
            sequence.prompt_top_logprobs.append(None)
            sequence.prompt_requested_logprobs.append(None)
            start = sequence.next_prompt_logprob
        if start is None:
            return
        stop = min(read.stop + 1, sequence.num_prompt)
        hidden_TD = hidden_TD[start - 1 - read.start : stop - 1 - read.start]
        target_T = torch.tensor(sequence.tokens[start:stop], device=self.device)
        row_bytes = 8 * self.network.config.vocab
        for part in chunks(len(target_T), row_bytes, self.settings.logits_chunk_bytes):
            logp_TV = self.network.head(hidden_TD[part]).float().log_softmax(-1)
            found = logp_TV.gather(1, target_T[part].unsqueeze(1)).squeeze(1)
            sequence.prompt_logprobs += found.tolist()
            sequence.prompt_top_logprobs += top_logprobs(logp_TV, request.top_logprobs)
            sequence.prompt_requested_logprobs += logprobs_of_ids(
                logp_TV, request.logprob_token_ids
            )

    # --- drafts -----------------------------------------------------------------------------------

    def _next_tokens(self, plan: ScheduledStep, token_N: list[int]) -> np.ndarray:
        """The token after each of the step's tokens. Behind a draft that was not kept it is
        anyone's guess; such rows are beyond the end of their sequence and will be overwritten."""
        following: list[int] = []
        first = 0
        for part in plan.scheduled:
            following += part.sequence.tokens[part.start + 1 : part.stop]
            if part.num_sampled:
                following += token_N[first : first + part.num_sampled]
            else:
                following.append(part.sequence.tokens[part.stop])
            first += part.num_sampled
        return np.array(following)

    def _guess(self, state_TD: Tensor, rows: list[_Rows], ended: list[FinishedSequence]) -> None:
        assert self.drafter is not None
        done = {id(end.sequence) for end in ended}
        live = [row for row in rows if id(row.sequence) not in done]
        if live:
            # From the last token that was kept, the one before the newest.
            last_N = np.array([row.token + row.wrote - 1 for row in live])
            self.drafter.propose(
                state_TD[copy_to_device_async(last_N, self.device)], [row.sequence for row in live]
            )


def _turned(sequence: Sequence, token: int) -> int:
    """What to append for `token`, so that the reply is complete in time."""
    room, bound = sequence.max_new_tokens - sequence.num_generated - 1, sequence.constraint
    return token if bound is None else bound.token_towards_completion(token, room)


def _on_the_host(drawn: _SampledTokens) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities, in one trip: float64 holds both exactly."""
    both = (torch.cat(drawn.tokens).double(), torch.cat(drawn.logprobs).double())
    token_N, logprob_N = torch.stack(both).tolist()
    return [int(token) for token in token_N], logprob_N


def _parted(rows: list[_Rows], most: int) -> Iterator[list[_Rows]]:
    """Runs of sequences with at most `most` rows together, one sequence at least."""
    part: list[_Rows] = []
    for row in rows:
        if part and row.first + row.count - part[0].first > most:
            yield part
            part = []
        part.append(row)
    if part:
        yield part


def top_logprobs(logp_NV: Tensor, count: int) -> list[TokenLogprob]:
    """The `count` best of each row, best first."""
    if not count:
        return []
    best = logp_NV.topk(min(count, logp_NV.shape[1]), dim=-1)
    return [
        TokenLogprob(tuple(ids), tuple(values))
        for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def logprobs_of_ids(logp_NV: Tensor, token_ids: tuple[int, ...]) -> list[TokenLogprob]:
    if not token_ids:
        return []
    picked_NA = logp_NV[:, torch.tensor(token_ids, device=logp_NV.device)]
    return [TokenLogprob(token_ids, tuple(values)) for values in picked_NA.tolist()]
