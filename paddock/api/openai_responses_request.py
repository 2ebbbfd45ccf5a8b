"""OpenAI Responses (`/v1/responses`): request bodies, stateless or with a stored conversation."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
)
from paddock.records import ApiError, Message, SamplingParams, json_codec

MAX_ECHO_BYTES = 1 << 20  # of a request field that the response repeats


class ResponsesBody(RequestBody):
    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviousResponse:
    """What a server stores of a response for `previous_response_id`."""

    messages: tuple[Message, ...]  # including the response, without the instructions
    session: str  # shared by all responses of one conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(ChatRequest):
    echoed: Mapping[str, Any] = field(
        default_factory=dict
    )  # request fields that the response repeats
    # Functions of namespaces: their name in the prompt, to the namespace and their own name in it.
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    instructions: int = 0  # number of leading messages that hold for this response only
    store: bool = False  # whether the response is stored

    @property
    def stored_messages(self) -> tuple[Message, ...]:
        """The messages to store together with the response."""
        return self.messages[self.instructions :]


def parse_responses_request(
    body: ResponsesBody,
    defaults: SamplingParams,
    server: thinking_options.ThinkingOptions,
    *,
    previous: PreviousResponse | None = None,
    store_enabled: bool = False,
) -> ResponsesRequest:
    """The request of a Responses body. Raises ApiError naming the field at fault.

    `previous` is the stored response that `previous_response_id` names; `store_enabled` tells
    whether the server stores responses.
    """
    _check_supported(body, previous)
    messages = parse_request_messages(list(_messages(body)))
    instructions = int(bool(body.instructions))
    if previous is not None:
        messages = (*messages[:instructions], *previous.messages, *messages[instructions:])
    store = store_enabled and body.store is not False
    _check_echoed_size(body)
    options = thinking_options.merge_thinking_options(
        thinking_options.from_template_kwargs(body.chat_template_kwargs),
        thinking_options.from_reasoning_field(body.reasoning),
        server,
    )
    flat_tools, namespaces = _flatten_namespaces(body.tools or ())
    all_tools, skipped = parse_function_tools(flat_tools)
    choice = body.tool_choice
    supported = ("function", "allowed_tools", None)
    if isinstance(choice, Mapping) and choice.get("type") not in supported:
        choice = "auto"  # a forced tool that this server skips
    tools, must, only = parse_tool_choice(choice, all_tools)
    temperature = defaults.temperature if body.temperature is None else body.temperature
    top_p = defaults.top_p if body.top_p is None else body.top_p
    with_logprobs = "message.output_text.logprobs" in (body.include or ()) or bool(
        body.top_logprobs
    )
    return ResponsesRequest(
        model=body.model,
        messages=messages,
        namespaces=namespaces,
        instructions=instructions,
        store=store,
        tools=tools,
        skipped_tools=skipped,
        must_call=must,
        only_tool=only,
        thinking=options.thinking,
        sampling=make_sampling_params(
            OPENAI_FIELD_NAMES | {"max_new_tokens": "max_output_tokens"},
            max_new_tokens=body.max_output_tokens,
            temperature=float(temperature),
            top_p=float(top_p),
            top_k=defaults.top_k,
            thinking_budget=options.budget,
            grammar=parse_response_format(_response_format(body.text), path="text.format"),
        ),
        stream=bool(body.stream),
        session=body.prompt_cache_key or body.user or (previous.session if previous else None),
        top_logprobs=max(0, body.top_logprobs or 0) if with_logprobs else None,
        echoed=_echoed_fields(body, store=store, temperature=temperature, top_p=top_p),
    )


def _check_supported(body: ResponsesBody, previous: PreviousResponse | None) -> None:
    if body.previous_response_id is not None and previous is None:
        what = "this server stores no responses; send the whole conversation"
        raise ApiError(f"previous_response_id: {what}", param="previous_response_id")
    if body.conversation is not None:
        what = "this server stores no conversations; send all items or use previous_response_id"
        raise ApiError(f"conversation: {what}", param="conversation")
    if body.prompt is not None:
        raise ApiError(
            "prompt: this server stores no prompts; send the text as input", param="prompt"
        )
    if body.background:
        raise ApiError("background responses are not supported", param="background")


def _echoed_fields(
    body: ResponsesBody, *, store: bool, temperature: float, top_p: float
) -> dict[str, Any]:
    """The request fields that every response repeats, defaults filled in."""
    return {
        "previous_response_id": body.previous_response_id,
        "store": store,
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "temperature": temperature,
        "top_p": top_p,
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "max_output_tokens": body.max_output_tokens,
        "reasoning": body.reasoning,
        "text": body.text or {"format": {"type": "text"}},
    }


def _check_echoed_size(body: ResponsesBody) -> None:
    """A response repeats these fields, a stream three times. Metadata limits are OpenAI's."""
    metadata = body.metadata or {}
    if len(metadata) > 16 or any(
        len(key) > 64 or not isinstance(value, str) or len(value) > 512
        for key, value in metadata.items()
    ):
        what = "must have at most 16 strings of 512 characters, with keys of 64"
        raise ApiError(f"metadata: {what}", param="metadata")
    for name in ("tools", "tool_choice", "text", "reasoning"):
        length = len(json_codec.json_bytes(getattr(body, name)))
        if length > MAX_ECHO_BYTES:
            raise ApiError(
                f"{name}: {length} bytes, at most {MAX_ECHO_BYTES} are allowed", param=name
            )


