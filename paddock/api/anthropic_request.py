"""Anthropic's `/v1/messages`: what is asked."""

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

BILLING_HEADER = (
    "x-anthropic-billing-header:"  # differs every time, so that no prefix is ever found again
)


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
    """The same without what only a reply needs."""

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
    if body.thread is not None:  # the messages are not the whole conversation, or will not be
        what = "this server keeps none; send the conversation whole, without 'thread'"
        raise ApiError(f"thread: {what}", param="thread", code="thread_unsupported_request")
    wish, tools = _wish(body, server), _tools(body)
    user = (body.metadata or {}).get("user_id")
    top_k = defaults.top_k if body.top_k is None else body.top_k
    return ChatRequest(
        model=body.model,
        messages=parse_request_messages(list(_openai(body.system, body.messages))),
        tools=tools.shown,
        skipped_tools=tools.skipped,
        must_call=tools.must_call,
        only_tool=tools.only,
        thinking=wish.thinking,
        sampling=make_sampling_params(
            OPENAI_FIELD_NAMES | {"stop": "stop_sequences"},
            max_new_tokens=body.max_tokens,
            temperature=float(_given(body.temperature, defaults.temperature)),
            top_p=float(_given(body.top_p, defaults.top_p)),
            top_k=top_k if top_k and top_k > 0 else None,
            stop=parse_stop(body.stop_sequences),
            thinking_budget=wish.budget,
            grammar=parse_response_format(
                _format(body.output_config), where="output_config.format"
            ),
        ),
        # Clients must say how long a reply may be without knowing this model's context.
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
        messages=parse_request_messages(list(_openai(body.system, body.messages))),
        tools=tools.shown,
        skipped_tools=tools.skipped,
        must_call=tools.must_call,
        only_tool=tools.only,
        thinking=_wish(body, server).thinking,
        sampling=SamplingParams(),
    )


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


def _wish(
    body: MessagesBody | CountTokensBody, server: thinking_options.ThinkingOptions
) -> thinking_options.ThinkingOptions:
    effort = (body.output_config or {}).get("effort")
    return thinking_options.merge_thinking_options(
        thinking_options.from_template_kwargs(body.chat_template_kwargs),
        thinking_options.from_thinking_field(body.thinking),
        thinking_options.from_effort(effort, "output_config.effort"),
        server,
    )


def _format(config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    form = (config or {}).get("format")
    if form is not None and not isinstance(form, Mapping):
        raise ApiError("output_config.format: not an object", param="output_config")
    return form


@dataclass(frozen=True, slots=True)
class _Tools:
    shown: tuple[ToolSpec, ...]
    skipped: tuple[str, ...]
    must_call: bool
    only: str | None


def _tools(body: MessagesBody | CountTokensBody) -> _Tools:
    # Ours have a schema; tools that Anthropic's own servers run (web_search_...) have a type.
    plain = [
        {**tool, "type": "function"} if "input_schema" in tool else tool
        for tool in body.tools or ()
    ]
    found, skipped = parse_function_tools(plain)
    said = body.tool_choice or {}
    choices: dict[Any, str | Mapping[str, Any]] = {
        "any": "required",
        "auto": "auto",
        "none": "none",
        None: "auto",
        "tool": said,
    }
    kind = said.get("type")
    if not (kind is None or isinstance(kind, str)) or kind not in choices:
        known = "auto, any, tool, none"
        raise ApiError(f"tool_choice.type: {kind!r:.80} is none of {known}", param="tool_choice")
    shown, must_call, only = parse_tool_choice(choices[kind], found)
    return _Tools(shown, skipped, must_call, only)


# --- conversations --------------------------------------------------------------------------------


def _openai(
    system: str | Sequence[Mapping[str, Any]] | None, raw: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The same conversation in OpenAI's shape."""
    instructions = _without_billing(_text(system, "system"))
    if instructions:
        yield {"role": "system", "content": instructions}
    for i, entry in enumerate(raw):
        role, content = entry.get("role"), entry.get("content")
        if role not in ("user", "assistant", "system"):
            known = "user, assistant, system"
            raise ApiError(f"messages[{i}].role: {role!r:.80} is none of {known}", param="messages")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(b, dict) for b in blocks):
            raise ApiError(f"messages[{i}].content: neither text nor blocks", param="messages")
        if role == "assistant":
            yield _reply(blocks, f"messages[{i}].content")
        else:
            yield from _spoken(str(role), blocks, f"messages[{i}].content")


def _reply(blocks: Sequence[Mapping[str, Any]], path: str) -> dict[str, Any]:
    said: list[str] = []
    thoughts: list[str] = []
    calls = []
    for j, block in enumerate(blocks):
        match block.get("type"):
            case "text":
                said.append(_string(block, "text", f"{path}[{j}]"))
            case "thinking":
                thoughts.append(_string(block, "thinking", f"{path}[{j}]"))
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input")}
                calls.append({"id": block.get("id"), "function": function})
            case str(kind) if kind == "redacted_thinking" or "_tool_" in f"_{kind}":
                pass  # tools that other servers run: nothing in them that this model could read
            case kind:
                raise ApiError(f"{path}[{j}]: no such block: {kind!r:.80}", param="messages")
    reply: dict[str, Any] = {"role": "assistant", "content": "".join(said), "tool_calls": calls}
    if thoughts:
        reply["reasoning_content"] = "".join(thoughts)
    return reply


def _spoken(role: str, blocks: Sequence[Mapping[str, Any]], path: str) -> Iterator[dict[str, Any]]:
    """What a user says, and the tool results among it, in order."""
    said: list[str] = []
    for j, block in enumerate(blocks):
        match block.get("type"):
            case "text":
                said.append(_string(block, "text", f"{path}[{j}]"))
            case "tool_result":
                if said:
                    yield {"role": role, "content": "".join(said)}
                    said = []
                yield {
                    "role": "tool",
                    "tool_call_id": block.get("tool_use_id"),
                    "content": _result(block, f"{path}[{j}].content"),
                }
            case kind:
                raise ApiError(f"{path}[{j}]: no text but {kind!r:.80}", param="messages")
    if said or not blocks:
        yield {"role": role, "content": "".join(said)}


def _result(block: Mapping[str, Any], path: str) -> str:
    content = block.get("content")
    known = content is None or isinstance(content, str | list)
    text = _text(content, path) if known else json.dumps(content, ensure_ascii=False)
    return f"Error: {text}" if block.get("is_error") is True else text


def _text(said: str | Sequence[Mapping[str, Any]] | None, path: str) -> str:
    if said is None or isinstance(said, str):
        return said or ""
    found = []
    for j, block in enumerate(said):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind != "text":
            raise ApiError(f"{path}[{j}]: no text but {kind!r:.80}", param=path.split("[")[0])
        found.append(_string(block, "text", f"{path}[{j}]"))
    return "\n".join(found)


def _string(block: Mapping[str, Any], name: str, path: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise ApiError(f"{path}.{name}: {value!r:.80} is no text", param=path.split("[")[0])
    return value


def _without_billing(text: str) -> str:
    """Some clients put a line first that is different in every request."""
    if not text.startswith(BILLING_HEADER):
        return text
    return text.partition("\n")[2].lstrip("\n")
