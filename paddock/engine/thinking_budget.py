"""Reasoning-token budget: counts reasoning tokens and forces </think> when it is used up."""

from collections.abc import Sequence
from copy import copy
from typing import Self

from paddock.text import SpecialToken, SpecialTokenIds


class ThinkingBudget:
    """Whether an output is in its reasoning section, and how long that is.

    Reasoning begins with <think>, in the prompt or the output, and ends with </think> or
    <tool_call>. A role token in the prompt ends a section that was open before it.
    """

    def __init__(
        self,
        open_id: int,
        close_id: int,
        *,
        is_open: bool,
        budget: int | None,
        call_id: int | None = None,
    ) -> None:
        self.open_id, self.close_id, self.budget = open_id, close_id, budget
        self.call_id = call_id
        self.is_open = is_open
        self.tokens = 0  # reasoning tokens of the output, without <think> and </think>

    @classmethod
    def from_prompt(
        cls,
        prompt: Sequence[int],
        specials: SpecialTokenIds,
        *,
        budget: int | None,
        is_open: bool | None = None,
    ) -> Self | None:
        """The initial state after this prompt; None if the tokenizer has no <think> tokens."""
        if SpecialToken.THINK_OPEN not in specials or SpecialToken.THINK_CLOSE not in specials:
            return None
        open_id, close_id = specials[SpecialToken.THINK_OPEN], specials[SpecialToken.THINK_CLOSE]
        if is_open is None:
            is_open = _open_at_end(prompt, specials)
        call_id = specials.ids.get(SpecialToken.TOOL_CALL_OPEN)
        return cls(open_id, close_id, is_open=is_open, budget=budget, call_id=call_id)

    def feed(self, token: int) -> None:
        """Account for the next output token."""
        if self.is_open:
            self.is_open = token not in (self.close_id, self.call_id)
            self.tokens += self.is_open
        else:
            self.is_open = token == self.open_id

    @property
    def is_exhausted(self) -> bool:
        """Whether the next token must be </think>."""
        return self.is_open and self.budget is not None and self.tokens >= self.budget

    def forced_rows(self, drafts: Sequence[int]) -> list[int]:
        """The rows (after 0, 1, ... draft tokens) whose token must be </think>."""
        if self.budget is None:
            return []
        ahead = copy(self)
        rows = [0] if ahead.is_exhausted else []
        for row, draft in enumerate(drafts, start=1):
            ahead.feed(draft)
            if ahead.is_exhausted:
                rows.append(row)
        return rows


def _open_at_end(prompt: Sequence[int], specials: SpecialTokenIds) -> bool:
    roles = (
        SpecialToken.SYSTEM,
        SpecialToken.USER,
        SpecialToken.ASSISTANT,
        SpecialToken.OBSERVATION,
    )
    others = (SpecialToken.THINK_CLOSE, SpecialToken.TOOL_CALL_OPEN)
    ends = {specials[token] for token in (*roles, *others) if token in specials}
    for token in reversed(prompt):
        if token == specials[SpecialToken.THINK_OPEN]:
            return True
        if token in ends:
            return False
    return False
