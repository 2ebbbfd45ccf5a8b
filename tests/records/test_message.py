import pytest

from paddock.records import Message, ToolCall, ToolSpec

CALL = ToolCall(id="call_1", name="add", arguments={"a": 1, "b": [2, {"c": None}]})


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("role", {"role": "robot"}),
        ("reasoning", {"role": "user", "reasoning": "hm"}),
        ("tool_calls", {"role": "tool", "tool_calls": (CALL,), "tool_call_id": "call_1"}),
        ("tool_calls", {"role": "assistant", "tool_calls": (CALL, CALL)}),
        ("tool_call_id", {"role": "tool"}),
        ("tool_call_id", {"role": "user", "tool_call_id": "call_1"}),
    ],
)
def test_an_invalid_message_is_rejected_by_the_name_of_its_field(field, given):
    with pytest.raises(ValueError, match=f"^{field}: "):
        Message(**{"content": "", **given})


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("id", {"id": ""}),
        ("name", {"name": ""}),
        ("arguments", {"arguments": "{}"}),
        (r"arguments\.x", {"arguments": {"x": float("nan")}}),
        (r"arguments\.x\[1\]", {"arguments": {"x": [0, {1, 2}]}}),
        ("arguments", {"arguments": {1: "x"}}),
    ],
)
def test_a_tool_call_has_a_name_and_json_arguments(field, given):
    with pytest.raises(ValueError, match=f"^{field}: "):
        ToolCall(**{"id": "call_1", "name": "add", **given})


def test_changing_the_dict_a_call_was_made_from_does_not_change_the_call():
    arguments = {"city": "Oslo", "days": [1]}
    call = ToolCall(id="call_1", name="weather", arguments=arguments)
    arguments["days"].append(2)
    arguments.clear()
    assert call.arguments == {"city": "Oslo", "days": [1]}


def test_a_schema_keeps_the_order_of_its_keys():
    schema = {"type": "object", "properties": {"z": {}, "a": {}}, "required": ["z"]}
    spec = ToolSpec(name="f", description="", parameters=schema)
    assert list(spec.parameters["properties"]) == ["z", "a"]
