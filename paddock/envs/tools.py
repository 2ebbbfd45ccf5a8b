"""Tools that a world lends to whoever plays in it."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paddock.envs.json_schema import find_violation
from paddock.records import Message, ToolCall, ToolSpec, json_codec

ToolFunc = Callable[..., Awaitable[str]]


class ToolError(Exception):
    """What a caller did wrong, in words for the caller: the model reads them and goes on."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool: what the model is told of it, and what it does. `run` takes the arguments by name and
    returns what the model reads. It raises `ToolRefused` for a wrong call; any other exception
    means that the world is broken."""

    spec: ToolSpec
    run: ToolFunc


async def execute_tool_calls(tools: Sequence[Tool], reply: Message) -> tuple[Message, ...]:
    """A result for each call of a reply, in order; a wrong call gets an error that says how."""
    by_name = {tool.spec.name: tool for tool in tools}
    return tuple([await _answer(by_name, call) for call in reply.tool_calls])


async def _answer(tools: Mapping[str, Tool], call: ToolCall) -> Message:
    try:
        tool = tools.get(call.name)
        if tool is None:
            raise ToolError(f"there is no tool {call.name!r}; there are {', '.join(tools)}")
        said: object = await tool.run(**validate_arguments(call.arguments, tool.spec))
    except ToolError as error:
        said = f"error: {error}"
    if not isinstance(said, str):
        raise TypeError(f"{call.name} gave {said!r:.80}, not text")
    return Message(role="tool", content=said, tool_call_id=call.id)


def validate_arguments(arguments: json_codec.JsonObject, spec: ToolSpec) -> dict[str, Any]:
    """The arguments, if they are what the tool's schema asks for: all that it requires, none that
    it does not know, each as its own schema says.

    >>> spec = ToolSpec(name="look", description="", parameters={"type": "object",
    ...     "properties": {"key": {"type": "string"}}, "required": ["key"]})
    >>> validate_arguments({"key": "oak"}, spec)
    {'key': 'oak'}
    >>> validate_arguments({"keys": "oak"}, spec)
    Traceback (most recent call last):
    paddock.envs.tools.ToolRefused: look: unknown argument 'keys'; it takes key
    """
    known = spec.parameters.get("properties", {})
    if not isinstance(known, dict):
        raise TypeError(f"{spec.name}: its schema's properties are no object")
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
