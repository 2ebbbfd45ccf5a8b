"""Who is read, who writes and who waits in the next step.

Sequences that write go first, one token each (and its drafts). What the step has left goes to
prompts being read, in chunks, and then to whoever waits: highest priority first, first come first
served within it. When the pages run out, the least important and latest gives its own up and waits
again; what it has written is kept and read back later, mostly from the prefix cache.

Where decoding is repeated from a recording, a step that also reads costs many times as much. After
one, prompts wait a while, to be read together.
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

# A batch pads every sequence's keys to the longest; with many tokens each, spans cost less.
MAX_BATCHED_QUERY_LEN = 16


class ScheduledSequence(NamedTuple):
    """A sequence's share of a step: its tokens [start, stop), and its drafts if it writes."""

    sequence: Sequence
    start: int
    stop: int
    drafts: tuple[int, ...]
    num_sampled: int  # how many tokens are sampled from: the last and every draft, or none

    @classmethod
    def of(cls, sequence: Sequence, most: int) -> "ScheduledSequence":
        """What is left to be read of a sequence, at most `most` tokens; its drafts if it writes."""
        start, end = sequence.num_computed, len(sequence.tokens)
        stop = min(end, start + most)
        drafts = tuple(sequence.drafts)
        return cls(sequence, start, stop, drafts, 1 + len(drafts) if stop == end else 0)

    @property
    def tokens(self) -> int:
        return self.stop - self.start + len(self.drafts)


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """The parts of a step. The last `batched` of them have the same number of tokens each."""

    scheduled: tuple[ScheduledSequence, ...]
    num_batched: int

    @classmethod
    def of(cls, parts: list[ScheduledSequence]) -> "ScheduledStep":
        """Most sequences write one token, or read the same few behind a prefix they share: the
        largest such group becomes the batch."""
        sizes = Counter([part.tokens for part in parts])
        size, batched = max(
            ((s, count) for s, count in sizes.items() if s <= MAX_BATCHED_QUERY_LEN),
            key=lambda found: found[1],
            default=(0, 0),
        )
        if 0 < batched < len(parts):
            parts = sorted(parts, key=lambda part: part.tokens == size)
        return cls(tuple(parts), batched)

    @property
    def has_prefill(self) -> bool:
        """Whether anyone has more than the newest token to be read."""
        return any(part.stop - part.start > 1 for part in self.scheduled)

    @property
    def is_decode_only(self) -> bool:
        """Whether all there is to do is one token each, and as many drafts."""
        return self.num_batched == len(self.scheduled) and not self.has_prefill

    @property
    def sequences(self) -> Iterator[Sequence]:
        return (part.sequence for part in self.scheduled)


def priority_key(sequence: Sequence) -> tuple[int, int]:
    """Sorts the more important and the earlier first."""
    return (-sequence.request.priority, sequence.serial)


