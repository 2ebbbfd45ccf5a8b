"""Prefix cache: a radix tree over whole pages of tokens.

Each namespace (weight version and cache salt) has its own root, so KV entries of one version are
never reused for another. The tree holds one reference to each of its pages, sequences that use
them hold others. Only leaves without other references can be evicted, least recently used first.
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
    last_access: int = 0  # logical clock of lookups and inserts
    queued: bool = False  # is in the eviction heap


class RadixCache:
    """The prefix cache. The caller of `match_prefix` must `decref` the pages it returns."""

    def __init__(self, pages: PageAllocator, page_size: int) -> None:
        self.pages, self.page_size = pages, page_size
        self.evicted = 0  # pages evicted since the start
        self.size = 0  # pages in the tree
        self._roots: dict[CacheNamespace, RadixTreeNode] = {}
        self._leaves: list[tuple[int, int, RadixTreeNode]] = []
        self._clock = 0
        self._serial = 0

    def match_prefix(
        self, namespace: CacheNamespace, tokens: Sequence[int], limit: int
    ) -> list[int]:
        """The pages of the longest cached prefix of `tokens`, at most `limit` tokens, with a
        reference added for the caller."""
        self._clock += 1
        found = []
        for node in self._path(namespace, tokens, limit):
            node.last_access = self._clock
            found.append(node.page)
        self.pages.incref(found)
        return found

    def matched_tokens(self, namespace: CacheNamespace, tokens: Sequence[int], limit: int) -> int:
        """How many tokens `match_prefix` would find; changes nothing."""
        return self.page_size * sum(1 for _ in self._path(namespace, tokens, limit))

    def insert(
        self, namespace: CacheNamespace, tokens: Sequence[int], pages: Sequence[int]
    ) -> list[int]:
        """Cache the pages of `tokens` (whole pages only).

        Returns the pages that the caller must use from now on: where the tree already had a page
        for the same tokens, the caller's page is released and replaced by the tree's.
        """
        self._clock += 1
        node = self._roots.setdefault(namespace, RadixTreeNode(page=-1))
        result = list(pages)
        for i, edge in enumerate(self._edges(tokens, len(pages) * self.page_size)):
            child = node.children.get(edge)
            if child is None:
                child = RadixTreeNode(pages[i], node, edge)
                node.children[edge] = child
                self.pages.mark_cached(pages[i])
                self.size += 1
            elif child.page != pages[i]:
                self.pages.incref([child.page])
                self.pages.decref([pages[i]])
                result[i] = child.page
            child.last_access = self._clock
            node = child
        self._queue(node)
        return result

    def evict(self, count: int) -> int:
        """Free up to `count` pages; returns how many were freed."""
        evicted, busy = 0, []
        while evicted < count and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            node.queued = False
            if node.children:
                continue  # not a leaf any more; queued again when its children are evicted
            if node.last_access > used:
                self._queue(node)  # accessed since it was queued
            elif self.pages.refcount(node.page) > 1:
                busy.append(node)
            else:
                self._remove(node)
                evicted += 1
        for node in busy:
            self._queue(node)
        self.evicted += evicted
        return evicted

    def clear(self) -> None:
        """Remove all entries. Pages referenced by sequences stay allocated."""
        for node in self._nodes():
            self.pages.unmark_cached(node.page)
        self._roots, self._leaves, self.size = {}, [], 0

    def pages_in_tree(self) -> list[int]:
        """All pages in the tree."""
        return [node.page for node in self._nodes()]

    def _path(
        self, namespace: CacheNamespace, tokens: Sequence[int], limit: int
    ) -> Iterator[RadixTreeNode]:
        node = self._roots.get(namespace)
        for edge in self._edges(tokens, limit) if node is not None else ():
            node = node.children.get(edge) if node is not None else None
            if node is None:
                return
            yield node

    def _edges(self, tokens: Sequence[int], limit: int) -> Iterator[PageKey]:
        size = self.page_size
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
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node
