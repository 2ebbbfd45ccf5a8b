"""What of a long conversation a policy is shown.

A world's conversation only grows. A `Show` decides what of it the model reads for the next reply:
all of it, or what is left when old results are hidden or everything but the task is dropped.
Whatever is shown otherwise than before is a changed past: the session begins another branch there.
"""

from collections.abc import Callable, Sequence

from paddock.envs import context as envs
from paddock.records import Message

ContextFilter = Callable[
    [Sequence[Message], int], Sequence[Message]
]  # conversation, tokens it came to last
ContextStrategy = Callable[[], ContextFilter]  # a fresh one for each attempt


def keep_all() -> ContextFilter:
    """Nothing is left out, however long it gets."""
    return lambda messages, _tokens: messages


def keep_recent(turns: int) -> ContextStrategy:
    """Only the tool results of the last `turns` replies that called tools are shown."""
    return lambda: lambda messages, _tokens: envs.keep_recent(messages, turns)


class _Discards:
    def __init__(self, above: int) -> None:
        self.above, self.start = above, 0

    def __call__(self, messages: Sequence[Message], tokens: int) -> Sequence[Message]:
        task = len(envs.initial_messages(messages))
        self.start = max(self.start, task)
        if tokens > self.above:
            self.start = len(messages)
        return [*messages[:task], *messages[self.start :]]


def discard_all(above: int) -> ContextStrategy:
    """Once the conversation came to more than `above` tokens, all that the policy said and all that
    it was answered is dropped: the model begins again with the task alone."""
    return lambda: _Discards(above)


def chain_strategies(*contexts: ContextStrategy) -> ContextStrategy:
    """One after another, each on what the one before shows. GLM-5's search agents keep recent
    results and, when that is not enough, discard all."""

    def fresh() -> ContextFilter:
        shows = [context() for context in contexts]

        def show(messages: Sequence[Message], tokens: int) -> Sequence[Message]:
            for each in shows:
                messages = each(messages, tokens)
            return messages

        return show

    return fresh
