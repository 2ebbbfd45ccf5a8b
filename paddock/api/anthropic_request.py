"""Anthropic Messages (`/v1/messages`): request bodies."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from paddock.api import thinking_options
from paddock.api.body import RequestBody
from paddock.api.openai_chat_request import (
    parse_function_tools,
    parse_request_messages,
    parse_tool_choice,
)
from paddock.api.request import ChatRequest
from paddock.api.sampling_fields import (
    OPENAI_FIELD_NAMES,
    make_sampling_params,
    parse_response_format,
    parse_stop,
)
from paddock.records import ApiError, SamplingParams, ToolSpec

# Some clients start the system prompt with this line. It differs in every request, so it would
# defeat the prefix cache.
BILLING_HEADER = "x-anthropic-billing-header:"


class MessagesBody(RequestBody):
    messages: list[dict[str, Any]]
    max_tokens: int = Field(ge=1)
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    thread: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CountTokensBody(RequestBody):
    """MessagesBody without the fields that only generation needs."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def parse_messages_request(
    body: MessagesBody, defaults: SamplingParams, server: thinking_options.ThinkingOptions
) -> ChatRequest:
    """The request of a Messages body. Raises ApiError naming the field at fault."""
    if body.thread is not None:  # the messages may be incomplete
        what = "this server stores no threads; send the whole conversation without 'thread'"
        raise ApiError(f"thread: {what}", param="thread", code="thread_unsupported_request")
    options, tools = _thinking_options(body, server), _tools(body)
    user = (body.metadata or {}).get("user_id")
    top_k = defaults.top_k if body.top_k is None else body.top_k
    return ChatRequest(
        model=body.model,
        messages=parse_request_messages(list(_to_openai_messages(body.system, body.messages))),
        tools=tools.allowed,
        skipped_tools=tools.skipped,
        must_call=tools.must_call,
        only_tool=tools.forced_tool,
        thinking=options.thinking,
        sampling=make_sampling_params(
            OPENAI_FIELD_NAMES | {"stop": "stop_sequences"},
            max_new_tokens=body.max_tokens,
            temperature=float(_or_default(body.temperature, defaults.temperature)),
            top_p=float(_or_default(body.top_p, defaults.top_p)),
            top_k=top_k if top_k and top_k > 0 else None,
            stop=parse_stop(body.stop_sequences),
            thinking_budget=options.budget,
            grammar=parse_response_format(
                _response_format(body.output_config), path="output_config.format"
            ),
        ),
        # max_tokens is mandatory, and clients do not know this model's context length.
        fits_context=True,
        stream=bool(body.stream),
        session=user if isinstance(user, str) else None,
    )


def parse_count_tokens_request(
    body: CountTokensBody, server: thinking_options.ThinkingOptions
) -> ChatRequest:
    tools = _tools(body)
    return ChatRequest(
        model=body.model,
        messages=parse_request_messages(list(_to_openai_messages(body.system, body.messages))),
        tools=tools.allowed,
        skipped_tools=tools.skipped,
        must_call=tools.must_call,
        only_tool=tools.forced_tool,
        thinking=_thinking_options(body, server).thinking,
        sampling=SamplingParams(),
    )


def _or_default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _thinking_options(
    body: MessagesBody | CountTokensBody, server: thinking_options.ThinkingOptions
) -> thinking_options.ThinkingOptions:
    effort = (body.output_config or {}).get("effort")
    return thinking_options.merge_thinking_options(
        thinking_options.from_template_kwargs(body.chat_template_kwargs),
        thinking_options.from_thinking_field(body.thinking),
        thinking_options.from_effort(effort, "output_config.effort"),
        server,
    )


