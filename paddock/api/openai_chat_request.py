"""OpenAI Chat Completions (`/v1/chat/completions`): request bodies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paddock.api import thinking_options
from paddock.api.request import ChatRequest
from paddock.api.sampling_fields import (
    RoutingFields,
    SamplingFields,
    parse_response_format,
    parse_sampling_params,
)
from paddock.records import ApiError, Message, SamplingParams, ToolSpec
from paddock.text import messages as text_messages
from paddock.text import parse_messages


class ChatCompletionBody(RoutingFields, SamplingFields):
    """OpenAI's fields and the extensions of vLLM, SGLang, z.ai and OpenRouter in common use."""

    messages: list[dict[str, Any]]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    max_thinking_tokens: int | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_ids: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_meta_info: bool | None = None
    input_ids: list[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCompletionRequest(ChatRequest):
    include_usage: bool = False  # at the end of a stream
    include_reasoning: bool = True
    inline_reasoning: bool = False  # as part of the content, between <think> and </think>
    return_token_ids: bool = False
    return_prompt_token_ids: bool = False
    return_meta_info: bool = False


def parse_chat_request(
    body: ChatCompletionBody, defaults: SamplingParams, server: thinking_options.ThinkingOptions
) -> ChatCompletionRequest:
    """The request of a chat body. Raises ApiError naming the field at fault."""
    options = _thinking_options(body, server)
    n = 1 if body.n is None else body.n
    if not 1 <= n <= 128:
        raise ApiError(f"n must be in [1, 128], got {n}", param="n")
    if (body.top_logprobs or 0) < 0:
        raise ApiError(
            f"top_logprobs must not be negative, got {body.top_logprobs}", param="top_logprobs"
        )
    if body.top_logprobs and not body.logprobs:
        raise ApiError("top_logprobs requires logprobs to be true", param="top_logprobs")
    max_new_tokens = (
        body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    )
    messages = parse_request_messages(body.messages)
    tools, skipped = parse_function_tools(body.tools)
    tools, must, only = parse_tool_choice(body.tool_choice, tools)
    hide_reasoning = (
        body.include_reasoning is False or (body.reasoning or {}).get("exclude") is True
    )
    return ChatCompletionRequest(
        model=body.model,
        id=body.rid or body.request_id,
        messages=messages,
        tools=tools,
        skipped_tools=skipped,
        must_call=must,
        only_tool=only,
        thinking=options.thinking,
        sampling=parse_sampling_params(
            body,
            max_new_tokens=max_new_tokens,
            defaults=defaults,
            grammar=parse_response_format(body.response_format),
            thinking_budget=options.budget,
        ),
        prompt_ids=None if body.input_ids is None else tuple(body.input_ids),
        continues=_continue_final_message(body, messages),
        stream=bool(body.stream),
        n=n,
        priority=body.priority or 0,
        salt=body.cache_salt or "",
        session=body.session_id or body.user,
        replica=body.routed_dp_rank,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        include_usage=bool((body.stream_options or {}).get("include_usage")),
        include_reasoning=not hide_reasoning,
        inline_reasoning=body.separate_reasoning is False,
        return_token_ids=bool(body.return_token_ids),
        return_prompt_token_ids=bool(body.return_prompt_token_ids),
        return_meta_info=bool(body.return_meta_info),
    )


def _thinking_options(
    body: ChatCompletionBody, server: thinking_options.ThinkingOptions
) -> thinking_options.ThinkingOptions:
    """Options of all fields that name them, most specific first; the server's defaults last."""
    budgets = (
        thinking_options.ThinkingOptions(
            budget=thinking_options.parse_thinking_budget(getattr(body, name), name)
        )
        for name in ("thinking_token_budget", "max_thinking_tokens")
    )
    return thinking_options.merge_thinking_options(
        thinking_options.from_template_kwargs(body.chat_template_kwargs),
        thinking_options.from_thinking_field(body.thinking),
        thinking_options.from_reasoning_field(body.reasoning),
        thinking_options.from_effort(body.reasoning_effort),
        *budgets,
        server,
    )


def parse_request_messages(raw: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    try:
        found = parse_messages(raw)
    except text_messages.MessageError as error:
        raise ApiError(str(error), param="messages") from None
    if not found:
        raise ApiError("messages must not be empty", param="messages")
    return found


def parse_function_tools(
    raw: Sequence[Mapping[str, Any]] | None,
) -> tuple[tuple[ToolSpec, ...], tuple[str, ...]]:
    """The function tools, and the types of all others (web_search and the like)."""
    functions, skipped = [], []
    for tool in raw or ():
        kind = tool.get("type", "function")
        if kind == "function" or (kind == "custom" and "input_schema" in tool):
            functions.append(tool)
        else:
            skipped.append(str(kind)[:80])
    try:
        found = text_messages.parse_tools(functions)
    except text_messages.MessageError as error:
        raise ApiError(str(error), param="tools") from None
    names = [tool.name for tool in found]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise ApiError(f"tools: duplicate name {duplicate!r:.80}", param="tools")
    return found, tuple(skipped)


def parse_tool_choice(
    choice: str | Mapping[str, Any] | None, tools: tuple[ToolSpec, ...]
) -> tuple[tuple[ToolSpec, ...], bool, str | None]:
    """The tools in the prompt, whether a call is required, and the forced tool if any.

    >>> look = ToolSpec(name="look", description="", parameters={})
    >>> parse_tool_choice("none", (look,))
    ((), False, None)
    >>> parse_tool_choice({"type": "function", "name": "look"}, (look,))[1:]
    (True, 'look')
    """
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        mode, tools = _allowed_tools(choice, tools)
        return parse_tool_choice(mode, tools)
    if choice is None or choice == "auto":
        return tools, False, None
    if choice == "none":
        return (), False, None
    if choice == "required":
        if not tools:
            raise ApiError("tool_choice 'required' needs at least one tool", param="tool_choice")
        return tools, True, None
    name = _function_name(choice) if isinstance(choice, Mapping) else None
    if name is None:
        known = "none, auto, required, allowed_tools or a named function"
        raise ApiError(f"tool_choice must be {known}, got {choice!r:.80}", param="tool_choice")
    if name not in [tool.name for tool in tools]:
        raise _unknown_tool(name)
    return tools, True, name


def _allowed_tools(
    choice: Mapping[str, Any], tools: tuple[ToolSpec, ...]
) -> tuple[str, tuple[ToolSpec, ...]]:
    """Mode and allowed subset of the tools. The chat API nests both in an object, the Responses
    API does not."""
    allowed = choice.get("allowed_tools", choice)
    mode, listed = (
        (allowed.get(k) for k in ("mode", "tools")) if isinstance(allowed, Mapping) else ("", 0)
    )
    if mode not in ("auto", "required") or not isinstance(listed, list):
        what = "must have a 'mode', auto or required, and a list of 'tools'"
        raise ApiError(f"tool_choice: allowed_tools {what}", param="tool_choice")
    named = (_function_name(each) for each in listed if isinstance(each, Mapping))
    names = {name for name in named if name is not None}
    unknown = names - {tool.name for tool in tools}
    if unknown:
        raise _unknown_tool(min(unknown))
    return mode, tuple(tool for tool in tools if tool.name in names)


def _function_name(choice: Mapping[str, Any]) -> str | None:
    inner = choice.get("function", choice)
    name = inner.get("name") if isinstance(inner, Mapping) else None
    return name if isinstance(name, str) else None


def _unknown_tool(name: str) -> ApiError:
    return ApiError(f"tool_choice: tool {name!r:.80} not found in tools", param="tool_choice")


def _continue_final_message(body: ChatCompletionBody, messages: Sequence[Message]) -> bool:
    requested = bool(body.continue_final_message) or body.add_generation_prompt is False
    if requested and messages[-1].role != "assistant":
        raise ApiError(
            "continue_final_message: the last message must come from the assistant",
            param="continue_final_message",
        )
    return requested
