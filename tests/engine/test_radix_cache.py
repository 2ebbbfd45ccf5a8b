"""Page allocator and radix cache against a simple model."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paddock.engine.page_allocator import OutOfPagesError, PageAllocator
from paddock.engine.radix_cache import RadixCache

SIZE, COUNT = 2, 12
TOKENS = st.lists(st.integers(0, 1), max_size=9)
NAMESPACES = st.integers(0, 1)


class RadixCacheMachine(RuleBasedStateMachine):
    """Sequences start and end; the model tracks the content of every page and its references.

    A page's content is set when it is allocated. A match must return pages whose content is exactly
    the requested tokens.
    """

    def __init__(self):
        super().__init__()
        self.pages = PageAllocator(COUNT)
        self.radix = RadixCache(self.pages, SIZE)
        self.content = {}  # page -> (namespace, all tokens up to its end)
        self.sequences = []  # (namespace, tokens, pages)

    @rule(namespace=NAMESPACES, tokens=TOKENS)
    def start(self, namespace, tokens):
        found = self.radix.match_prefix(namespace, tokens, len(tokens))
        for i, page in enumerate(found, start=1):
            assert self.content[page] == (namespace, tuple(tokens[: i * SIZE]))
        need = len(tokens) // SIZE - len(found)
        if need > self.pages.num_free:
            self.radix.evict(need - self.pages.num_free)
        try:
            fresh = self.pages.allocate(need)
        except OutOfPagesError:
            self.pages.decref(found)
            return
        for i, page in enumerate(fresh, start=len(found) + 1):
            self.content[page] = (namespace, tuple(tokens[: i * SIZE]))
        self.sequences.append((namespace, tokens, found + fresh))

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99), insert=st.booleans())
    def end(self, which, insert):
        namespace, tokens, pages = self.sequences.pop(which % len(self.sequences))
        if insert:
            pages = self.radix.insert(namespace, tokens, pages)
            known = self.radix.matched_tokens(namespace, tokens, len(tokens))
            assert known == len(tokens) // SIZE * SIZE
        self.pages.decref(pages)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99))
    def insert_and_continue(self, which):
        which %= len(self.sequences)
        namespace, tokens, pages = self.sequences[which]
        pages = self.radix.insert(namespace, tokens, pages)
        for i, page in enumerate(pages, start=1):
            assert self.content[page] == (namespace, tuple(tokens[: i * SIZE]))
        self.sequences[which] = (namespace, tokens, pages)

    @rule(count=st.integers(1, 5))
    def evict(self, count):
        spare, free = self.pages.evictable, self.pages.num_free
        assert self.radix.evict(count) == min(count, spare)
        assert self.pages.num_free == free + min(count, spare)

    @rule()
    def clear(self):
        self.radix.clear()

    @invariant()
    def every_reference_is_counted(self):
        held = [
            page for _, _, pages in self.sequences for page in pages
        ] + self.radix.pages_in_tree()
        for page in range(COUNT):
            assert self.pages.refcount(page) == held.count(page)
        assert self.pages.num_free == COUNT - len(set(held))
        assert self.radix.size == len(self.radix.pages_in_tree())
        assert self.pages.evictable == sum(
            self.pages.refcount(p) == 1 for p in self.radix.pages_in_tree()
        )


TestRadixCache = RadixCacheMachine.TestCase
TestRadixCache.settings = settings(max_examples=60, stateful_step_count=30)


def filled(*texts):
    pages = PageAllocator(COUNT)
    radix = RadixCache(pages, SIZE)
    for tokens in texts:
        taken = pages.allocate(len(tokens) // SIZE)
        pages.decref(radix.insert(0, tokens, taken))
    return radix


def test_the_least_recently_used_is_evicted_first():
    radix = filled([1, 1, 2, 2], [3, 3], [1, 1, 4, 4])
    radix.pages.decref(radix.match_prefix(0, [1, 1, 2, 2], 4))
    radix.evict(2)
    assert radix.matched_tokens(0, [3, 3], 2) == 0
    assert radix.matched_tokens(0, [1, 1, 4, 4], 4) == 2
    assert radix.matched_tokens(0, [1, 1, 2, 2], 4) == 4


def test_matched_tokens_does_not_touch_the_lru_order():
    radix = filled([1, 1], [2, 2])
    radix.matched_tokens(0, [1, 1], 2)
    radix.evict(1)
    assert radix.matched_tokens(0, [1, 1], 2) == 0


def test_a_limit_leaves_the_last_token_to_be_computed():
    radix = filled([1, 1, 2, 2])
    assert radix.matched_tokens(0, [1, 1, 2, 2], 3) == 2


def test_namespaces_do_not_share_prefixes():
    assert filled([1, 1]).matched_tokens(1, [1, 1], 2) == 0


def test_allocating_more_pages_than_are_free_raises_with_the_counts():
    with pytest.raises(OutOfPagesError, match="13 pages requested, 12 free"):
        PageAllocator(COUNT).allocate(13)
