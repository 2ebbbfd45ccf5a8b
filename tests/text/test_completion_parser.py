import json
from dataclasses import replace
from itertools import chain
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paddock.records import Message, ToolSpec
from paddock.text import (
    CompletionParser,
    SpecialToken,
    ThinkingKwargs,
    Tokenizer,
    parse_completion,
    parse_messages,
)
from paddock.text.chat_template import GLM_VERSIONS
from paddock.text.glm_renderer import GlmRenderer
from paddock.text.messages import parse_tools
from paddock.text.parse_events import (
    ContentDelta,
    ReasoningDelta,
    ReasoningRetraction,
    ToolCallArgumentsDelta,
    ToolCallDiscard,
    ToolCallEnd,
    ToolCallStart,
)
from tests.data.tiny import byte_tokenizer
from tests.text.conversations import MARKERS, TOOLS, WORDS, conversation
from tests.text.test_tokenizer import word_tokenizer

TOKENIZER = byte_tokenizer()
SPECS = parse_tools(TOOLS)
OPEN = TOKENIZER.encode("<|user|>Hi<|assistant|><think>", specials=True)
SHUT = TOKENIZER.encode("<|user|>Hi<|assistant|></think>", specials=True)


def ids(text):
    return TOKENIZER.encode(text, specials=True)


def read(text, prompt=OPEN, finish="stop", tools=SPECS):
    return parse_completion(TOKENIZER, ids(text), finish=finish, tools=tools, prompt=prompt)


def calls(parsed):
    return [(call.name, dict(call.arguments)) for call in parsed.message.tool_calls]


def call(name, **arguments):
    pairs = (f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in arguments.items())
    return f"<tool_call>{name}{''.join(pairs)}</tool_call>"


# --- reasoning and content ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "text", "finish", "reasoning", "content"),
    [
        (OPEN, "Hm.</think>Yes.<|user|>", "stop", "Hm.", "Yes."),
        (OPEN, "</think>Yes.<|user|>", "stop", None, "Yes."),
        (SHUT, "Yes.<|user|>", "stop", None, "Yes."),
        (SHUT, "</think>Yes.<|user|>", "stop", None, "Yes."),
        (SHUT, "<think>Hm.</think>Yes.<|user|>", "stop", "Hm.", "Yes."),
        (OPEN, "<think>Hm.</think>Yes.<|user|>", "stop", "Hm.", "Yes."),
        ([*OPEN, *ids("Let me")], " see.</think>Yes.", "stop", " see.", "Yes."),
        ([*SHUT, *ids("The")], " answer.", "length", None, " answer."),
        ([], "Once upon a time", "length", None, "Once upon a time"),
        # Stopped without </think>: it was the answer. Truncated: it was not.
        (OPEN, "Yes.<|user|>", "stop", None, "Yes."),
        (OPEN, "Yes.<|endoftext|>", "stop", None, "Yes."),
        (OPEN, "Let me think about", "length", "Let me think about", ""),
        (OPEN, "Let me think about", "abort", "Let me think about", ""),
        (OPEN, "A.</think>B.<think>C.<|user|>", "stop", "A.", "B.C."),
        # Whitespace is kept.
        (OPEN, "\nHm. \n</think>\n\nYes. <|user|>", "stop", "\nHm. \n", "\n\nYes. "),
        (OPEN, "<|user|>", "stop", None, ""),
        (OPEN, "", "length", None, ""),
    ],
)
def test_reasoning_and_content(prompt, text, finish, reasoning, content):
    parsed = read(text, prompt, finish)
    assert (parsed.message.reasoning, parsed.message.content) == (reasoning, content)


def test_tokens_of_reasoning_are_counted_with_what_closes_it():
    thought = ids("Hm, well.</think>")
    assert read("Hm, well.</think>Yes.<|user|>").reasoning_tokens == len(thought)
    assert read("Yes.", SHUT).reasoning_tokens == 0
    assert read("All an answer.<|user|>").reasoning_tokens == 0
    assert read("Cut sho", finish="length").reasoning_tokens == len(ids("Cut sho"))
    text_before_call = f"Hm, well.{call('now')}"
    assert read(text_before_call).reasoning_tokens == len(thought) - 1


