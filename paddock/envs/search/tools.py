"""Tools of a search agent: search, open, find."""

import re
from typing import Any

from paddock.envs.search.bm25 import BM25Index, WebPage, excerpt, tokenize_words
from paddock.envs.tools import Tool, ToolError, ToolFunc
from paddock.records import ToolSpec

CHARS_PER_VIEW = 4000  # characters of a page per `open` call
_MAX_HITS = 20


def search_tools(index: BM25Index) -> tuple[Tool, ...]:
    """Tools over an index. They only read it, so that all rollouts can share it."""

    async def search(query: str, k: int = 5) -> str:
        hits = index.search(query, k=k)
        lines = [f"[{hit.page.id}] {hit.page.title}: {hit.excerpt}" for hit in hits]
        return "\n".join(lines) or "nothing was found"

    async def open_page(page: str, part: int = 1) -> str:
        found = _page(index, page)
        parts = -(-len(found.text) // CHARS_PER_VIEW) or 1
        if part > parts:
            raise ToolError(f"page {page} has {parts} parts, not {part}")
        shown = found.text[(part - 1) * CHARS_PER_VIEW : part * CHARS_PER_VIEW]
        more = f"\n(part {part} of {parts})" if parts > 1 else ""
        return f"{found.title}\n\n{shown}{more}"

    async def find(page: str, text: str) -> str:
        found = _page(index, page)
        lines = [line for line in _sentences(found.text) if text.lower() in line.lower()]
        if not lines:
            near = excerpt(found.text, tokenize_words(text))
            return f"{text!r} is not on page {page}; nearest: {near}"
        return "\n".join(lines[:_MAX_HITS])

    return (
        _tool(
            "search",
            "Search the collection; gives page ids, titles and excerpts.",
            {
                "query": {"type": "string"},
                "k": {"type": "integer", "minimum": 1, "maximum": _MAX_HITS},
            },
            search,
            required=["query"],
        ),
        _tool(
            "open",
            "Read a page.",
            {"page": {"type": "string"}, "part": {"type": "integer", "minimum": 1}},
            open_page,
            required=["page"],
        ),
        _tool(
            "find",
            "The sentences of a page that hold a text.",
            {"page": {"type": "string"}, "text": {"type": "string", "minLength": 1}},
            find,
            required=["page", "text"],
        ),
    )


def _page(index: BM25Index, page_id: str) -> WebPage:
    """The page with this id; models also write the id with the brackets that search shows."""
    bare = page_id.strip().removeprefix("[").removesuffix("]")
    spellings = (page_id, page_id.strip(), bare, page_id.strip("[] "))
    found = next((page for each in spellings if (page := index.page(each))), None)
    if found is None:
        raise ToolError(f"there is no page {page_id!r}; search gives ids")
    return found


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text)


def _tool(
    name: str, about: str, properties: dict[str, Any], run: ToolFunc, *, required: list[str]
) -> Tool:
    schema = {"type": "object", "properties": properties, "required": required}
    return Tool(ToolSpec(name=name, description=about, parameters=schema), run)
