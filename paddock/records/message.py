"""Chat messages, tool calls and tool specifications."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from paddock.records.json_codec import JsonObject, check_json_object

Role = Literal["system", "user", "assistant", "tool"]
_ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call of the assistant; the tool message with this `tool_call_id` is its result."""

    id: str
    name: str
    arguments: JsonObject = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("id: must not be empty: a tool message refers to it")
        if not self.name:
            raise ValueError("name: must not be empty")
        # Copied: the caller may change its dict later.
        object.__setattr__(self, "arguments", check_json_object(self.arguments, "arguments"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool as described to the model; `parameters` is a JSON schema whose key order is kept."""

    name: str
    description: str
    parameters: JsonObject

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name: must not be empty")
        object.__setattr__(self, "parameters", check_json_object(self.parameters, "parameters"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation. Empty content is "", never None.

    >>> call = ToolCall(id="call_1", name="get_weather", arguments={"city": "Oslo"})
    >>> asking = Message(role="assistant", content="", reasoning="Look up.", tool_calls=(call,))
    >>> result = Message(role="tool", content="12 C", tool_call_id=asking.tool_calls[0].id)
    >>> Message(role="user", content="Hi", tool_calls=(call,))
    Traceback (most recent call last):
    ValueError: tool_calls: only assistant messages may have tool calls
    """

    role: Role
    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None  # of the call that a tool message is the result of

    def __post_init__(self) -> None:
        if self.role not in _ROLES:
            raise ValueError(f"role: must be one of {', '.join(_ROLES)}, got {self.role!r}")
        if self.role != "assistant" and self.reasoning is not None:
            raise ValueError("reasoning: only assistant messages may have reasoning")
        if self.role != "assistant" and self.tool_calls:
            raise ValueError("tool_calls: only assistant messages may have tool calls")
        if self.tool_calls and len({call.id for call in self.tool_calls}) < len(self.tool_calls):
            raise ValueError("tool_calls: ids must be unique")
        if (self.role == "tool") != bool(self.tool_call_id):
            raise ValueError("tool_call_id: a tool message has one, no other message may")
