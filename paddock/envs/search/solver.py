"""Scripted policy that answers a multi-hop question hop by hop."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from paddock.envs.search.knowledge_graph import RELATIONS, Hop
from paddock.envs.search.pages import parse_facts
from paddock.envs.search.questions import MultiHopQuestion
from paddock.records import Message, ToolCall, ToolSpec

_ID = re.compile(r"^\[(\w+)\]", re.MULTILINE)
_MORE = re.compile(r"\(part (\d+) of (\d+)\)$")


class SearchSolver:
    """Knows the hops of the question but not the answer: it reads every entity from pages. Follows
    at most `hops` hops and answers with the entity it has reached, written by `render`."""

    def __init__(
        self, question: MultiHopQuestion, render: Callable[[str], str], *, hops: int | None = None
    ) -> None:
        self._render = render
        self._steps = list(question.steps[:hops])
        self._arrive(question.start)

    async def __call__(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],  # noqa: ARG002
    ) -> Message:
        if messages[-1].role == "tool":
            self._read(messages[-1].content)
        if self._steps and self._unread:
            self._open = self._unread.pop(0)
            page, part = self._open
            return _call("open", page=page, part=part)
        if self._steps and self._queries:
            return _call("search", query=self._queries.pop(0), k=20)
        return Message(role="assistant", content=self._render(self._here))

    def _arrive(self, name: str) -> None:
        self._here = name
        self._queries = _queries(name, self._steps[0]) if self._steps else []
        self._unread: list[tuple[str, int]] = []
        self._open = ("", 0)
        self._seen: set[str] = set()

    def _read(self, text: str) -> None:
        """Follow the hop if the text states it; otherwise continue with the next part of the page,
        or with the pages the text lists."""
        step = self._steps[0]
        for fact in parse_facts(text):
            here, there = fact.subject, fact.object
            if not step.ahead:
                here, there = there, here
            if fact.relation == step.relation and here == self._here:
                del self._steps[0]
                self._arrive(there)
                return
        if (part := _MORE.search(text)) and part[1] != part[2]:
            self._unread.insert(0, (self._open[0], int(part[1]) + 1))
        found = [page for page in _ID.findall(text) if page not in self._seen]
        self._seen.update(found)
        self._unread += [(page, 1) for page in found]


def _queries(name: str, step: Hop) -> list[str]:
    """The wordings of the sought fact; then the name alone, for pages that word it differently."""
    given = {"s": name, "o": ""} if step.ahead else {"s": "", "o": name}
    return [" ".join(text.format(**given) for text in RELATIONS[step.relation].sentences), name]


def _call(name: str, **arguments: Any) -> Message:
    call = ToolCall(id="look", name=name, arguments=arguments)
    return Message(role="assistant", content="", tool_calls=(call,))
