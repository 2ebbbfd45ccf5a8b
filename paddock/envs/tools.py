"""Tools that an environment provides to the policy."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paddock.envs.json_schema import find_violation
from paddock.records import Message, ToolCall, ToolSpec, json_codec

ToolFunc = Callable[..., Awaitable[str]]


class ToolError(Exception):
    """An invalid call; the model reads the message and continues."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool spec and its function. `run` takes the arguments by name and returns the result text.
    It raises `ToolError` for an invalid call; any other exception is an environment failure."""

    spec: ToolSpec
    run: ToolFunc


async def execute_tool_calls(tools: Sequence[Tool], reply: Message) -> tuple[Message, ...]:
    """One result per tool call of a reply, in order; an invalid call gets an error message."""
    by_name = {tool.spec.name: tool for tool in tools}
    return tuple([await _execute(by_name, call) for call in reply.tool_calls])


async def _execute(tools: Mapping[str, Tool], call: ToolCall) -> Message:
    try:
        tool = tools.get(call.name)
        if tool is None:
            raise ToolError(f"there is no tool {call.name!r}; there are {', '.join(tools)}")
        result: object = await tool.run(**validate_arguments(call.arguments, tool.spec))
    except ToolError as error:
        result = f"error: {error}"
    if not isinstance(result, str):
        raise TypeError(f"{call.name} must return a string, got {result!r:.80}")
    return Message(role="tool", content=result, tool_call_id=call.id)


def validate_arguments(arguments: json_codec.JsonObject, spec: ToolSpec) -> dict[str, Any]:
    """The arguments, validated against the tool's schema: all required ones, no unknown ones, each
    valid under its own schema.

    >>> spec = ToolSpec(name="look", description="", parameters={"type": "object",
    ...     "properties": {"key": {"type": "string"}}, "required": ["key"]})
    >>> validate_arguments({"key": "oak"}, spec)
    {'key': 'oak'}
    >>> validate_arguments({"keys": "oak"}, spec)
    Traceback (most recent call last):
    paddock.envs.tools.ToolError: look: unknown argument 'keys'; it takes key
    """
    known = spec.parameters.get("properties", {})
    if not isinstance(known, dict):
        raise TypeError(f"{spec.name}: 'properties' of its schema must be an object")
    for name in arguments:
        if name not in known:
            takes = ", ".join(known) or "none"
            raise ToolError(f"{spec.name}: unknown argument {name!r}; it takes {takes}")
    required = spec.parameters.get("required", [])
    for name in required if isinstance(required, list) else []:
        if name not in arguments:
            raise ToolError(f"{spec.name}: argument {name!r} is missing")
    for name, value in arguments.items():
        wrong = find_violation(value, known[name], f"{spec.name}: argument {name!r}")
        if wrong:
            raise ToolError(wrong)
    return dict(arguments)
