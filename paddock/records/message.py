"""What people, models and tools say to each other."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from paddock.records.json_codec import JsonObject, check_json_object

Role = Literal["system", "user", "assistant", "tool"]
_ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """An assistant's wish to run a tool; the tool's message answers to `id`."""

    id: str
    name: str
    arguments: JsonObject = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("id: empty, so no tool message could answer it")
        if not self.name:
            raise ValueError("name: empty")
        # Our own copy: what the caller does to its dict later must not reach the record.
        object.__setattr__(self, "arguments", check_json_object(self.arguments, "arguments"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool as the model is told of it; `parameters` is a JSON schema, its keys in given order."""

    name: str
    description: str
    parameters: JsonObject

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name: empty")
        object.__setattr__(self, "parameters", check_json_object(self.parameters, "parameters"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One entry of a conversation. Nothing said is "", never None.

    >>> call = ToolCall(id="call_1", name="get_weather", arguments={"city": "Oslo"})
    >>> ask = Message(role="assistant", content="", reasoning="Need the tool.", tool_calls=(call,))
    >>> answer = Message(role="tool", content="12 C", tool_call_id=ask.tool_calls[0].id)
    >>> Message(role="user", content="Hi", tool_calls=(call,))
    Traceback (most recent call last):
    ValueError: tool_calls: only the assistant calls tools
    """

    role: Role
    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None  # of the call a tool message answers

    def __post_init__(self) -> None:
        if self.role not in _ROLES:
            raise ValueError(f"role: {self.role!r} is none of {', '.join(_ROLES)}")
        if self.role != "assistant" and self.reasoning is not None:
            raise ValueError("reasoning: only the assistant thinks aloud")
        if self.role != "assistant" and self.tool_calls:
            raise ValueError("tool_calls: only the assistant calls tools")
        if self.tool_calls and len({call.id for call in self.tool_calls}) < len(self.tool_calls):
            raise ValueError("tool_calls: two have the same id")
        if (self.role == "tool") != bool(self.tool_call_id):
            raise ValueError("tool_call_id: a tool message has one, no other message may")
