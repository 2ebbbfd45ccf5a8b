"""The fields with which clients control thinking, merged into ThinkingOptions.

Precedence: explicit `chat_template_kwargs`, then the fields of the API, then the server's defaults.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paddock.records import ApiError
from paddock.text import DEFAULT_THINKING, ThinkingKwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingOptions:
    """Template arguments about thinking, and the thinking budget in tokens."""

    thinking: ThinkingKwargs = DEFAULT_THINKING
    budget: int | None = None

    def with_fallback(self, other: "ThinkingOptions") -> "ThinkingOptions":
        """These options; unset ones are taken from `other`."""
        if NO_THINKING_OPTIONS in (self, other):
            return other if self == NO_THINKING_OPTIONS else self
        own = self.thinking.as_kwargs
        return ThinkingOptions(
            thinking=ThinkingKwargs(**(other.thinking.as_kwargs | own)),
            budget=other.budget if self.budget is None else self.budget,
        )


NO_THINKING_OPTIONS = ThinkingOptions()


def from_template_kwargs(kwargs: Mapping[str, Any] | None) -> ThinkingOptions:
    """`chat_template_kwargs`; keys that are not about thinking are ignored.

    >>> from_template_kwargs({"thinking": False}).thinking.as_kwargs
    {'enable_thinking': False}
    """
    kwargs = kwargs or {}
    enable = kwargs.get("enable_thinking", kwargs.get("thinking"))
    path = "chat_template_kwargs"
    return _make_options(
        path,
        enable_thinking=enable,
        clear_thinking=kwargs.get("clear_thinking"),
        reasoning_effort=kwargs.get("reasoning_effort"),
    )


def from_thinking_field(
    field: Mapping[str, Any] | None, *, path: str = "thinking"
) -> ThinkingOptions:
    """`{"type": "enabled" | "disabled" | "adaptive", ...}`, as in z.ai and Anthropic.

    >>> from_thinking_field({"type": "enabled", "budget_tokens": 2000}).budget
    2000
    """
    if field is None:
        return NO_THINKING_OPTIONS
    kind = field.get("type")
    kinds = {"enabled": True, "disabled": False, "adaptive": None, "auto": None, None: None}
    if not (kind is None or isinstance(kind, str)) or kind not in kinds:
        raise ApiError(
            f"{path}.type must be one of enabled, disabled, adaptive, got {kind!r}", param=path
        )
    options = _make_options(
        path, enable_thinking=kinds[kind], clear_thinking=field.get("clear_thinking")
    )
    return ThinkingOptions(
        thinking=options.thinking, budget=parse_thinking_budget(field.get("budget_tokens"), path)
    )


def from_reasoning_field(field: Mapping[str, Any] | None) -> ThinkingOptions:
    """`reasoning: {"enabled", "effort", "max_tokens"}`, as in OpenRouter and OpenAI Responses."""
    if field is None:
        return NO_THINKING_OPTIONS
    options = _make_options("reasoning", enable_thinking=field.get("enabled"))
    budget = parse_thinking_budget(field.get("max_tokens"), "reasoning.max_tokens")
    return ThinkingOptions(thinking=options.thinking, budget=budget).with_fallback(
        from_effort(field.get("effort"), "reasoning.effort")
    )


def from_effort(effort: object, path: str = "reasoning_effort") -> ThinkingOptions:
    """A reasoning effort; "none" turns thinking off.

    >>> from_effort("none").thinking.as_kwargs, from_effort("high").thinking.as_kwargs
    ({'enable_thinking': False}, {'reasoning_effort': 'high'})
    """
    if effort is not None and not isinstance(effort, str):
        raise ApiError(f"{path} must be a string, got {effort!r:.80}", param=path.split(".")[0])
    if effort == "none":
        return _make_options(path, enable_thinking=False)
    return _make_options(path, reasoning_effort=effort)


def parse_thinking_budget(value: object, path: str) -> int | None:
    if value is None:
        return None
    if type(value) is not int or value < 0:
        raise ApiError(
            f"{path} must be a number of tokens, got {value!r:.80}", param=path.split(".")[0]
        )
    return value


def merge_thinking_options(*choices: ThinkingOptions) -> ThinkingOptions:
    """Earlier options take precedence over later ones."""
    found = NO_THINKING_OPTIONS
    for options in choices:
        found = found.with_fallback(options)
    return found


def _make_options(path: str, **values: Any) -> ThinkingOptions:
    kinds = {"enable_thinking": bool, "clear_thinking": bool, "reasoning_effort": str}
    for name, value in values.items():
        if value is not None and type(value) is not kinds[name]:
            message = f"{path}.{name} must be {kinds[name].__name__}, got {value!r:.80}"
            raise ApiError(message, param=path.split(".")[0])
    return ThinkingOptions(thinking=ThinkingKwargs(**values))
