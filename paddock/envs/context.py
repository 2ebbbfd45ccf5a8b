"""What of a long conversation is still shown: pure functions of the messages so far.

A world never sees a token, so lengths come from a `size` function that the caller brings; a
rollout brings one that counts tokens (paddock.rollout.context_management), a test counts characters. Each
function looks at the whole conversation and at nothing else: what was shown at a turn can be
computed again from its messages.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from paddock.records import Message

TokenCounter = Callable[[Sequence[Message]], int]
OMITTED = "Tool result is omitted to save tokens."


def initial_messages(messages: Sequence[Message]) -> list[Message]:
    """What was there before the first reply: the rules and the question."""
    replied = (at for at, message in enumerate(messages) if message.role == "assistant")
    return list(messages[: next(replied, len(messages))])


def keep_recent(messages: Sequence[Message], turns: int) -> list[Message]:
    """All tool results but those of the last `turns` replies that called tools are omitted. Results
    of one reply's calls go together.

    >>> said = [Message(role="tool", content=text, tool_call_id=text) for text in "ab"]
    >>> reply = Message(role="assistant", content="")
    >>> [m.content for m in keep_recent([reply, said[0], reply, said[1]], 1)][1::2]
    ['Tool result is omitted to save tokens.', 'b']
    """
    results = [at for at, message in enumerate(messages) if message.role == "tool"]
    # The first result of each reply stands behind something that is no result.
    firsts = [at for at in results if at == 0 or messages[at - 1].role != "tool"]
    kept_from = firsts[-turns] if 0 < turns <= len(firsts) else (0 if turns else len(messages))
    return [
        replace(message, content=OMITTED) if message.role == "tool" and at < kept_from else message
        for at, message in enumerate(messages)
    ]


def discard_all(messages: Sequence[Message], size: TokenCounter, most: int) -> list[Message]:
    """The task alone, begun anew each time the conversation since the last beginning is larger than
    `most`, and what was said since then."""
    return _folded(messages, lambda shown: shown, size, most)


def hierarchical(
    messages: Sequence[Message], size: TokenCounter, *, turns: int, most: int
) -> list[Message]:
    """Recent results kept, older ones omitted; where that is still larger than `most`, begun anew
    with the task alone. The rule of GLM-5's search agents, with turns = 5 and most = 32k tokens."""
    return _folded(messages, lambda shown: keep_recent(shown, turns), size, most)


def _folded(
    messages: Sequence[Message],
    show: Callable[[Sequence[Message]], list[Message] | Sequence[Message]],
    size: TokenCounter,
    most: int,
) -> list[Message]:
    task = initial_messages(messages)
    since: list[Message] = []
    for turn in _turns(messages[len(task) :]):
        since += turn
        if size(show([*task, *since])) > most:
            since = []
    return list(show([*task, *since]))


def _turns(messages: Sequence[Message]) -> list[list[Message]]:
    """Each reply with what answered it."""
    turns: list[list[Message]] = []
    for message in messages:
        if message.role == "assistant":
            turns.append([])
        turns[-1].append(message)
    return turns
