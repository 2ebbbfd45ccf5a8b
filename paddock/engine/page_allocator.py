"""Pages of the cache and who holds them.

A page is room for `page_tokens` tokens in every storage of every layer at once: latent rows, index
keys, keys and values and the MTP layer's rows lie at the same slots, so they can never part.
"""

from collections.abc import Iterable


class OutOfPagesError(Exception):
    """More pages were asked for than are free."""


class PageAllocator:
    """How many hold each page. A page is free when nobody does.

    >>> pages = PageAllocator(3)
    >>> taken = pages.allocate(2)
    >>> pages.incref(taken[:1])
    >>> pages.decref(taken)
    >>> pages.num_free
    2
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._holders = [0] * count
        self._cached = [False] * count
        self.evictable = 0  # pages that the cache alone holds, and would give up
        self._free = list(range(count - 1, -1, -1))  # low numbers are handed out first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.count - len(self._free)

    def refcount(self, page: int) -> int:
        return self._holders[page]

    def allocate(self, count: int) -> list[int]:
        """Free pages, each now held once."""
        if count > len(self._free):
            raise OutOfPagesError(f"{count} pages were asked for, {len(self._free)} are free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def incref(self, pages: Iterable[int]) -> None:
        """One more holder for each; only a page in use can be shared."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free"
            self._holders[page] += 1
            self.evictable -= self._cached[page] and self._holders[page] == 2

    def decref(self, pages: Iterable[int]) -> None:
        """One holder fewer for each; a page without holders is free again."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free"
            self._holders[page] -= 1
            self.evictable += self._cached[page] and self._holders[page] == 1
            if not self._holders[page]:
                self._free.append(page)

    def mark_cached(self, page: int) -> None:
        """The cache becomes a holder."""
        assert not self._cached[page], f"page {page} is in the cache already"
        self.incref([page])
        self._cached[page] = True

    def unmark_cached(self, page: int) -> None:
        """The cache is a holder no more."""
        assert self._cached[page], f"page {page} is not in the cache"
        self.evictable -= self._holders[page] == 1
        self._cached[page] = False
        self.decref([page])