def _flatten_namespaces(
    tools: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], dict[str, tuple[str, str]]]:
    """The tools with those of namespaces among them, and what those are called there."""
    flat: list[Mapping[str, Any]] = []
    namespaces = {}
    for tool in tools:
        if tool.get("type") != "namespace":
            flat.append(tool)
            continue
        inner = tool.get("tools")
        if not isinstance(inner, list) or not all(isinstance(each, Mapping) for each in inner):
            raise ApiError("tools: a namespace must have a list of tools", param="tools")
        for each in inner:
            name = _flat_name(tool.get("name"), each.get("name"))
            flat.append({**each, "name": name})
            namespaces[name] = (str(tool.get("name")), str(each.get("name")))
    return flat, namespaces


def _flat_name(namespace: object, name: Any) -> Any:
    """The name of a function in the prompt.

    >>> _flat_name(None, "find"), _flat_name("mcp__web__", "find"), _flat_name("agents", "spawn")
    ('find', 'mcp__web__find', 'agents__spawn')
    """
    return name if namespace is None else f"{str(namespace).removesuffix('__')}__{name}"


def _response_format(text: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    response_format = (text or {}).get("format")
    if response_format is not None and not isinstance(response_format, Mapping):
        raise ApiError("text.format must be an object", param="text")
    return response_format


# --- conversations --------------------------------------------------------------------------------


def _messages(body: ResponsesBody) -> Iterator[dict[str, Any]]:
    """The input items as chat messages. Consecutive reasoning, text and function calls form one
    assistant message."""
    if body.instructions:
        yield {"role": "system", "content": body.instructions}
    if isinstance(body.input, str):
        yield {"role": "user", "content": body.input}
        return
    message: dict[str, Any] = {}
    for i, item in enumerate(body.input):
        part = _message_part(item, f"input[{i}]")
        if part is None:
            continue
        if part["role"] != "assistant":
            if message:
                yield message
            message = {}
            yield part
        elif _follows(message, part):
            message = _merged(message, part)
        else:
            yield message
            message = part
    if message:
        yield message


def _message_part(item: Mapping[str, Any], path: str) -> dict[str, Any] | None:
    """An item as a partial message; None if this model cannot read it."""
    match item.get("type", "message"):
        case "message":
            return {"role": item.get("role"), "content": _content(item.get("content"), path)}
        case "reasoning":
            texts = item.get("content") or item.get("summary") or []
            thought = "".join(str(part.get("text", "")) for part in _parts(texts, path))
            return {"role": "assistant", "reasoning_content": thought} if thought else None
        case "function_call":
            name = _flat_name(item.get("namespace"), item.get("name"))
            function = {"name": name, "arguments": item.get("arguments")}
            call = {"id": item.get("call_id") or item.get("id"), "function": function}
            return {"role": "assistant", "tool_calls": [call]}
        case "function_call_output":
            output = item.get("output")
            if isinstance(output, list):
                output = _content(output, path)
            text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}
        case "item_reference":
            raise ApiError(f"{path}: item_reference is not supported; send the item", param="input")
    return None  # calls of server tools and their results


def _parts(parts: object, path: str) -> Sequence[Mapping[str, Any]]:
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise ApiError(f"{path}.content must be a string or a list of parts", param="input")
    return parts


def _content(content: object, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for j, part in enumerate(_parts(content, path)):
        kind = part.get("type")
        if kind == "refusal":
            continue
        text = part.get("text")
        if kind not in ("input_text", "output_text", "text") or not isinstance(text, str):
            raise ApiError(f"{path}.content[{j}] must be text, got {kind!r:.80}", param="input")
        texts.append(text)
    return "".join(texts)


def _follows(message: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    """Whether `part` continues the assistant message. Reasoning after content or calls starts a new
    one, and so does content after calls."""
    if not message:
        return True
    if "reasoning_content" in part:
        return "content" not in message and "tool_calls" not in message
    return "content" not in part or "tool_calls" not in message


def _merged(message: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(message)
    for key, value in part.items():
        merged[key] = merged[key] + value if key in merged and key != "role" else value
    return merged
