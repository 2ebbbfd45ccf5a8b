"""Context management of long conversations, as pure functions of the messages so far.

Environments never see tokens, so lengths come from a `size` function: a rollout counts tokens
(paddock.rollout.context_management), a test characters. Since the functions depend on the messages
alone, what the model saw at a turn can be computed again.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from paddock.records import Message

TokenCounter = Callable[[Sequence[Message]], int]
OMITTED = "Tool result is omitted to save tokens."


def initial_messages(messages: Sequence[Message]) -> list[Message]:
    """The messages before the first reply: system prompt and question."""
    replied = (at for at, message in enumerate(messages) if message.role == "assistant")
    return list(messages[: next(replied, len(messages))])


def keep_recent(messages: Sequence[Message], turns: int) -> list[Message]:
    """Omit all tool results except those of the last `turns` replies with tool calls.

    >>> results = [Message(role="tool", content=text, tool_call_id=text) for text in "ab"]
    >>> reply = Message(role="assistant", content="")
    >>> [m.content for m in keep_recent([reply, results[0], reply, results[1]], 1)][1::2]
    ['Tool result is omitted to save tokens.', 'b']
    """
    results = [at for at, message in enumerate(messages) if message.role == "tool"]
    # The first result of each reply follows a message that is not a tool result.
    firsts = [at for at in results if at == 0 or messages[at - 1].role != "tool"]
    kept_from = firsts[-turns] if 0 < turns <= len(firsts) else (0 if turns else len(messages))
    return [
        replace(message, content=OMITTED) if message.role == "tool" and at < kept_from else message
        for at, message in enumerate(messages)
    ]


def discard_all(messages: Sequence[Message], size: TokenCounter, max_size: int) -> list[Message]:
    """Restart from the task's messages whenever the conversation since the last restart exceeds
    `max_size`; the messages since then are kept."""
    return _restarting(messages, lambda shown: shown, size, max_size)


def hierarchical(
    messages: Sequence[Message], size: TokenCounter, *, turns: int, max_size: int
) -> list[Message]:
    """Omit older tool results; if the rest still exceeds `max_size`, restart from the task's
    messages. The rule of GLM-5's search agents, with 5 turns and 32k tokens."""
    return _restarting(messages, lambda shown: keep_recent(shown, turns), size, max_size)


def _restarting(
    messages: Sequence[Message],
    show: Callable[[Sequence[Message]], list[Message] | Sequence[Message]],
    size: TokenCounter,
    max_size: int,
) -> list[Message]:
    task = initial_messages(messages)
    since: list[Message] = []
    for turn in _turns(messages[len(task) :]):
        since += turn
        if size(show([*task, *since])) > max_size:
            since = []
    return list(show([*task, *since]))


def _turns(messages: Sequence[Message]) -> list[list[Message]]:
    """Each reply with the messages that follow it."""
    turns: list[list[Message]] = []
    for message in messages:
        if message.role == "assistant":
            turns.append([])
        turns[-1].append(message)
    return turns