def test_a_family_without_markers_only_has_content():
    config = json.loads(TOKENIZER.files["tokenizer.json"])
    config["added_tokens"] = [t for t in config["added_tokens"] if t["content"] == "<|endoftext|>"]
    bare = Tokenizer({"tokenizer.json": json.dumps(config).encode()})
    text = "<think>Hm.</think><tool_call>now</tool_call>"
    tokens = [*bare.encode(text, specials=True), bare.special_token_ids[SpecialToken.ENDOFTEXT]]
    parsed = parse_completion(
        bare, tokens, finish="stop", prompt=bare.encode("<think>", specials=True)
    )
    assert parsed.message == Message(role="assistant", content=text)


# --- calls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        (f"Hm.</think>Now.{call('now')}<|observation|>", "Now.", [("now", {})]),
        (f"Hm.{call('now')}", "", [("now", {})]),  # a call ends reasoning
        ("</think><tool_call>\n now \n</tool_call>", "", [("now", {})]),
        (
            f"</think>{call('get_weather', city='Oslo', days='2')}\n\n{call('now')}\n",
            "",
            [("get_weather", {"city": "Oslo", "days": 2}), ("now", {})],
        ),
        (
            "</think><tool_call>get_weather\n<arg_key> city </arg_key>\n<arg_value> 12\n"
            "</arg_value>\n</tool_call> Done.",
            " Done.",
            [("get_weather", {"city": " 12\n"})],  # text stays as it is
        ),
        (
            f"</think>{call('get_weather', city='null', near='null', sure='True', tags='[1]')}",
            "",
            [("get_weather", {"city": "null", "near": None, "sure": True, "tags": [1]})],
        ),
        (
            "</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>a <tool_call>b"
            "</tool_call><think></arg_value></tool_call>",  # only </arg_value> ends a value
            "",
            [("get_weather", {"city": "a <tool_call>b</tool_call><think>"})],
        ),
        (
            '</think><tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>',
            "",
            [("get_weather", {"city": "Oslo"})],
        ),
    ],
)
def test_calls(text, content, expected):
    parsed = read(text)
    assert (calls(parsed), parsed.message.content) == (expected, content)
    assert parsed.notes == ()


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (call("fly", to="the moon"), "tool call of unknown tool 'fly'"),
        (call(""), "tool call of unknown tool ''"),
        (
            "<tool_call>bash\n<arg_value>ls</arg_value></tool_call>",
            "misplaced <arg_value>",
        ),
        ("<tool_call>now<arg_key>a</arg_key></tool_call>", "misplaced </tool_call>"),
        ("<tool_call>now<arg_key>a</tool_call>", "misplaced </tool_call>"),
        ("<tool_call>now</think>", "misplaced </think>"),
        ("<tool_call>no", "unfinished tool call"),
        ("<tool_call>now", "unfinished tool call"),
        ("<tool_call>now<arg_key>a</arg_key><arg_value>rm -rf /tmp", "unfinished tool call"),
        ('<tool_call>{"name": 3}</tool_call>', "tool call of unknown tool"),
    ],
)
def test_a_malformed_call_stays_as_text_with_a_note(text, note):
    parsed = read(f"Hm.</think>So: {text}", finish="length")
    assert calls(parsed) == []
    assert parsed.message.content == f"So: {text}".replace("</think>", "")
    assert any(note in each for each in parsed.notes)


def test_a_call_inside_a_malformed_one_is_parsed():
    parsed = read(f"</think><tool_call>oops {call('now')}")
    assert calls(parsed) == [("now", {})]
    assert parsed.message.content == "<tool_call>oops "


def test_any_name_is_allowed_without_known_tools_and_none_with_no_tools():
    text = f"</think>{call('fly', to='5', at='noon')}"
    assert calls(read(text, tools=None)) == [("fly", {"to": 5, "at": "noon"})]
    assert calls(read(text, tools=())) == []


def test_a_value_that_does_not_fit_is_kept_and_noted():
    parsed = read(f"</think>{call('get_weather', days='two')}")
    assert calls(parsed) == [("get_weather", {"days": "two"})]
    assert parsed.notes == ("argument 'days' of 'get_weather' is not integer",)


def test_a_prompt_may_end_inside_a_call():
    prompt = [*SHUT, *ids("Now.<tool_call>get_weather<arg_key>city</arg_key><arg_value>")]
    parser = CompletionParser(TOKENIZER, tools=SPECS, prompt=prompt)
    events = parser.feed(ids("Oslo</arg_value></tool_call>"))
    assert events[0] == ToolCallStart(0, "call_0", "get_weather")
    assert calls(parser.result) == [("get_weather", {"city": "Oslo"})]
    assert parser.result.message.content == ""


