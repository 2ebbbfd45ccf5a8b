"""Pages of the cache and who holds them.

A page is room for `page_tokens` tokens in every storage of every layer at once: latent rows, index
keys, keys and values and the MTP layer's rows lie at the same slots, so they can never part.
"""

from collections.abc import Iterable


class OutOfPages(Exception):
    """More pages were asked for than are free."""


class Pages:
    """How many hold each page. A page is free when nobody does.

    >>> pages = Pages(3)
    >>> taken = pages.take(2)
    >>> pages.hold(taken[:1])
    >>> pages.drop(taken)
    >>> pages.free
    2
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._holders = [0] * count
        self._cached = [False] * count
        self.spare = 0  # pages that the cache alone holds, and would give up
        self._free = list(range(count - 1, -1, -1))  # low numbers are handed out first

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.count - len(self._free)

    def holders(self, page: int) -> int:
        return self._holders[page]

    def take(self, count: int) -> list[int]:
        """Free pages, each now held once."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages were asked for, {len(self._free)} are free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def hold(self, pages: Iterable[int]) -> None:
        """One more holder for each; only a page in use can be shared."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free"
            self._holders[page] += 1
            self.spare -= self._cached[page] and self._holders[page] == 2

    def drop(self, pages: Iterable[int]) -> None:
        """One holder fewer for each; a page without holders is free again."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free"
            self._holders[page] -= 1
            self.spare += self._cached[page] and self._holders[page] == 1
            if not self._holders[page]:
                self._free.append(page)

    def adopt(self, page: int) -> None:
        """The cache becomes a holder."""
        assert not self._cached[page], f"page {page} is in the cache already"
        self.hold([page])
        self._cached[page] = True

    def disown(self, page: int) -> None:
        """The cache is a holder no more."""
        assert self._cached[page], f"page {page} is not in the cache"
        self.spare -= self._holders[page] == 1
        self._cached[page] = False
        self.drop([page])
