"""Pages and the prefix tree against a model so simple that it cannot be wrong."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paddock.engine.page_allocator import OutOfPagesError, PageAllocator
from paddock.engine.radix_cache import RadixCache

SIZE, COUNT = 2, 12
TOKENS = st.lists(st.integers(0, 1), max_size=9)
WORLDS = st.integers(0, 1)


class Holding(RuleBasedStateMachine):
    """Sequences come and go; the model knows what each world has ever been told and who holds what.

    Each page's "content" is what was written when it was taken. A match must return pages whose
    content is exactly the tokens asked for.
    """

    def __init__(self):
        super().__init__()
        self.pages = PageAllocator(COUNT)
        self.radix = RadixCache(self.pages, SIZE)
        self.content = {}  # page -> (world, all tokens up to and with it)
        self.sequences = []  # (world, tokens, pages)

    @rule(world=WORLDS, tokens=TOKENS)
    def begin(self, world, tokens):
        found = self.radix.match_prefix(world, tokens, len(tokens))
        for i, page in enumerate(found, start=1):
            assert self.content[page] == (world, tuple(tokens[: i * SIZE]))
        need = len(tokens) // SIZE - len(found)
        if need > self.pages.num_free:
            self.radix.evict(need - self.pages.num_free)
        try:
            fresh = self.pages.allocate(need)
        except OutOfPagesError:
            self.pages.decref(found)
            return
        for i, page in enumerate(fresh, start=len(found) + 1):
            self.content[page] = (world, tuple(tokens[: i * SIZE]))
        self.sequences.append((world, tokens, found + fresh))

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99), remember=st.booleans())
    def end(self, which, remember):
        world, tokens, pages = self.sequences.pop(which % len(self.sequences))
        if remember:
            pages = self.radix.insert(world, tokens, pages)
            known = self.radix.matched_tokens(world, tokens, len(tokens))
            assert known == len(tokens) // SIZE * SIZE
        self.pages.decref(pages)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99))
    def remember_and_go_on(self, which):
        which %= len(self.sequences)
        world, tokens, pages = self.sequences[which]
        pages = self.radix.insert(world, tokens, pages)
        for i, page in enumerate(pages, start=1):
            assert self.content[page] == (world, tuple(tokens[: i * SIZE]))
        self.sequences[which] = (world, tokens, pages)

    @rule(count=st.integers(1, 5))
    def evict(self, count):
        spare, free = self.pages.evictable, self.pages.num_free
        assert self.radix.evict(count) == min(count, spare)
        assert self.pages.num_free == free + min(count, spare)

    @rule()
    def clear(self):
        self.radix.clear()

    @invariant()
    def nobody_is_forgotten(self):
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


TestHolding = Holding.TestCase
TestHolding.settings = settings(max_examples=60, stateful_step_count=30)


def filled(*texts):
    pages = PageAllocator(COUNT)
    radix = RadixCache(pages, SIZE)
    for tokens in texts:
        taken = pages.allocate(len(tokens) // SIZE)
        pages.decref(radix.insert(0, tokens, taken))
    return radix


def test_the_longest_unused_goes_first():
    radix = filled([1, 1, 2, 2], [3, 3], [1, 1, 4, 4])
    radix.pages.decref(radix.match_prefix(0, [1, 1, 2, 2], 4))
    radix.evict(2)
    assert radix.matched_tokens(0, [3, 3], 2) == 0
    assert radix.matched_tokens(0, [1, 1, 4, 4], 4) == 2
    assert radix.matched_tokens(0, [1, 1, 2, 2], 4) == 4


def test_looking_without_holding_changes_nothing():
    radix = filled([1, 1], [2, 2])
    radix.matched_tokens(0, [1, 1], 2)
    radix.evict(1)
    assert radix.matched_tokens(0, [1, 1], 2) == 0


def test_a_limit_leaves_the_last_token_to_be_computed():
    radix = filled([1, 1, 2, 2])
    assert radix.matched_tokens(0, [1, 1, 2, 2], 3) == 2


def test_a_world_knows_nothing_of_another():
    assert filled([1, 1]).matched_tokens(1, [1, 1], 2) == 0


def test_more_pages_than_are_free_are_refused_with_the_numbers():
    with pytest.raises(OutOfPagesError, match="13 pages requested, 12 free"):
        PageAllocator(COUNT).allocate(13)
