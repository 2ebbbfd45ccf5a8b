"""OpenAI's `/v1/responses`: what is asked, of a conversation sent whole or kept by the server."""

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

MAX_ECHO_BYTES = 1 << 20  # bytes of a field that a response repeats


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
    """What a server keeps of a response for the one that goes on from it."""

    messages: tuple[Message, ...]  # up to and with its reply, but for the instructions
    session: str  # the responses of one conversation share it


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(ChatRequest):
    echoed: Mapping[str, Any] = field(default_factory=dict)  # what the reply repeats of the request
    instructions: int = 0  # of the messages; they hold for this response only
    store: bool = False  # whether it may be gone on from

    @property
    def stored_messages(self) -> tuple[Message, ...]:
        """The messages that a later response goes on from, with the reply to come."""
        return self.messages[self.instructions :]


def parse_responses_request(
    body: ResponsesBody,
    defaults: SamplingParams,
    server: thinking_options.ThinkingOptions,
    *,
    previous: PreviousResponse | None = None,
    keeps: bool = False,
) -> ResponsesRequest:
    """`previous` is what `previous_response_id` names; `keeps` says whether the server keeps
    responses."""
    if body.previous_response_id is not None and previous is None:
        what = "this server keeps no responses; send the conversation whole"
        raise ApiError(f"previous_response_id: {what}", param="previous_response_id")
    if body.conversation is not None:
        what = "this server keeps no conversations; send it whole or use previous_response_id"
        raise ApiError(f"conversation: {what}", param="conversation")
    if body.prompt is not None:
        raise ApiError("prompt: this server keeps no prompts; send its text", param="prompt")
    if body.background:
        raise ApiError("background: this server answers at once only", param="background")
    messages, instructions = (
        parse_request_messages(list(_messages(body))),
        int(bool(body.instructions)),
    )
    if previous is not None:
        messages = (*messages[:instructions], *previous.messages, *messages[instructions:])
    store = keeps and body.store is not False
    _refuse_long_echo(body)
    wish = thinking_options.merge_thinking_options(
        thinking_options.from_template_kwargs(body.chat_template_kwargs),
        thinking_options.from_reasoning_field(body.reasoning),
        server,
    )
    found, skipped = parse_function_tools(body.tools)
    choice = body.tool_choice
    ours = ("function", "allowed_tools", None)
    if isinstance(choice, Mapping) and choice.get("type") not in ours:
        choice = "auto"  # of a tool that we skip
    tools, must, only = parse_tool_choice(choice, found)
    temperature = defaults.temperature if body.temperature is None else body.temperature
    top_p = defaults.top_p if body.top_p is None else body.top_p
    shows = "message.output_text.logprobs" in (body.include or ()) or bool(body.top_logprobs)
    return ResponsesRequest(
        model=body.model,
        messages=messages,
        instructions=instructions,
        store=store,
        tools=tools,
        skipped_tools=skipped,
        must_call=must,
        only_tool=only,
        thinking=wish.thinking,
        sampling=make_sampling_params(
            OPENAI_FIELD_NAMES | {"max_new_tokens": "max_output_tokens"},
            max_new_tokens=body.max_output_tokens,
            temperature=float(temperature),
            top_p=float(top_p),
            top_k=defaults.top_k,
            thinking_budget=wish.budget,
            grammar=parse_response_format(_format(body.text), where="text.format"),
        ),
        stream=bool(body.stream),
        session=body.prompt_cache_key or body.user or (previous.session if previous else None),
        top_logprobs=max(0, body.top_logprobs or 0) if shows else None,
        echoed={
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
        },
    )


def _refuse_long_echo(body: ResponsesBody) -> None:
    """A response repeats these, in a stream three times. The bounds of metadata are OpenAI's."""
    metadata = body.metadata or {}
    if len(metadata) > 16 or any(
        len(key) > 64 or not isinstance(value, str) or len(value) > 512
        for key, value in metadata.items()
    ):
        what = "must be at most 16 texts of 512 characters, with keys of 64"
        raise ApiError(f"metadata: {what}", param="metadata")
    for name in ("tools", "tool_choice", "text", "reasoning"):
        length = len(json_codec.json_bytes(getattr(body, name)))
        if length > MAX_ECHO_BYTES:
            raise ApiError(f"{name}: {length} bytes, more than {MAX_ECHO_BYTES}", param=name)


def _format(text: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    form = (text or {}).get("format")
    if form is not None and not isinstance(form, Mapping):
        raise ApiError("text.format: not an object", param="text")
    return form


# --- conversations --------------------------------------------------------------------------------


def _messages(body: ResponsesBody) -> Iterator[dict[str, Any]]:
    """The items in the shape of the chat API: thoughts, words and calls that follow each other are
    one reply."""
    if body.instructions:
        yield {"role": "system", "content": body.instructions}
    if isinstance(body.input, str):
        yield {"role": "user", "content": body.input}
        return
    reply: dict[str, Any] = {}
    for i, item in enumerate(body.input):
        part = _part(item, f"input[{i}]")
        if part is None:
            continue
        if part["role"] != "assistant":
            if reply:
                yield reply
            reply = {}
            yield part
        elif _follows(reply, part):
            reply = _joined(reply, part)
        else:
            yield reply
            reply = part
    if reply:
        yield reply


def _part(item: Mapping[str, Any], path: str) -> dict[str, Any] | None:
    """An item as a message; None if there is nothing in it for this model."""
    match item.get("type", "message"):
        case "message":
            return {"role": item.get("role"), "content": _content(item.get("content"), path)}
        case "reasoning":
            texts = item.get("content") or item.get("summary") or []
            thought = "".join(str(part.get("text", "")) for part in _parts(texts, path))
            return {"role": "assistant", "reasoning_content": thought} if thought else None
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id") or item.get("id"), "function": function}
            return {"role": "assistant", "tool_calls": [call]}
        case "function_call_output":
            output = item.get("output")
            if isinstance(output, list):
                output = _content(output, path)
            text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}
        case "item_reference":
            raise ApiError(f"{path}: items cannot be referred to; send the item", param="input")
    return None  # calls of tools that other servers run, and their results


def _parts(parts: object, path: str) -> Sequence[Mapping[str, Any]]:
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise ApiError(f"{path}.content: neither text nor parts", param="input")
    return parts


def _content(content: object, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    found = []
    for j, part in enumerate(_parts(content, path)):
        kind = part.get("type")
        if kind == "refusal":
            continue
        text = part.get("text")
        if kind not in ("input_text", "output_text", "text") or not isinstance(text, str):
            raise ApiError(f"{path}.content[{j}]: no text but {kind!r:.80}", param="input")
        found.append(text)
    return "".join(found)


def _follows(reply: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    """Whether `part` goes on with the reply. Thoughts begin another, so do words after calls."""
    if not reply:
        return True
    if "reasoning_content" in part:
        return "content" not in reply and "tool_calls" not in reply
    return "content" not in part or "tool_calls" not in reply


def _joined(reply: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(reply)
    for key, value in part.items():
        found[key] = found[key] + value if key in found and key != "role" else value
    return found
