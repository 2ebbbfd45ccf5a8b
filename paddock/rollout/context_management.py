"""Context management: which messages of a long conversation are in the next prompt.

The conversation of an environment only grows. A `ContextFilter` selects the messages for the next
turn: all, all without old tool results, or the task alone. A changed history starts a new branch of
the session.
"""

from collections.abc import Callable, Sequence

from paddock.envs import context as envs
from paddock.records import Message

# (messages, tokens of the last turn) -> messages of the next prompt
ContextFilter = Callable[[Sequence[Message], int], Sequence[Message]]
ContextStrategy = Callable[[], ContextFilter]  # a new filter for each rollout


def keep_all() -> ContextFilter:
    """Keep every message."""
    return lambda messages, _tokens: messages


def keep_recent(turns: int) -> ContextStrategy:
    """Keep only the tool results of the last `turns` replies with tool calls."""
    return lambda: lambda messages, _tokens: envs.keep_recent(messages, turns)


class _DiscardAll:
    def __init__(self, above: int) -> None:
        self.above, self.start = above, 0

    def __call__(self, messages: Sequence[Message], tokens: int) -> Sequence[Message]:
        task = len(envs.initial_messages(messages))
        self.start = max(self.start, task)
        if tokens > self.above:
            self.start = len(messages)
        return [*messages[:task], *messages[self.start :]]


def discard_all(above: int) -> ContextStrategy:
    """Once the conversation exceeds `above` tokens, drop everything but the task."""
    return lambda: _DiscardAll(above)


def chain_strategies(*contexts: ContextStrategy) -> ContextStrategy:
    """Apply strategies in order, each to the result of the one before.

    GLM-5's search agents keep recent results and, when that is not enough, discard all.
    """

    def new_filter() -> ContextFilter:
        filters = [context() for context in contexts]

        def apply(messages: Sequence[Message], tokens: int) -> Sequence[Message]:
            for context_filter in filters:
                messages = context_filter(messages, tokens)
            return messages

        return apply

    return new_filter
