"""Pages already computed, found again by the tokens that lead to them.

A tree whose edges are whole pages of tokens. Each world (a version of the weights, and whatever
salt a request brings) has a root of its own, so rows of one version never answer for another.
The tree is one holder of each of its pages; sequences that use them are others. Only leaves that
nobody else holds can be evicted, the longest unused first.
"""

import heapq
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from paddock.engine.page_allocator import PageAllocator

CacheNamespace = Hashable
PageKey = tuple[int, ...]  # the tokens of one page


@dataclass(eq=False, slots=True)
class RadixTreeNode:
    page: int
    parent: "RadixTreeNode | None" = None
    edge: PageKey = ()
    children: dict[PageKey, "RadixTreeNode"] = field(default_factory=dict)
    last_access: int = 0  # when, in looks at the tree
    queued: bool = False  # stands in the queue of leaves


class RadixCache:
    """The prefix cache. What `match` returns is held for its caller, who must drop it."""

    def __init__(self, pages: PageAllocator, page_tokens: int) -> None:
        self.pages, self.page_tokens = pages, page_tokens
        self.evicted = 0  # pages, ever
        self.size = 0  # pages, now
        self._roots: dict[CacheNamespace, RadixTreeNode] = {}
        self._leaves: list[tuple[int, int, RadixTreeNode]] = []
        self._clock = 0
        self._serial = 0

    def match_prefix(self, world: CacheNamespace, tokens: Sequence[int], limit: int) -> list[int]:
        """Pages of the longest known beginning of `tokens`, of whole pages and at most `limit`
        tokens, now held by the caller too."""
        self._clock += 1
        found = []
        for node in self._path(world, tokens, limit):
            node.last_access = self._clock
            found.append(node.page)
        self.pages.incref(found)
        return found

    def matched_tokens(self, world: CacheNamespace, tokens: Sequence[int], limit: int) -> int:
        """How many tokens `match` would find. Looks, never touches."""
        return self.page_tokens * sum(1 for _ in self._path(world, tokens, limit))

    def insert(
        self, world: CacheNamespace, tokens: Sequence[int], pages: Sequence[int]
    ) -> list[int]:
        """Remember the pages of `tokens` (as many whole pages as there are of both).

        Returns the caller's pages as they are to be from now on: where the tree already had a page
        for the same tokens, the caller's own is dropped and the tree's held in its place.
        """
        self._clock += 1
        node = self._roots.setdefault(world, RadixTreeNode(page=-1))
        kept = list(pages)
        for i, edge in enumerate(self._edges(tokens, len(pages) * self.page_tokens)):
            child = node.children.get(edge)
            if child is None:
                child = RadixTreeNode(pages[i], node, edge)
                node.children[edge] = child
                self.pages.mark_cached(pages[i])
                self.size += 1
            elif child.page != pages[i]:
                self.pages.incref([child.page])
                self.pages.decref([pages[i]])
                kept[i] = child.page
            child.last_access = self._clock
            node = child
        self._queue(node)
        return kept

    def evict(self, count: int) -> int:
        """Give up to `count` pages back to the pool; returns how many there were to give."""
        given, busy = 0, []
        while given < count and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            node.queued = False
            if node.children:
                continue  # no leaf any more; it returns when its children have gone
            if node.last_access > used:
                self._queue(node)  # looked at since it was queued
            elif self.pages.refcount(node.page) > 1:
                busy.append(node)
            else:
                self._remove(node)
                given += 1
        for node in busy:
            self._queue(node)
        self.evicted += given
        return given

    def clear(self) -> None:
        """Forget everything. Pages held by sequences stay theirs."""
        for node in self._nodes():
            self.pages.unmark_cached(node.page)
        self._roots, self._leaves, self.size = {}, [], 0

    def pages_in_tree(self) -> list[int]:
        """Every page the tree holds."""
        return [node.page for node in self._nodes()]

    def _path(
        self, world: CacheNamespace, tokens: Sequence[int], limit: int
    ) -> Iterator[RadixTreeNode]:
        node = self._roots.get(world)
        for edge in self._edges(tokens, limit) if node is not None else ():
            node = node.children.get(edge) if node is not None else None
            if node is None:
                return
            yield node

    def _edges(self, tokens: Sequence[int], limit: int) -> Iterator[PageKey]:
        size = self.page_tokens
        for start in range(0, min(len(tokens), limit) - size + 1, size):
            yield tuple(tokens[start : start + size])

    def _queue(self, node: RadixTreeNode) -> None:
        if not node.children and node.parent is not None and not node.queued:
            self._serial += 1
            heapq.heappush(self._leaves, (node.last_access, self._serial, node))
            node.queued = True

    def _remove(self, node: RadixTreeNode) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.edge]
        self.pages.unmark_cached(node.page)
        self.size -= 1
        self._queue(parent)

    def _nodes(self) -> Iterator[RadixTreeNode]:
        waiting = [child for root in self._roots.values() for child in root.children.values()]
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            yield node
