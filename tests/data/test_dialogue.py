"""Dialogues as JSON lines: accepted formats and errors."""

import gzip
import json
import re

import pytest

from paddock.data import dialogue_to_json
from paddock.data.dialogue import parse_dialogue, read_dialogues
from paddock.data.sources import DataError
from paddock.records import Dialogue, LossMaskSpan, Message, ToolCall, ToolSpec

LOOK = ToolSpec(name="look", description="Look.", parameters={"type": "object"})
CALL = ToolCall(id="c1", name="look", arguments={"far": 2, "why": "é"})
WHOLE = Dialogue(
    messages=(
        Message(role="system", content="Be brief."),
        Message(role="user", content="Up?"),
        Message(role="assistant", content="", reasoning="Hm, down. No, up.", tool_calls=(CALL,)),
        Message(role="tool", content="sky", tool_call_id="c1"),
        Message(role="assistant", content="Sky."),
    ),
    tools=(LOOK,),
    thinking="preserved",
    untrained=(LossMaskSpan(message=2, part="reasoning", start=0, end=9), LossMaskSpan(message=4)),
    weight=0.25,
    id="a/1",
    source="by hand",
)


def lines(tmp_path, *entries, name="d.jsonl"):
    text = "".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in entries)
    (tmp_path / name).write_text(text)
    return tmp_path / name


def chat(*contents, **more):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"messages": messages, **more}


def test_written_dialogues_are_read_back(tmp_path):
    assert list(read_dialogues(lines(tmp_path, dialogue_to_json(WHOLE)))) == [WHOLE]
    arguments = dialogue_to_json(WHOLE)["messages"][2]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == {"far": 2, "why": "é"}  # text, as in OpenAI's format


def test_openai_shapes_as_they_come():
    found = parse_dialogue(
        {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
                {"role": "user", "content": "Up?"},
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning_content": "Hm.",
                    "tool_calls": [{"function": {"name": "look", "arguments": '{"far": 2}'}}],
                },
                {"role": "tool", "content": "sky"},
                {"role": "assistant", "content": "<think>\nSo.\n</think>\n\nSky.", "weight": 0},
            ],
            "tools": [{"type": "function", "function": {"name": "look"}}],
            "note": "people keep notes",
        }
    )
    assert [m.role for m in found.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert found.messages[2].tool_calls[0].arguments == {"far": 2}
    assert found.messages[2].tool_calls[0].id == found.messages[3].tool_call_id
    assert (found.messages[4].reasoning, found.messages[4].content) == ("So.", "Sky.")
    assert found.untrained == (LossMaskSpan(message=4),)
    assert (found.thinking, found.weight, found.tools[0].name) == ("interleaved", 1.0, "look")


def test_sharegpt_with_tools():
    found = parse_dialogue(
        {
            "system": "Be brief.",
            "tools": json.dumps([{"name": "look", "parameters": {"type": "object"}}]),
            "conversations": [
                {"from": "human", "value": "Up?"},
                {
                    "from": "function_call",
                    "value": '<think>Hm.</think>{"name": "look", "arguments": {"far": 2}}',
                },
                {"from": "observation", "value": "sky"},
                {"from": "gpt", "value": "Sky."},
            ],
        }
    )
    assert [m.role for m in found.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert found.messages[2].reasoning == "Hm."
    assert found.messages[2].tool_calls[0].arguments == {"far": 2}
    assert found.tools[0].parameters == {"type": "object"}


def test_compressed_files_and_empty_lines(tmp_path):
    text = json.dumps(chat("a", "b")) + "\n\n" + json.dumps(chat("c", "d")) + "\n"
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    found = list(read_dialogues(tmp_path / "d.jsonl.gz", thinking="off"))
    assert [d.messages[0].content for d in found] == ["a", "c"]
    assert [d.id.rsplit(":", 1)[1] for d in found] == ["1", "3"]
    assert {d.thinking for d in found} == {"off"}


@pytest.mark.parametrize(
    "harm", [lambda b: b[:-9], lambda b: b[:10] + b"\xff" + b[11:], lambda _: b"{}"]
)
def test_a_corrupt_compressed_file_is_named(tmp_path, harm):
    packed = gzip.compress(json.dumps(chat("a", "b")).encode())
    (tmp_path / "d.jsonl.gz").write_bytes(harm(packed))
    with pytest.raises(DataError, match=r"d\.jsonl\.gz: truncated or damaged: "):
        list(read_dialogues(tmp_path / "d.jsonl.gz"))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"messages": [', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "expected an object, got [1]"),
        ({"prompt": "a"}, "expected a list 'messages' (OpenAI) or 'conversations' (ShareGPT)"),
        (chat("a"), "messages: none of 1 comes from the assistant"),
        (
            {"messages": [{"role": "boss", "content": "a"}]},
            "messages[0].role: must be one of system, developer, user, assistant, tool, function,"
            " got 'boss'",
        ),
        (chat("a", 7), "messages[1].content: expected text, got 7"),
        (
            chat("a", "b", thinking="hard"),
            "thinking: must be one of interleaved, preserved, turns, off, got 'hard'",
        ),
        (chat("a", "b", weight="much"), "weight: expected a number, got 'much'"),
        (chat("a", "b", weight=-1), "weight: must be finite and at least 0, got -1.0"),
        (chat("a", "b", tools="[{"), "tools: not valid JSON"),
        (chat("a", "b", tools=[{"type": "web"}]), "tools[0]: tool of type 'web'"),
        (
            {"conversations": [{"from": "who", "value": "a"}]},
            "conversations[0].from must be one of",
        ),
        ({"conversations": [{"from": "gpt"}]}, "conversations[0].value: expected a string"),
    ],
)
def test_an_invalid_line_is_named_with_file_line_and_field(tmp_path, line, complaint):
    file = lines(tmp_path, chat("a", "b"), line)
    with pytest.raises(DataError, match=re.escape(f"{file}:2: {complaint}")):
        list(read_dialogues(file))


@pytest.mark.parametrize(
    ("mark", "complaint"),
    [
        ("yes", "messages[1].untrained: expected true or a list of spans"),
        ([3], "messages[1].untrained[0]: expected an object"),
        ([{"part": "soul"}], "messages[1].untrained[0]: LossMaskSpan.part: expected one of"),
        (
            [{"part": "content", "form": 1}],
            "messages[1].untrained[0]: LossMaskSpan.form: unknown key",
        ),
        ([{"part": "content", "start": 0, "end": 99}], "untrained[0]: ends at 99"),
    ],
)
def test_an_invalid_loss_mask_span_is_named(tmp_path, mark, complaint):
    entry = chat("a", "b")
    entry["messages"][1]["untrained"] = mark
    with pytest.raises(DataError, match=re.escape(complaint)):
        list(read_dialogues(lines(tmp_path, entry)))


def test_a_content_span_over_inline_reasoning_is_rejected():
    entry = chat("a", "<think>b</think>c")
    entry["messages"][1]["untrained"] = [{"part": "content", "start": 0, "end": 1}]
    with pytest.raises(ValueError, match="give the reasoning as reasoning_content"):
        parse_dialogue(entry)