class Scheduler:
    def __init__(self, settings: EngineSettings, cache: PagedKVCache) -> None:
        self.settings, self.cache, self.capacity = settings, cache, cache.capacity
        self.pages = PageAllocator(self.capacity.num_pages)
        self.radix = RadixCache(self.pages, self.capacity.page_size)
        self.version = 0
        self.running: list[Sequence] = []  # in turn
        self.waiting: list[Sequence] = []  # in turn
        self.preemptions = 0
        self.prefix_cache_hit_tokens = self.prefix_cache_query_tokens = (
            0  # found in the cache, of those looked for
        )
        self._seats = list(range(settings.max_running_requests - 1, -1, -1))
        self._reads_from = -inf  # when prompts may be read again beside those who write

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=priority_key)

    def schedule(self, now: float) -> ScheduledStep:
        """The next step. Empty only if nobody waits or runs."""
        self._make_room()
        parts: list[ScheduledSequence] = []
        readers: list[Sequence] = []
        for sequence in self.running:
            if sequence.is_decoding:
                parts.append(ScheduledSequence.of(sequence, 1))
            else:
                readers.append(sequence)
        if parts and now < self._reads_from:
            return ScheduledStep.of(parts)
        budget = self.settings.max_prefill_tokens
        for sequence in readers:
            if budget:
                parts.append(ScheduledSequence.of(sequence, budget))
                budget -= parts[-1].tokens
        for sequence in self._admissible():
            if not budget or not self._admit(sequence, now):
                break
            parts.append(ScheduledSequence.of(sequence, budget))
            budget -= parts[-1].tokens
        return ScheduledStep.of(parts)

    def delay_prefill(self, *, now: float, took: float) -> None:
        """A step that read is over: those who write have as long for themselves, at most."""
        self._reads_from = now + min(took, self.settings.max_prefill_delay_s)

    def cache_prefix(self, sequence: Sequence) -> None:
        """Put what is computed of a sequence into the prefix cache, whole pages of it."""
        full = sequence.num_computed // self.capacity.page_size
        if (
            not self.settings.prefix_caching
            or sequence.mixed_versions
            or full <= sequence.num_cached_pages
        ):
            return
        kept = self.radix.insert(
            self.cache_namespace(sequence), sequence.tokens, sequence.pages[:full]
        )
        if kept != sequence.pages[:full]:
            sequence.pages[:full] = kept
            assert sequence.slot is not None
            self.cache.set_block_table(sequence.slot, kept)
        sequence.num_cached_pages = full

    def release(self, sequence: Sequence) -> None:
        """A sequence gives up its seat and its pages; the prefix cache keeps what it can."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self.cache_prefix(sequence)
        self._empty(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """A running sequence waits again, with what it has written so far."""
        self.release(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        self.add(sequence)

    def clear_prefix_cache(self) -> None:
        """Drop the prefix cache."""
        self.radix.clear()
        for sequence in self.running:
            sequence.num_cached_pages = 0

    def cache_namespace(self, sequence: Sequence) -> CacheNamespace:
        return (self.version, sequence.request.cache_salt)

    def audit(self) -> list[str]:
        """What does not add up; nothing if all is well."""
        held = [page for s in self.running for page in s.pages] + self.radix.pages_in_tree()
        count = [0] * self.capacity.num_pages
        for page in held:
            count[page] += 1
        found = [
            f"page {page} has {self.pages.refcount(page)} holders, {count[page]} are known"
            for page in range(self.capacity.num_pages)
            if self.pages.refcount(page) != count[page]
        ]
        if self.pages.num_used != len(set(held)):
            found.append(f"{self.pages.num_used} pages are used, {len(set(held))} are held")
        seats = [s.slot for s in self.running]
        if len(set(seats)) != len(seats) or None in seats:
            found.append(f"seats are taken twice or not at all: {seats}")
        if len(seats) + len(self._seats) != self.settings.max_running_requests:
            found.append(
                f"{len(seats)} + {len(self._seats)} seats of {self.settings.max_running_requests}"
            )
        found += [f"{s.id} waits with pages" for s in self.waiting if s.pages]
        return found

    def _make_room(self) -> None:
        """Pages for what each running sequence writes next, the most important first."""
        for sequence in list(self.running):
            if sequence.slot is None:
                continue  # it made room for another
            missing = self._missing(sequence)
            while missing > self.pages.num_free + self.pages.evictable:
                victim = self.running[-1]
                self.preempt(victim)
                if victim is sequence:
                    break
            else:
                self._grow(sequence, missing)

    def _missing(self, sequence: Sequence) -> int:
        tokens = len(sequence.tokens) + self.capacity.lookahead_slots
        return self.capacity.pages_for(tokens) - len(sequence.pages)

    def _grow(self, sequence: Sequence, pages: int) -> None:
        if pages <= 0:
            return
        if pages > self.pages.num_free:
            self.radix.evict(pages - self.pages.num_free)
        taken = self.pages.allocate(pages)
        assert sequence.slot is not None
        self.cache.set_block_table(sequence.slot, taken, len(sequence.pages))
        sequence.pages += taken

    def _admissible(self) -> Iterator[Sequence]:
        """Who waits, but for those who had better wait for what another is just reading."""
        for sequence in self.waiting[: 2 * self.settings.max_running_requests]:
            if not self._twin_is_reading(sequence):
                yield sequence

    def _twin_is_reading(self, sequence: Sequence) -> bool:
        """Whether someone is about to compute the very page this one would compute first."""
        if not self.settings.prefix_caching:
            return False
        limit, world, size = (
            self._reusable(sequence),
            self.cache_namespace(sequence),
            self.radix.page_tokens,
        )
        upto = self.radix.matched_tokens(world, sequence.tokens, limit) + size
        return upto <= limit and any(
            other.num_computed < upto <= len(other.tokens)
            and not other.mixed_versions
            and self.cache_namespace(other) == world
            and other.tokens[:upto] == sequence.tokens[:upto]
            for other in self.running
        )

    def _reusable(self, sequence: Sequence) -> int:
        """How many tokens need not be computed: not the last, whose logits are wanted, and none
        from which a prompt log-probability is still to come."""
        scored = sequence.next_prompt_logprob
        most = len(sequence.tokens) - 1
        return most if scored is None else min(most, max(0, scored - 1))

    def _admit(self, sequence: Sequence, now: float) -> bool:
        if not self._seats:
            return False
        found: list[int] = []
        if self.settings.prefix_caching:
            limit = self._reusable(sequence)
            found = self.radix.match_prefix(self.cache_namespace(sequence), sequence.tokens, limit)
        need = self.capacity.pages_for(len(sequence.tokens) + self.capacity.lookahead_slots) - len(
            found
        )
        # Those who run will want more pages soon; alone, a sequence always fits.
        reserve = len(self.running) + int(self.settings.page_watermark * self.capacity.num_pages)
        if need + (reserve if self.running else 0) > self.pages.num_free + self.pages.evictable:
            self.pages.decref(found)
            return False
        self.waiting.remove(sequence)
        sequence.slot = self._seats.pop()
        sequence.pages, sequence.num_cached_pages = found, len(found)
        sequence.num_computed = len(found) * self.capacity.page_size
        self.cache.set_block_table(sequence.slot, found)
        self._grow(sequence, need)
        if sequence.cached_tokens is None:
            sequence.cached_tokens, sequence.admitted_at = sequence.num_computed, now
            self.prefix_cache_hit_tokens += sequence.num_computed
            self.prefix_cache_query_tokens += len(sequence.tokens)
        insort(self.running, sequence, key=priority_key)
        return True

    def _empty(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.pages.decref(sequence.pages)
        self._seats.append(sequence.slot)
        sequence.slot, sequence.pages, sequence.num_cached_pages = None, [], 0
        sequence.num_computed, sequence.mixed_versions = 0, False
        sequence.drafts, sequence.states = [], {}
