import pytest

from paddock.records import Message, ToolCall
from paddock.text import parse_messages
from paddock.text.messages import MessageError, parse_tools

USER = {"role": "user", "content": "Hi"}


def one(**fields):
    (message,) = parse_messages([{"role": "assistant", **fields}])
    return message


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("Hi", "Hi"),
        (None, ""),
        ("", ""),
        ([], ""),
        ([{"type": "text", "text": "a "}, {"type": "text", "text": "b"}], "a b"),
        (["a", {"type": "output_text", "text": "b"}], "ab"),
        ("half \ud83d a pair", "half \ufffd a pair"),
    ],
)
def test_content_in_any_shape_is_one_text(content, text):
    assert one(content=content).content == text


def test_missing_content_is_empty():
    assert one() == Message(role="assistant", content="")


def test_reasoning_has_two_names():
    assert one(reasoning_content="a").reasoning == one(reasoning="a").reasoning == "a"
    assert one(reasoning_content="a", reasoning="b").reasoning == "a"
    assert one(reasoning_content=None, reasoning="b").reasoning == "b"
    assert one(reasoning_content="").reasoning == ""
    assert one(reasoning=None).reasoning is None


def test_calls_in_any_shape():
    expected = (ToolCall(id="x", name="f", arguments={"a": 1}),)
    function = {"name": "f", "arguments": '{"a": 1}'}
    assert one(tool_calls=[{"id": "x", "type": "function", "function": function}]).tool_calls == (
        expected
    )
    assert one(tool_calls=[{"id": "x", **function}]).tool_calls == expected
    assert one(tool_calls=None).tool_calls == one(tool_calls=[]).tool_calls == ()
    old = one(function_call=function).tool_calls[0]
    assert (old.name, old.arguments) == ("f", {"a": 1})


def test_broken_arguments_are_kept_as_they_are():
    (call,) = one(tool_calls=[{"function": {"name": "f", "arguments": '{"a": '}}]).tool_calls
    assert call.arguments == {"arguments": '{"a": '}


def test_results_without_an_id_match_the_calls_in_order():
    calls = [{"function": {"name": "f"}}, {"id": "mine", "function": {"name": "g"}}]
    results = [{"role": "tool", "tool_call_id": "mine"}, {"role": "function"}, {"role": "tool"}]
    reply, *answers = parse_messages([{"role": "assistant", "tool_calls": calls}, *results])
    assert [call.id for call in reply.tool_calls] == ["call_0_0", "mine"]
    assert [answer.tool_call_id for answer in answers] == ["mine", "call_0_0", "call_3"]


def test_results_may_be_any_json():
    for content, text in (({"t": 12}, '{"t": 12}'), ([1, None], "[1, null]"), (3, "3")):
        (message,) = parse_messages([{"role": "tool", "content": content}])
        assert message.content == text


def test_developer_messages_become_system_messages():
    assert parse_messages([{"role": "developer", "content": "x"}])[0].role == "system"


def test_a_client_may_send_every_field_with_every_message():
    full = {"reasoning_content": "", "reasoning": None, "tool_calls": None, "name": None}
    assert parse_messages([{**USER, **full, "tool_call_id": None}]) == parse_messages([USER])


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ("Hi", r"messages\[1\]: expected an object, got 'Hi'"),
        (
            {"content": "x"},
            r"messages\[1\]\.role: must be one of system, developer, user.* got None",
        ),
        ({"role": "pony"}, r"messages\[1\]\.role: must be one of .* got 'pony'"),
        ({"role": "user", "content": 7}, r"messages\[1\]\.content: expected text, got 7"),
        (
            {"role": "user", "content": [{"type": "image_url"}]},
            r"messages\[1\]\.content\[0\]: expected text, got image_url",
        ),
        ({"role": "user", "reasoning": "x"}, r"messages\[1\]\.reasoning: only assistant messages"),
        ({"role": "assistant", "reasoning": [1]}, r"messages\[1\]\.reasoning: expected text"),
        ({"role": "assistant", "tool_calls": "f"}, r"messages\[1\]\.tool_calls: expected a list"),
        (
            {"role": "assistant", "tool_calls": [{}]},
            r"messages\[1\]\.tool_calls\[0\]: must have a function name",
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "a", "name": "f"}] * 2},
            r"messages\[1\]\.tool_calls: ids must be unique",
        ),
    ],
)
def test_invalid_messages_are_named_with_their_position(entry, complaint):
    with pytest.raises(MessageError, match=f"^{complaint}"):
        parse_messages([USER, entry])


def test_tools_in_any_wrapper():
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    bare = {"name": "f", "description": "F.", "parameters": schema}
    theirs = {"name": "f", "description": "F.", "input_schema": schema, "cache_control": {}}
    strict = {"type": "function", "function": {**bare, "strict": True}}
    assert parse_tools([bare]) == parse_tools([strict]) == parse_tools([theirs])
    assert parse_tools(None) == parse_tools([]) == ()
    (minimal,) = parse_tools([{"name": "f", "description": None, "parameters": None}])
    assert (minimal.description, minimal.parameters) == ("", {})


@pytest.mark.parametrize(
    ("tool", "complaint"),
    [
        ("f", r"tools\[0\]: expected an object"),
        ({"type": "web_search"}, r"tools\[0\]: tool of type 'web_search' must have a name"),
        ({"name": ""}, r"tools\[0\]\.name: must not be empty"),
        ({"name": "f", "parameters": [1]}, r"tools\[0\]\.parameters: expected a JSON object"),
        ({"name": "f", "description": 3}, r"tools\[0\]\.description: expected text"),
    ],
)
def test_an_invalid_tool_is_named(tool, complaint):
    with pytest.raises(MessageError, match=f"^{complaint}"):
        parse_tools([tool])