# --- streaming ------------------------------------------------------------------------------------


def test_events_are_emitted_as_soon_as_they_are_certain():
    parser = CompletionParser(TOKENIZER, tools=SPECS, prompt=OPEN, call_id="c{}".format)
    assert parser.feed(ids("Hm")) == [ReasoningDelta("Hm")]
    assert parser.feed(ids("</think>On it.<tool_call>get_")) == [ContentDelta("On it.")]
    assert parser.feed(ids("weather<arg_key>")) == [ToolCallStart(0, "c0", "get_weather")]
    assert parser.feed(ids("city</arg_key><arg_value>Os")) == [
        ToolCallArgumentsDelta(0, '{"city": "Os')
    ]
    assert parser.feed(ids('lo\n"')) == [ToolCallArgumentsDelta(0, 'lo\\n\\"')]
    assert parser.feed(ids("</arg_value><arg_key>days</arg_key><arg_value>1")) == [
        ToolCallArgumentsDelta(0, '", "days": ')
    ]
    assert parser.feed(ids("2</arg_value></tool_call><tool_call>now</tool_call>")) == [
        ToolCallArgumentsDelta(0, "12}"),
        ToolCallEnd(0),
        ToolCallStart(1, "c1", "now"),
        ToolCallArgumentsDelta(1, "{}"),
        ToolCallEnd(1),
    ]
    assert parser.feed(ids("\n<|observation|>")) == []
    assert parser.finish("stop") == []


def test_an_answer_without_thinking_is_repeated_as_content():
    parser = CompletionParser(TOKENIZER, prompt=OPEN)
    assert parser.feed(ids("Yes.<|user|>")) == [ReasoningDelta("Yes.")]
    assert parser.finish("stop") == [ReasoningRetraction("Yes."), ContentDelta("Yes.")]


def test_a_call_that_becomes_malformed_is_discarded():
    parser = CompletionParser(TOKENIZER, tools=SPECS, prompt=SHUT)
    parser.feed(ids("<tool_call>now<arg_key>a"))
    assert parser.finish("length") == [ToolCallDiscard(0), ContentDelta("<tool_call>now<arg_key>a")]


def test_a_multi_token_character_is_emitted_whole():
    parser = CompletionParser(TOKENIZER, prompt=SHUT)
    events_by_token = [parser.feed([token]) for token in ids("\U0001f40e!")]
    assert [event for events in events_by_token for event in events] == [
        ContentDelta("\U0001f40e"),
        ContentDelta("!"),
    ]


def test_half_a_character_at_the_end_is_emitted():
    half = ids("\U0001f40e")[:2]
    assert (
        parse_completion(TOKENIZER, half, finish="length", prompt=SHUT).message.content == "\ufffd"
    )
    parsed = parse_completion(TOKENIZER, [*half, *ids("</think>")], finish="stop", prompt=OPEN)
    assert parsed.message.reasoning == "\ufffd"


# --- properties -----------------------------------------------------------------------------------


def rebuilt(events):
    """A message from its events alone, as a client would build it."""
    reasoning, content, found = "", "", {}
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning += text
            case ReasoningRetraction(text):
                assert text and reasoning.endswith(text)
                reasoning = reasoning.removesuffix(text)
            case ContentDelta(text):
                content += text
            case ToolCallStart(index, name, tool):
                found[index] = [name, tool, ""]
            case ToolCallArgumentsDelta(index, text):
                found[index][2] += text
            case ToolCallDiscard(index):
                del found[index]
    made = [(name, tool, json.loads(text)) for name, tool, text in found.values()]
    return reasoning, content, made


def cut(tokens, rng):
    while tokens:
        size = rng.choice([1, 1, 2, 3, 7, 50])
        yield tokens[:size]
        tokens = tokens[size:]


PIECES = [
    *(ids(marker) for marker in SpecialToken),
    *(ids(word) for word in ("now", "get_weather", "city", "days", "12", "[1, ", "\n", "\u6f22")),
    *([token] for token in ids("\U0001f40e")),
    ids(call("get_weather", city="Oslo", days="2")),
    ids("</think>"),
]
REPLY = st.lists(st.sampled_from(PIECES), max_size=25).map(lambda found: [*chain(*found)])
ANY_IDS = st.lists(
    st.one_of(
        st.integers(0, TOKENIZER.vocab_size + 50),
        st.sampled_from([TOKENIZER.special_token_ids[token] for token in SpecialToken]),
    )
)