def _response_format(config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    response_format = (config or {}).get("format")
    if response_format is not None and not isinstance(response_format, Mapping):
        raise ApiError("output_config.format must be an object", param="output_config")
    return response_format


@dataclass(frozen=True, slots=True)
class _Tools:
    allowed: tuple[ToolSpec, ...]
    skipped: tuple[str, ...]
    must_call: bool
    forced_tool: str | None


def _tools(body: MessagesBody | CountTokensBody) -> _Tools:
    # Client tools have an input schema; Anthropic's server tools (web_search_...) have a type.
    tools = [
        {**tool, "type": "function"} if "input_schema" in tool else tool
        for tool in body.tools or ()
    ]
    found, skipped = parse_function_tools(tools)
    choice = body.tool_choice or {}
    choices: dict[Any, str | Mapping[str, Any]] = {
        "any": "required",
        "auto": "auto",
        "none": "none",
        None: "auto",
        "tool": choice,
    }
    kind = choice.get("type")
    if not (kind is None or isinstance(kind, str)) or kind not in choices:
        known = "auto, any, tool, none"
        raise ApiError(
            f"tool_choice.type must be one of {known}, got {kind!r:.80}", param="tool_choice"
        )
    allowed, must_call, forced_tool = parse_tool_choice(choices[kind], found)
    return _Tools(allowed, skipped, must_call, forced_tool)


# --- conversations --------------------------------------------------------------------------------


def _to_openai_messages(
    system: str | Sequence[Mapping[str, Any]] | None, raw: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The conversation as OpenAI chat messages."""
    instructions = _strip_billing_header(_text(system, "system"))
    if instructions:
        yield {"role": "system", "content": instructions}
    for i, entry in enumerate(raw):
        role, content = entry.get("role"), entry.get("content")
        if role not in ("user", "assistant", "system"):
            known = "user, assistant, system"
            raise ApiError(
                f"messages[{i}].role must be one of {known}, got {role!r:.80}", param="messages"
            )
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(b, dict) for b in blocks):
            raise ApiError(
                f"messages[{i}].content must be a string or a list of blocks", param="messages"
            )
        if role == "assistant":
            yield _assistant_message(blocks, f"messages[{i}].content")
        else:
            yield from _user_messages(str(role), blocks, f"messages[{i}].content")


def _assistant_message(blocks: Sequence[Mapping[str, Any]], path: str) -> dict[str, Any]:
    texts: list[str] = []
    reasoning: list[str] = []
    calls = []
    for j, block in enumerate(blocks):
        match block.get("type"):
            case "text":
                texts.append(_string(block, "text", f"{path}[{j}]"))
            case "thinking":
                reasoning.append(_string(block, "thinking", f"{path}[{j}]"))
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input")}
                calls.append({"id": block.get("id"), "function": function})
            case str(kind) if kind == "redacted_thinking" or "_tool_" in f"_{kind}":
                pass  # server tools and redacted reasoning: nothing that this model can read
            case kind:
                raise ApiError(f"{path}[{j}]: unknown block type {kind!r:.80}", param="messages")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts), "tool_calls": calls}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    return message


def _user_messages(
    role: str, blocks: Sequence[Mapping[str, Any]], path: str
) -> Iterator[dict[str, Any]]:
    """User text and tool results, in order."""
    texts: list[str] = []
    for j, block in enumerate(blocks):
        match block.get("type"):
            case "text":
                texts.append(_string(block, "text", f"{path}[{j}]"))
            case "tool_result":
                if texts:
                    yield {"role": role, "content": "".join(texts)}
                    texts = []
                yield {
                    "role": "tool",
                    "tool_call_id": block.get("tool_use_id"),
                    "content": _tool_result_text(block, f"{path}[{j}].content"),
                }
            case kind:
                raise ApiError(
                    f"{path}[{j}].type must be 'text', got {kind!r:.80}", param="messages"
                )
    if texts or not blocks:
        yield {"role": role, "content": "".join(texts)}


def _tool_result_text(block: Mapping[str, Any], path: str) -> str:
    content = block.get("content")
    known = content is None or isinstance(content, str | list)
    text = _text(content, path) if known else json.dumps(content, ensure_ascii=False)
    return f"Error: {text}" if block.get("is_error") is True else text


def _text(content: str | Sequence[Mapping[str, Any]] | None, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    found = []
    for j, block in enumerate(content):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind != "text":
            raise ApiError(
                f"{path}[{j}].type must be 'text', got {kind!r:.80}", param=path.split("[")[0]
            )
        found.append(_string(block, "text", f"{path}[{j}]"))
    return "\n".join(found)


def _string(block: Mapping[str, Any], name: str, path: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise ApiError(
            f"{path}.{name} must be a string, got {value!r:.80}", param=path.split("[")[0]
        )
    return value


def _strip_billing_header(text: str) -> str:
    """The system prompt without its billing line."""
    if not text.startswith(BILLING_HEADER):
        return text
    return text.partition("\n")[2].lstrip("\n")
