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

from paddock.engine.graphs import Asked, Graphs
from paddock.engine.memory import Cache, Chunks, StepMemory, arrange, upload
from paddock.engine.replay import Decisions
from paddock.engine.request import Ending, Likely, Sequence
from paddock.engine.sampler import Dials, Rows, Sampled, Sampler, Wish, wishes_more
from paddock.engine.scheduler import Part, Plan
from paddock.engine.settings import EngineSettings
from paddock.engine.speculate import Drafter
from paddock.kernels.dispatch import is_enabled
from paddock.kernels.workspace import chunks
from paddock.model import AttentionMetadata, AuxRequest, Transformer

_COPIES = 6  # of the scores that sampling holds at once: logits, tempered, noise, log-softmax, ...


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence that wrote its last token."""

    sequence: Sequence
    finish: Ending
    matched: int | str | None = None
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
class _Drawn:
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


class Runner:
    def __init__(
        self, network: Transformer, cache: Cache, settings: EngineSettings, dials: Dials
    ) -> None:
        self.network, self.cache, self.settings = network, cache, settings
        device = network.embed.weight.device
        self.sampler = Sampler(dials, network.config.vocab, device)
        if device.type == "cuda" and is_enabled("latent_prepare"):
            network.fuse_weights()  # before recordings remember where the weights lie
        steps = settings.mtp_steps
        self.graphs = Graphs.where_possible(network, cache, settings)
        self.drafter = Drafter(network, cache, self.sampler, steps, self.graphs) if steps else None
        self.decisions = Decisions(network.config, cache) if settings.replay else None
        self.device = device

    @torch.inference_mode()
    def run(self, plan: Plan, version: int, meanwhile: Callable[[], None]) -> list[Ended]:
        """Read the plan's tokens, write the next ones; who is done, and how. `meanwhile` is called
        when all is queued and nothing read back yet."""
        done = self._compute(plan)
        self._score_prompts(plan, done.hidden_TD)
        rows = self._rows(plan)
        drawn = self._sample(done, rows)
        for part in plan.parts:
            part.sequence.computed = part.stop
        meanwhile()
        token_N, logprob_N = _on_the_host(drawn) if rows else ([], [])
        ended = self._write(rows, token_N, logprob_N, drawn, version)
        if self.drafter is not None:
            state_TD = done.read(self._next_tokens(plan, token_N))
            self._guess(state_TD, rows, ended)
        return ended

    def _compute(self, plan: Plan) -> _Computed:
        """The plan's tokens through the network; repeated from a recording if all it does is write:
        prompts come in any length, and a recording costs several steps."""
        token_T = np.fromiter(
            chain(*((*p.sequence.tokens[p.start : p.stop], *p.drafts) for p in plan.parts)),
            dtype=np.int64,
        )
        if self.graphs is not None and plan.decodes:
            return self._repeat(plan, token_T)
        layout, slot_T = self._arrange(plan)
        memory = StepMemory(self.cache, slot_T, [s.states for s in plan.sequences])
        ask = AuxRequest(routing_and_topk=self.decisions is not None)
        output = self.network(upload(token_T, self.device), layout, memory, ask)
        if self.decisions is not None:
            self.decisions.record(output.notes, layout, slot_T)

        def read(next_T: np.ndarray) -> Tensor:
            step = self.network.make_context(layout, memory)
            return self.network.mtp_draft(output.hidden_TD, upload(next_T, self.device), step)

        return _Computed(output.hidden_TD, None, read)

    def _repeat(self, plan: Plan, token_T: np.ndarray) -> _Computed:
        assert self.graphs is not None
        graphs, parts = self.graphs, plan.parts
        seat_B = np.array([part.sequence.seat for part in parts], dtype=np.int64)
        past_B = np.array([part.start for part in parts], dtype=np.int64)
        asked = Asked(seat_B, past_B, parts[0].tokens)
        hidden_TD, logits_TV = graphs.write(asked, token_T)
        return _Computed(hidden_TD, logits_TV, lambda next_T: graphs.read(asked, next_T))

    def weights_may_lie_elsewhere(self) -> None:
        if self.graphs is not None:
            self.graphs.doubt()

    def _arrange(self, plan: Plan) -> tuple[AttentionMetadata, Tensor]:
        loose, batch = Chunks(), plan.parts[len(plan.parts) - plan.batched :]
        for part in plan.parts[: len(plan.parts) - plan.batched]:
            assert part.sequence.seat is not None
            loose.add(self.cache.slots(part.sequence.seat, 0, part.start + part.tokens), part.start)
        seats = np.array([part.sequence.seat for part in batch], dtype=np.int64)
        past_B = np.array([part.start for part in batch], dtype=np.int64)
        return arrange(self.cache, loose, seats, past_B, batch[0].tokens if batch else 0)

    def _rows(self, plan: Plan) -> list[_Rows]:
        rows, token, first = [], 0, 0
        for part in plan.parts:
            if part.rows:
                last = token + part.stop - part.start - 1
                rows.append(_Rows(part.sequence, first, part.rows, last))
            token, first = token + part.tokens, first + part.rows
        return rows

    def _sample(self, done: _Computed, rows: list[_Rows]) -> _Drawn:
        """A token for every row, a few rows at a time, so that scores over the vocabulary never
        take more than `logits_bytes`."""
        drawn = _Drawn([], [], {})
        most = max(1, self.settings.logits_bytes // (_COPIES * 4 * self.network.config.vocab))
        for part in _parted(rows, most):
            first = part[0].first
            sampled = self._sample_part(done, part)
            drawn.tokens.append(sampled.token_N)
            drawn.logprobs.append(sampled.logprob_N)
            for row in part:
                request = row.sequence.request
                if request.top_logprobs or request.ask_ids or row.sequence.completes:
                    n = slice(row.first - first, row.first - first + row.count)
                    drawn.asked[row.first] = sampled.logp_NV[n].clone()
        return drawn

    def _sample_part(self, done: _Computed, rows: list[_Rows]) -> Sampled:
        counts, first = [row.count for row in rows], rows[0].first
        start_N = np.repeat([row.first - first for row in rows], counts)
        offset_N = np.arange(len(start_N)) - start_N
        token_N = np.repeat([row.token for row in rows], counts) + offset_N
        known_TX = done.hidden_TD if done.logits_TV is None else done.logits_TV
        if len(token_N) < len(known_TX):
            known_TX = known_TX[upload(token_N, self.device)]
        wishes, forced = [], []
        for row in rows:
            wishes += self._wishes(row, row.first - first)
            if row.sequence.thinking is not None:
                drafts = row.sequence.drafts[: row.count - 1]
                closes = row.sequence.thinking.forced_rows(drafts)
                close_id = row.sequence.thinking.close_id
                forced += [(row.first - first + j, close_id) for j in closes]
        return self.sampler.sample(
            self.network.head(known_TX) if done.logits_TV is None else known_TX,
            Rows(
                seat_N=np.repeat([row.sequence.seat for row in rows], counts),
                index_N=np.repeat([row.sequence.written for row in rows], counts) + offset_N,
                wishes=wishes,
                forced=forced,
            ),
        )

    def _wishes(self, row: _Rows, first: int) -> list[Wish]:
        sequence = row.sequence
        if not wishes_more(sequence.request.sampling):
            return []
        drafts = sequence.drafts[: row.count - 1]
        masks: list[Tensor | None] = [None] * row.count
        if sequence.constraint is not None:
            masks = sequence.constraint.masks(drafts)
        return [
            Wish(first + j, sequence, drafts[:j], masks[j])
            for j in range(min(row.count, len(masks)))
        ]

    # --- what was sampled -------------------------------------------------------------------------

    def _write(
        self,
        rows: list[_Rows],
        token_N: list[int],
        logprob_N: list[float],
        drawn: _Drawn,
        version: int,
    ) -> list[Ended]:
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
        self, row: _Rows, tokens: list[int], logprobs: list[float], drawn: _Drawn, version: int
    ) -> Ended | None:
        """Append sampled tokens for as long as each follows what was drafted."""
        sequence = row.sequence
        for j, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            if not isfinite(logprob):
                where = f"at token {len(sequence.tokens)}"
                return Ended(
                    sequence, "abort", error=f"the network's scores {where} are no numbers"
                )
            turned = _turned(sequence, token)
            if turned != token:
                if j:
                    return None  # the next step turns
                token, logprob = turned, float(drawn.asked[row.first][0, turned])
                sequence.forced.append(sequence.written)
            self._append(sequence, token, logprob, version)
            row.wrote += 1
            wrong = sequence.constraint.wrong_with(token) if sequence.constraint else None
            if wrong is not None:
                return Ended(sequence, "abort", error=wrong)
            end = self._end(sequence)
            if end is not None or j + 1 == row.count or sequence.drafts[j] != token:
                return end
        return None

    def _append(self, sequence: Sequence, token: int, logprob: float, version: int) -> None:
        thinking = sequence.thinking
        if thinking is not None:
            if thinking.must_close:
                sequence.forced.append(sequence.written)
            thinking.push(token)
        sequence.append(token, logprob, version)

    def _end(self, sequence: Sequence) -> Ended | None:
        """Whether the token just written is the last."""
        token, heed = sequence.tokens[-1], True
        if sequence.written < sequence.request.sampling.min_new_tokens:
            heed = False
        matched = sequence.stop_texts.push(token, heed=heed) if sequence.stop_texts else None
        if heed and token in sequence.stop_ids:
            return Ended(sequence, "stop", token)
        if matched is not None:
            return Ended(sequence, "stop", matched)
        if sequence.constraint is not None and sequence.constraint.finished:
            return Ended(sequence, "stop", token)
        if sequence.written >= sequence.max_new:
            return Ended(sequence, "length")
        return None

    def _account(self, row: _Rows) -> None:
        sequence = row.sequence
        sequence.verify_steps += 1
        if row.wrote:
            sequence.computed = len(sequence.tokens) - 1
            if row.count > 1:
                sequence.drafts_proposed += row.count - 1
                sequence.drafts_accepted += row.wrote - 1
                sequence.drafted.add(made=row.count - 1, kept=row.wrote - 1)

    def _report(self, row: _Rows, drawn: _Drawn) -> None:
        """The log-probabilities a request asked for, of the tokens it got."""
        if row.wrote and row.first in drawn.asked:
            request, logp_NV = row.sequence.request, drawn.asked[row.first][: row.wrote]
            row.sequence.top += likeliest(logp_NV, request.top_logprobs)
            row.sequence.asked += asked(logp_NV, request.ask_ids)

    # --- prompts ----------------------------------------------------------------------------------

    def _score_prompts(self, plan: Plan, hidden_TD: Tensor) -> None:
        first = 0
        for part in plan.parts:
            if part.sequence.next_scored is not None:
                self._score(part, hidden_TD[first : first + part.tokens])
            first += part.tokens

    def _score(self, read: Part, hidden_TD: Tensor) -> None:
        """Log-probabilities of the prompt tokens that this part's states predict."""
        sequence, request = read.sequence, read.sequence.request
        start = sequence.next_scored
        if start == 0:  # nothing comes before the first token
            sequence.prompt_logprobs.append(None)
            sequence.prompt_top.append(None)
            sequence.prompt_asked.append(None)
            start = sequence.next_scored
        if start is None:
            return
        stop = min(read.stop + 1, sequence.prompt)
        hidden_TD = hidden_TD[start - 1 - read.start : stop - 1 - read.start]
        target_T = torch.tensor(sequence.tokens[start:stop], device=self.device)
        row_bytes = 8 * self.network.config.vocab
        for part in chunks(len(target_T), row_bytes, self.settings.logits_bytes):
            logp_TV = self.network.head(hidden_TD[part]).float().log_softmax(-1)
            found = logp_TV.gather(1, target_T[part].unsqueeze(1)).squeeze(1)
            sequence.prompt_logprobs += found.tolist()
            sequence.prompt_top += likeliest(logp_TV, request.top_logprobs)
            sequence.prompt_asked += asked(logp_TV, request.ask_ids)

    # --- drafts -----------------------------------------------------------------------------------

    def _next_tokens(self, plan: Plan, token_N: list[int]) -> np.ndarray:
        """The token after each of the step's tokens. Behind a draft that was not kept it is
        anyone's guess; such rows are beyond the end of their sequence and will be overwritten."""
        following: list[int] = []
        first = 0
        for part in plan.parts:
            following += part.sequence.tokens[part.start + 1 : part.stop]
            if part.rows:
                following += token_N[first : first + part.rows]
            else:
                following.append(part.sequence.tokens[part.stop])
            first += part.rows
        return np.array(following)

    def _guess(self, state_TD: Tensor, rows: list[_Rows], ended: list[Ended]) -> None:
        assert self.drafter is not None
        done = {id(end.sequence) for end in ended}
        live = [row for row in rows if id(row.sequence) not in done]
        if live:
            # From the last token that was kept, the one before the newest.
            last_N = np.array([row.token + row.wrote - 1 for row in live])
            self.drafter.guess(
                state_TD[upload(last_N, self.device)], [row.sequence for row in live]
            )


def _turned(sequence: Sequence, token: int) -> int:
    """What to append for `token`, so that the reply is complete in time."""
    room, bound = sequence.max_new - sequence.written - 1, sequence.constraint
    return token if bound is None else bound.turned(token, room)


def _on_the_host(drawn: _Drawn) -> tuple[list[int], list[float]]:
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


def likeliest(logp_NV: Tensor, count: int) -> list[Likely]:
    """The `count` best of each row, best first."""
    if not count:
        return []
    best = logp_NV.topk(min(count, logp_NV.shape[1]), dim=-1)
    return [
        Likely(tuple(ids), tuple(values))
        for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def asked(logp_NV: Tensor, token_ids: tuple[int, ...]) -> list[Likely]:
    if not token_ids:
        return []
    picked_NA = logp_NV[:, torch.tensor(token_ids, device=logp_NV.device)]
    return [Likely(token_ids, tuple(values)) for values in picked_NA.tolist()]