@given(
    st.one_of(REPLY, ANY_IDS),
    st.sampled_from([[], OPEN, SHUT, [*SHUT, *ids("<tool_call>now<arg_key>")]]),
    st.sampled_from(["stop", "length", "abort"]),
    st.sampled_from([None, (), SPECS]),
    st.randoms(use_true_random=False),
)
@example(ids("A</think><think>B"), OPEN, "stop", SPECS, Random(0))
@example([-1, 2**40], OPEN, "stop", SPECS, Random(0))
@settings(max_examples=300)
def test_the_chunking_of_tokens_does_not_change_the_reply(tokens, prompt, finish, tools, rng):
    """Nothing raises, whatever the model generates."""
    whole = parse_completion(TOKENIZER, tokens, finish=finish, tools=tools, prompt=prompt)
    parser = CompletionParser(TOKENIZER, tools=tools, prompt=prompt)
    events = [event for part in cut(tokens, rng) for event in parser.feed(part)]
    events += parser.finish(finish)
    assert parser.result == whole
    reasoning, content, made = rebuilt(events)
    message = whole.message
    assert (reasoning, content) == (message.reasoning or "", message.content)
    assert made == [(c.id, c.name, dict(c.arguments)) for c in message.tool_calls]


def test_whitespace_after_a_call_is_kept_for_any_chunking():
    tokens = ids("<tool_call>now</tool_call>\nDone.\n<tool_call>now</tool_call>\n")
    for at in range(len(tokens)):
        parser = CompletionParser(TOKENIZER, tools=SPECS, prompt=SHUT)
        events = [*parser.feed(tokens[:at]), *parser.feed(tokens[at:]), *parser.finish("stop")]
        assert parser.result.message.content == rebuilt(events)[1] == "\nDone.\n"


def schema_of(arguments):
    """A tool whose schema distinguishes text from other types."""
    text = {key: {"type": "string"} for key, value in arguments.items() if isinstance(value, str)}
    return ToolSpec(name="f", description="", parameters={"properties": text})


@pytest.mark.parametrize("version", GLM_VERSIONS)
def test_rendered_replies_are_parsed_back(version):
    renderer, read_calls = GlmRenderer(TOKENIZER, version=version), 0
    words = [word for word in (*WORDS, *MARKERS) if "think>" not in word]
    thinking = ThinkingKwargs(clear_thinking=False)
    for number in range(60):
        raw, _ = conversation(Random(number), words)
        expected = next((m for m in parse_messages(raw) if m.role == "assistant"), None)
        if expected is None or "</think>" in expected.content:
            continue
        for one in expected.tool_calls or (None,):
            alone = replace(expected, tool_calls=(one,) if one else ())
            whole = renderer.render_last_reply(
                [Message(role="user", content=""), alone], thinking=thinking
            )
            start = whole.loss_mask.index(True)
            prompt, reply = whole.token_ids[:start], whole.token_ids[start:]
            tools = [replace(schema_of(one.arguments), name=one.name)] if one else ()
            parsed = parse_completion(TOKENIZER, reply, finish="stop", tools=tools, prompt=prompt)
            assert parsed.notes == ()
            assert parsed.message.content == expected.content.strip()
            assert (parsed.message.reasoning or "").strip() == (expected.reasoning or "").strip()
            assert calls(parsed) == ([(one.name, dict(one.arguments))] if one else [])
            read_calls += one is not None
    assert read_calls > 40


def test_rendered_words_are_parsed_back():
    tokenizer = word_tokenizer()
    spec = ToolSpec(name="look", description="", parameters={})
    reply = f"red oak .</think>blue{call('look', oak='12')}"
    tokens = tokenizer.encode(reply, specials=True)
    prompt = tokenizer.encode("<|assistant|><think>", specials=True)
    parsed = parse_completion(tokenizer, tokens, finish="stop", tools=(spec,), prompt=prompt)
    assert parsed.message.reasoning == "red oak ."
    assert (parsed.message.content, calls(parsed)) == ("blue", [("look", {"oak": 12})])
