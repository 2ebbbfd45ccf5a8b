"""Chat messages and tools as the OpenAI API writes them."""

import json
from collections.abc import Callable
from typing import Any

from paddock.records import Message, ToolCall, ToolSpec


def message_to_json(message: Message, *, parsed_arguments: bool = False) -> dict[str, Any]:
    """A message; `message_from_json` reads it back. With `parsed_arguments` arguments are objects,
    as in chat templates."""
    write: Callable[[Any], object] = dict if parsed_arguments else json.dumps
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": write(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    return found


def message_from_json(value: dict[str, Any]) -> Message:
    """A message of a request. ValueError for what a text model cannot read.

    >>> message_from_json({"role": "user", "content": [{"type": "text", "text": "Hi"}]}).content
    'Hi'
    """
    calls = tuple(
        ToolCall(
            id=call["id"],
            name=call["function"]["name"],
            arguments=json.loads(call["function"]["arguments"] or "{}"),
        )
        for call in value.get("tool_calls") or ()
    )
    role = value["role"]
    return Message(
        role="system" if role == "developer" else role,
        content=_text(value.get("content")),
        reasoning=value.get("reasoning_content") if role == "assistant" else None,
        tool_calls=calls,
        tool_call_id=value.get("tool_call_id") if role == "tool" else None,
    )


def tool_from_json(value: dict[str, Any]) -> ToolSpec:
    function = value["function"]
    return ToolSpec(
        name=function["name"],
        description=function.get("description") or "",
        parameters=function.get("parameters") or {"type": "object", "properties": {}},
    )


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if other := [part["type"] for part in content if part["type"] != "text"]:
        raise ValueError(f"a message has a part of type {other[0]!r}; only text is supported")
    return "".join(part["text"] for part in content)
