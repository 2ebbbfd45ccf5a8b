"""Context management: which messages of a long conversation are in the next prompt.

A conversation only grows; a prompt may leave out old tool results, or restart from the task. A
changed history begins a new branch of the session, so every trained token was sampled from the
prompt it is trained with.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import PositiveInt

from paddock.config import BaseSettings
from paddock.records import Message
from paddock.rollout.prefix_matcher import Digest, chain_digest, normalized_key

_REPLY_ROLES = ("assistant", "tool")
OMITTED = "Tool result is omitted to save tokens."


class ContextSettings(BaseSettings):
    """The rule that chooses the messages of each prompt."""

    strategy: Literal["keep_all", "keep_recent", "discard_all", "hierarchical"] = "keep_all"
    # keep_recent: tool results before the last `recent_turns` replies with calls are omitted
    # discard_all: a prompt of more than `max_tokens` restarts from the task's messages
    # hierarchical: both, as GLM-5's search agents
    recent_turns: PositiveInt = 5
    max_tokens: PositiveInt = 32768

    @property
    def omits(self) -> bool:
        return self.strategy in ("keep_recent", "hierarchical")

    @property
    def restarts(self) -> bool:
        return self.strategy in ("discard_all", "hierarchical")


KEEP_ALL = ContextSettings()


class ContextManager:
    """The messages of each prompt of one session.

    Restarts are remembered by the conversation before them, so what a prompt shows depends on the
    messages alone, also when a session holds several conversations or an agent edits its history.
    """

    def __init__(self, settings: ContextSettings) -> None:
        self.settings = settings
        self._restarts: set[Digest] = set()

    def visible(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages of the next prompt."""
        if self._restarts:
            start = self._start(messages)
            messages = [*initial_messages(messages), *messages[start:]] if start else messages
        if self.settings.omits:
            messages = omit_tool_results(messages, self.settings.recent_turns)
        return messages

    def restart(self, messages: Sequence[Message], prompt_tokens: int) -> bool:
        """Whether the prompt of these messages is too long and has to be built again from
        `visible`, which from now on leaves out all replies so far and their tool results."""
        if not self.settings.restarts or prompt_tokens <= self.settings.max_tokens:
            return False
        ends = (at for at in range(len(messages), 0, -1) if messages[at - 1].role in _REPLY_ROLES)
        end = next(ends, 0)  # what the user said after the last reply stays
        if end <= self._start(messages):
            return False
        *_, digest = _prefix_digests(messages[:end])
        self._restarts.add(digest)
        return True

    def _start(self, messages: Sequence[Message]) -> int:
        """Index of the first message after the last restart; 0 without restarts."""
        starts = (
            end
            for end, digest in enumerate(_prefix_digests(messages), start=1)
            if digest in self._restarts
        )
        return max(starts, default=0)


def initial_messages(messages: Sequence[Message]) -> list[Message]:
    """The messages before the first reply: system prompt and question."""
    replied = (at for at, message in enumerate(messages) if message.role == "assistant")
    return list(messages[: next(replied, len(messages))])


def omit_tool_results(messages: Sequence[Message], recent_turns: int) -> list[Message]:
    """The messages without the text of all tool results but those of the last `recent_turns`
    replies with calls.

    >>> results = [Message(role="tool", content=text, tool_call_id=text) for text in "ab"]
    >>> reply = Message(role="assistant", content="")
    >>> kept = omit_tool_results([reply, results[0], reply, results[1]], 1)
    >>> [message.content for message in kept][1::2]
    ['Tool result is omitted to save tokens.', 'b']
    """
    results = [at for at, message in enumerate(messages) if message.role == "tool"]
    # The first result of each reply follows a message that is not a tool result.
    firsts = [at for at in results if at == 0 or messages[at - 1].role != "tool"]
    kept_from = firsts[-recent_turns] if recent_turns <= len(firsts) else 0
    return [
        replace(message, content=OMITTED) if message.role == "tool" and at < kept_from else message
        for at, message in enumerate(messages)
    ]


def _prefix_digests(messages: Sequence[Message]) -> Iterator[Digest]:
    """Digest of the first message, of the first two, ..."""
    digest = b""
    for message in messages:
        digest = chain_digest(normalized_key(message), digest)
        yield digest
