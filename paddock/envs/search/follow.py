"""A player that answers a question by looking up one step after the other."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from paddock.envs.search.graph import RELATIONS, Step
from paddock.envs.search.pages import facts_in
from paddock.envs.search.questions import Question
from paddock.records import Message, ToolCall, ToolSpec

_ID = re.compile(r"^\[(\w+)\]", re.MULTILINE)


class Follower:
    """Knows how the question is built, and nothing of the answer: what it says it has read. Follows
    at most `hops` steps and then names what it has reached, in the form that `say` gives it."""

    def __init__(
        self, question: Question, say: Callable[[str], str], *, hops: int | None = None
    ) -> None:
        self._say = say
        self._steps = list(question.steps[:hops])
        self._here = question.start
        self._searched = False
        self._unread: list[str] = []

    async def __call__(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],  # noqa: ARG002
    ) -> Message:
        if messages[-1].role == "tool":
            self._read(messages[-1].content)
        if not self._steps:
            return self._answer()
        if self._unread:
            return _calling("open", page=self._unread.pop(0))
        if self._searched:  # and read all that was found
            return self._answer()
        self._searched = True
        return _calling("search", query=_query(self._here, self._steps[0]), k=20)

    def _answer(self) -> Message:
        return Message(role="assistant", content=self._say(self._here))

    def _read(self, text: str) -> None:
        """Takes a step if the text states it; otherwise goes on with the pages it lists."""
        step = self._steps[0]
        for fact in facts_in(text):
            here, there = fact.subject, fact.object
            if not step.ahead:
                here, there = there, here
            if fact.relation == step.relation and here == self._here:
                self._here, self._searched, self._unread = there, False, []
                del self._steps[0]
                return
        self._unread += _ID.findall(text)


def _query(name: str, step: Step) -> str:
    """What a page that answers the step says."""
    given = {"s": name, "o": ""} if step.ahead else {"s": "", "o": name}
    return " ".join(text.format(**given) for text in RELATIONS[step.relation].sentences)


def _calling(name: str, **arguments: Any) -> Message:
    call = ToolCall(id="look", name=name, arguments=arguments)
    return Message(role="assistant", content="", tool_calls=(call,))
