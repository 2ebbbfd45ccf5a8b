"""Reference-counted pages of the KV cache.

A page holds `page_size` tokens in the storage of every layer at once: latent KV entries, index
keys, keys and values and the MTP layer's entries use the same KV slots and cannot diverge.
"""

from collections.abc import Iterable


class OutOfPagesError(Exception):
    """More pages were requested than are free."""


class PageAllocator:
    """Reference counts of pages; a page with count 0 is free.

    >>> pages = PageAllocator(3)
    >>> taken = pages.allocate(2)
    >>> pages.incref(taken[:1])
    >>> pages.decref(taken)
    >>> pages.num_free
    2
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._refcounts = [0] * count
        self._cached = [False] * count
        self.evictable = 0  # pages held by the prefix cache only
        self._free = list(range(count - 1, -1, -1))  # low numbers first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.count - len(self._free)

    def refcount(self, page: int) -> int:
        return self._refcounts[page]

    def allocate(self, count: int) -> list[int]:
        """Take free pages, each with a reference count of 1. Raises OutOfPagesError."""
        if count > len(self._free):
            raise OutOfPagesError(f"{count} pages requested, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._refcounts[page] = 1
        return taken

    def incref(self, pages: Iterable[int]) -> None:
        """Add a reference to each page; the pages must be in use."""
        for page in pages:
            assert self._refcounts[page] > 0, f"page {page} is free"
            self._refcounts[page] += 1
            self.evictable -= self._cached[page] and self._refcounts[page] == 2

    def decref(self, pages: Iterable[int]) -> None:
        """Drop a reference to each page; a page without references becomes free."""
        for page in pages:
            assert self._refcounts[page] > 0, f"page {page} is free"
            self._refcounts[page] -= 1
            self.evictable += self._cached[page] and self._refcounts[page] == 1
            if not self._refcounts[page]:
                self._free.append(page)

    def mark_cached(self, page: int) -> None:
        """Add the prefix cache's reference."""
        assert not self._cached[page], f"page {page} is already in the prefix cache"
        self.incref([page])
        self._cached[page] = True

    def unmark_cached(self, page: int) -> None:
        """Drop the prefix cache's reference."""
        assert self._cached[page], f"page {page} is not in the prefix cache"
        self.evictable -= self._refcounts[page] == 1
        self._cached[page] = False
        self.decref([page])
