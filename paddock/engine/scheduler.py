"""Continuous-batching scheduler: decode first, chunked prefill, priority queue, preemption.

Each step decodes one token (plus MTP drafts) for every running sequence, then fills the token
budget with chunks of prefills in progress, then admits waiting requests by priority and arrival.
When the KV cache is full, the lowest-priority, latest sequence is preempted: its tokens are kept
and its KV entries recomputed later, mostly from the prefix cache.

With CUDA graphs a step that includes prefill costs many times as much as a decode-only step. After
such a step, prefills are delayed for a while, so that several run in one step.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from paddock.engine.kv_cache import PagedKVCache
from paddock.engine.page_allocator import PageAllocator
from paddock.engine.radix_cache import CacheNamespace, RadixCache
from paddock.engine.request import Sequence
from paddock.engine.settings import EngineSettings
from paddock.engine.stats import CumulativeStats, EngineStats

# The decode batch pads every sequence's keys to the longest; with long queries, spans are cheaper.
MAX_BATCHED_QUERY_LEN = 16


class ScheduledSequence(NamedTuple):
    """The tokens [start, stop) of a sequence in a step, plus its drafts if it decodes."""

    sequence: Sequence
    start: int
    stop: int
    drafts: tuple[int, ...]
    num_sampled: int  # rows to sample from: the last token and every draft, or none

    @classmethod
    def of(cls, sequence: Sequence, max_tokens: int) -> "ScheduledSequence":
        """The next tokens of a sequence, at most `max_tokens`, and its drafts if it decodes."""
        start, end = sequence.num_computed, sequence.length
        stop = min(end, start + max_tokens)
        drafts = tuple(sequence.drafts)
        return cls(sequence, start, stop, drafts, 1 + len(drafts) if stop == end else 0)

    @property
    def tokens(self) -> int:
        return self.stop - self.start + len(self.drafts)

    @property
    def token_ids(self) -> list[int]:
        """The tokens and drafts; 0 for a token that only the device knows."""
        known = self.sequence.tokens[self.start : self.stop]
        return [*known, *[0] * (self.stop - self.start - len(known)), *self.drafts]

    @property
    def is_prefill(self) -> bool:
        """Whether these are prompt tokens, or tokens recomputed after a preemption."""
        return self.stop - self.start > 1 or not self.sequence.next_index


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """The sequences of one step. The last `num_batched` of them have equally many tokens each."""

    scheduled: tuple[ScheduledSequence, ...]
    num_batched: int

    @classmethod
    def of(cls, scheduled: list[ScheduledSequence]) -> "ScheduledStep":
        """Group the sequences: the largest set with the same query length becomes the batch (most
        decode one token, or prefill the same few tokens after a shared prefix)."""
        sizes = Counter([each.tokens for each in scheduled])
        size, batched = max(
            ((s, count) for s, count in sizes.items() if s <= MAX_BATCHED_QUERY_LEN),
            key=lambda found: found[1],
            default=(0, 0),
        )
        if 0 < batched < len(scheduled):
            scheduled = sorted(scheduled, key=lambda each: each.tokens == size)
        return cls(tuple(scheduled), batched)

    @property
    def has_prefill(self) -> bool:
        """Whether any sequence computes more than its newest token."""
        return any(each.stop - each.start > 1 for each in self.scheduled)

    @property
    def is_decode_only(self) -> bool:
        """Whether every sequence decodes one token with the same number of drafts."""
        return self.num_batched == len(self.scheduled) and not self.has_prefill

    @property
    def sequences(self) -> Iterator[Sequence]:
        return (each.sequence for each in self.scheduled)


def priority_key(sequence: Sequence) -> tuple[int, int]:
    """Sort key: higher priority first, then earlier arrival."""
    return (-sequence.request.priority, sequence.serial)


class Scheduler:
    """Queues, slots and pages of all requests. Used by the engine thread only."""

    def __init__(self, settings: EngineSettings, cache: PagedKVCache) -> None:
        self.settings, self.cache, self.capacity = settings, cache, cache.capacity
        self.pages = PageAllocator(self.capacity.num_pages)
        self.radix = RadixCache(self.pages, self.capacity.page_size)
        self.version = 0
        self.running: list[Sequence] = []  # ordered by priority_key
        self.waiting: list[Sequence] = []  # ordered by priority_key
        self.preemptions = 0
        # Prefix cache hit rate = hit tokens / query tokens.
        self.prefix_cache_hit_tokens = self.prefix_cache_query_tokens = 0
        self._free_slots = list(range(settings.max_running_requests - 1, -1, -1))
        self._prefill_after = -inf  # no prefill alongside decodes before this time

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=priority_key)

    def schedule(self, now: float) -> ScheduledStep:
        """The next step; empty only if no request is running or waiting, or if the running ones
        await their last token."""
        self._allocate_decode_pages()
        scheduled: list[ScheduledSequence] = []
        prefilling: list[Sequence] = []
        for sequence in self.running:
            if sequence.awaits_last_token:
                continue
            if sequence.is_decoding:
                scheduled.append(ScheduledSequence.of(sequence, max_tokens=1))
            else:
                prefilling.append(sequence)
        if scheduled and now < self._prefill_after:
            return ScheduledStep.of(scheduled)
        budget = self.settings.max_prefill_tokens
        for sequence in prefilling:
            if budget:
                scheduled.append(ScheduledSequence.of(sequence, budget))
                budget -= scheduled[-1].tokens
        for sequence in self._admissible():
            if not budget or not self._admit(sequence, now):
                break
            scheduled.append(ScheduledSequence.of(sequence, budget))
            budget -= scheduled[-1].tokens
        return ScheduledStep.of(scheduled)

    def can_plan_ahead(self) -> bool:
        """Whether the next step can be scheduled while tokens are in flight: no sequence needs its
        token on the host, and none has to be preempted."""
        if any(s.num_in_flight and s.needs_host for s in self.running):
            return False
        missing = sum(max(0, self._missing_pages(s)) for s in self.running)
        return missing <= self.pages.num_free + self.pages.evictable

    def delay_prefill(self, *, now: float, took: float) -> None:
        """Delay the next prefill for as long as the last step with prefill took, up to the
        `max_prefill_delay_s` setting, so that decode-only steps get as much time."""
        self._prefill_after = now + min(took, self.settings.max_prefill_delay_s)

    def cache_prefix(self, sequence: Sequence) -> None:
        """Insert the computed whole pages of a sequence into the prefix cache."""
        full = min(sequence.num_computed, len(sequence.tokens)) // self.capacity.page_size
        if (
            not self.settings.prefix_caching
            or sequence.mixed_versions
            or full <= sequence.num_cached_pages
        ):
            return
        pages = self.radix.insert(
            self.cache_namespace(sequence), sequence.tokens, sequence.pages[:full]
        )
        if pages != sequence.pages[:full]:  # another sequence cached the same tokens first
            sequence.pages[:full] = pages
            assert sequence.slot is not None
            self.cache.set_block_table(sequence.slot, pages)
        sequence.num_cached_pages = full

    def release(self, sequence: Sequence) -> None:
        """Remove a sequence and free its slot and pages; the prefix cache keeps whole pages."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self.cache_prefix(sequence)
        self._free(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Preempt a running sequence: free its pages and queue it again with its tokens so far."""
        assert not sequence.num_in_flight
        self.release(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        self.add(sequence)

    def clear_prefix_cache(self) -> None:
        """Empty the prefix cache; pages of running sequences stay allocated."""
        self.radix.clear()
        for sequence in self.running:
            sequence.num_cached_pages = 0

    def cache_namespace(self, sequence: Sequence) -> CacheNamespace:
        """Weight version and salt: cached pages are never shared across either."""
        return (self.version, sequence.request.cache_salt)

    def audit(self) -> list[str]:
        """Inconsistencies in pages, slots and queues; empty if there are none."""
        held = [page for s in self.running for page in s.pages] + self.radix.pages_in_tree()
        count = [0] * self.capacity.num_pages
        for page in held:
            count[page] += 1
        found = [
            f"page {page} has refcount {self.pages.refcount(page)}, expected {count[page]}"
            for page in range(self.capacity.num_pages)
            if self.pages.refcount(page) != count[page]
        ]
        if self.pages.num_used != len(set(held)):
            found.append(f"{self.pages.num_used} pages in use, expected {len(set(held))}")
        slots = [s.slot for s in self.running]
        if len(set(slots)) != len(slots) or None in slots:
            found.append(f"slots assigned twice or not at all: {slots}")
        if len(slots) + len(self._free_slots) != self.settings.max_running_requests:
            found.append(
                f"{len(slots)} used + {len(self._free_slots)} free slots, expected"
                f" {self.settings.max_running_requests}"
            )
        found += [f"{s.id} is waiting but holds pages" for s in self.waiting if s.pages]
        return found

    def stats(self, counters: CumulativeStats, paused: bool, healthy: bool) -> EngineStats:
        return EngineStats(
            counters=counters.copy(),
            version=self.version,
            running=len(self.running),
            waiting=len(self.waiting),
            paused=paused,
            healthy=healthy,
            pages_total=self.pages.count,
            pages_used=self.pages.num_used,
            pages_cached=self.radix.size,
            pages_evictable=self.pages.evictable,
            page_size=self.capacity.page_size,
            running_tokens=sum(s.num_computed for s in self.running),
            waiting_tokens=sum(len(s.tokens) for s in self.waiting),
            prefix_cache_hit_tokens=self.prefix_cache_hit_tokens,
            prefix_cache_query_tokens=self.prefix_cache_query_tokens,
            evicted_tokens=self.radix.evicted * self.capacity.page_size,
            preemptions=self.preemptions,
            kv_cache_bytes=self.cache.bytes,
        )

    def _allocate_decode_pages(self) -> None:
        """Allocate pages for the next token of each running sequence, highest priority first;
        preempt from the other end while the KV cache is full."""
        for sequence in list(self.running):
            if sequence.slot is None:
                continue  # preempted above
            missing = self._missing_pages(sequence)
            while missing > self.pages.num_free + self.pages.evictable:
                victim = self.running[-1]
                self.preempt(victim)
                if victim is sequence:
                    break
            else:
                self._allocate(sequence, missing)

    def _missing_pages(self, sequence: Sequence) -> int:
        if sequence.awaits_last_token:
            return 0
        tokens = sequence.length + self.capacity.lookahead_slots
        return self.capacity.pages_for(tokens) - len(sequence.pages)

    def _allocate(self, sequence: Sequence, pages: int) -> None:
        if pages <= 0:
            return
        if pages > self.pages.num_free:
            self.radix.evict(pages - self.pages.num_free)
        taken = self.pages.allocate(pages)
        assert sequence.slot is not None
        self.cache.set_block_table(sequence.slot, taken, len(sequence.pages))
        sequence.pages += taken

    def _admissible(self) -> Iterator[Sequence]:
        """Waiting sequences, except those whose prefix is being prefilled by another right now."""
        for sequence in self.waiting[: 2 * self.settings.max_running_requests]:
            if not self._prefix_in_flight(sequence):
                yield sequence

    def _prefix_in_flight(self, sequence: Sequence) -> bool:
        """Whether a running sequence is about to compute the first page that this one lacks."""
        if not self.settings.prefix_caching:
            return False
        limit, namespace = self._reusable(sequence), self.cache_namespace(sequence)
        cached = self.radix.matched_tokens(namespace, sequence.tokens, limit)
        upto = cached + self.radix.page_size
        return upto <= limit and any(
            other.num_computed < upto <= len(other.tokens)
            and not other.mixed_versions
            and self.cache_namespace(other) == namespace
            and other.tokens[:upto] == sequence.tokens[:upto]
            for other in self.running
        )

    def _reusable(self, sequence: Sequence) -> int:
        """How many tokens may come from the prefix cache: not the last, whose logits are needed,
        and none whose hidden state is needed for a prompt log-probability."""
        scored = sequence.next_prompt_logprob
        limit = len(sequence.tokens) - 1
        return limit if scored is None else min(limit, max(0, scored - 1))

    def _admit(self, sequence: Sequence, now: float) -> bool:
        """Give a waiting sequence a slot and pages; False if there are not enough."""
        if not self._free_slots:
            return False
        found: list[int] = []
        if self.settings.prefix_caching:
            limit = self._reusable(sequence)
            found = self.radix.match_prefix(self.cache_namespace(sequence), sequence.tokens, limit)
        tokens = len(sequence.tokens) + self.capacity.lookahead_slots
        need = self.capacity.pages_for(tokens) - len(found)
        # Running sequences will need more pages soon: admitting without a reserve would preempt
        # again at once. A single sequence always fits.
        reserve = len(self.running) + int(self.settings.page_watermark * self.capacity.num_pages)
        if need + (reserve if self.running else 0) > self.pages.num_free + self.pages.evictable:
            self.pages.decref(found)
            return False
        self.waiting.remove(sequence)
        sequence.slot = self._free_slots.pop()
        sequence.pages, sequence.num_cached_pages = found, len(found)
        sequence.num_computed = len(found) * self.capacity.page_size
        self.cache.set_block_table(sequence.slot, found)
        self._allocate(sequence, need)
        if sequence.cached_tokens is None:
            sequence.cached_tokens, sequence.admitted_at = sequence.num_computed, now
            self.prefix_cache_hit_tokens += sequence.num_computed
            self.prefix_cache_query_tokens += len(sequence.tokens)
        insort(self.running, sequence, key=priority_key)
        return True

    def _free(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.pages.decref(sequence.pages)
        self._free_slots.append(sequence.slot)
        sequence.slot, sequence.pages, sequence.num_cached_pages = None, [], 0
        sequence.num_computed, sequence.num_in_flight, sequence.mixed_versions = 0, 0, False
        sequence.drafts, sequence.states = [], {}
