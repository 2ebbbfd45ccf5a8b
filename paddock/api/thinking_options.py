"""The ways in which clients ask for thinking, as one.

Explicit `chat_template_kwargs` win over the fields of an API, these over the server's defaults.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paddock.records import ApiError
from paddock.text import DEFAULT_THINKING, ThinkingKwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingOptions:
    """Thinking as asked for, and how many tokens of it at most."""

    thinking: ThinkingKwargs = DEFAULT_THINKING
    budget: int | None = None

    def with_fallback(self, other: "ThinkingOptions") -> "ThinkingOptions":
        """What this says, and where it says nothing what `other` does."""
        if NO_THINKING_OPTIONS in (self, other):
            return other if self == NO_THINKING_OPTIONS else self
        mine = self.thinking.as_kwargs
        return ThinkingOptions(
            thinking=ThinkingKwargs(**(other.thinking.as_kwargs | mine)),
            budget=other.budget if self.budget is None else self.budget,
        )


NO_THINKING_OPTIONS = ThinkingOptions()


def from_template_kwargs(kwargs: Mapping[str, Any] | None) -> ThinkingOptions:
    """`chat_template_kwargs`; words that are not about thinking are passed over.

    >>> from_template_kwargs({"thinking": False}).thinking.as_kwargs
    {'enable_thinking': False}
    """
    kwargs = kwargs or {}
    enable = kwargs.get("enable_thinking", kwargs.get("thinking"))
    where = "chat_template_kwargs"
    return _wish(
        where,
        enable_thinking=enable,
        clear_thinking=kwargs.get("clear_thinking"),
        reasoning_effort=kwargs.get("reasoning_effort"),
    )


def from_thinking_field(
    said: Mapping[str, Any] | None, *, where: str = "thinking"
) -> ThinkingOptions:
    """`{"type": "enabled" | "disabled" | "adaptive", ...}`, of z.ai and Anthropic.

    >>> from_thinking_field({"type": "enabled", "budget_tokens": 2000}).budget
    2000
    """
    if said is None:
        return NO_THINKING_OPTIONS
    kind = said.get("type")
    kinds = {"enabled": True, "disabled": False, "adaptive": None, "auto": None, None: None}
    if not (kind is None or isinstance(kind, str)) or kind not in kinds:
        raise ApiError(
            f"{where}.type: {kind!r} is none of enabled, disabled, adaptive", param=where
        )
    wish = _wish(where, enable_thinking=kinds[kind], clear_thinking=said.get("clear_thinking"))
    return ThinkingOptions(
        thinking=wish.thinking, budget=parse_thinking_budget(said.get("budget_tokens"), where)
    )


def from_reasoning_field(said: Mapping[str, Any] | None) -> ThinkingOptions:
    """`reasoning: {"enabled", "effort", "max_tokens"}`, of OpenRouter and the Responses API."""
    if said is None:
        return NO_THINKING_OPTIONS
    wish = _wish("reasoning", enable_thinking=said.get("enabled"))
    most = parse_thinking_budget(said.get("max_tokens"), "reasoning.max_tokens")
    return ThinkingOptions(thinking=wish.thinking, budget=most).with_fallback(
        from_effort(said.get("effort"), "reasoning.effort")
    )


def from_effort(effort: object, where: str = "reasoning_effort") -> ThinkingOptions:
    """An effort; "none" turns thinking off.

    >>> from_effort("none").thinking.as_kwargs, from_effort("high").thinking.as_kwargs
    ({'enable_thinking': False}, {'reasoning_effort': 'high'})
    """
    if effort is not None and not isinstance(effort, str):
        raise ApiError(f"{where}: {effort!r:.80} is no text", param=where.split(".")[0])
    if effort == "none":
        return _wish(where, enable_thinking=False)
    return _wish(where, reasoning_effort=effort)


def parse_thinking_budget(said: object, where: str) -> int | None:
    if said is None:
        return None
    if type(said) is not int or said < 0:
        raise ApiError(f"{where}: {said!r:.80} is no number of tokens", param=where.split(".")[0])
    return said


def merge_thinking_options(*wishes: ThinkingOptions) -> ThinkingOptions:
    """The earlier, the stronger."""
    found = NO_THINKING_OPTIONS
    for wish in wishes:
        found = found.with_fallback(wish)
    return found


def _wish(where: str, **said: Any) -> ThinkingOptions:
    kinds = {"enable_thinking": bool, "clear_thinking": bool, "reasoning_effort": str}
    for name, value in said.items():
        if value is not None and type(value) is not kinds[name]:
            message = f"{where}.{name}: {value!r:.80} is not {kinds[name].__name__}"
            raise ApiError(message, param=where.split(".")[0])
    return ThinkingOptions(thinking=ThinkingKwargs(**said))
