"""Response formatters: whole replies and streams, for any split into deltas."""

import json
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddock.api.anthropic_format import MessageStream, content_blocks
from paddock.api.body import parse_body
from paddock.api.delta_parser import DeltaParser, HeldBackText
from paddock.api.openai_chat_format import (
    ChatCompletionEnvelope,
    ChatCompletionStream,
    format_message_dict,
)
from paddock.api.openai_chat_request import ChatCompletionBody, parse_chat_request
from paddock.api.openai_responses_format import ResponsesEnvelope, ResponseStream
from paddock.api.openai_responses_request import ResponsesBody, parse_responses_request
from paddock.api.thinking_options import NO_THINKING_OPTIONS
from paddock.api.token_decoder import TokenDecoder, format_chat_logprobs
from paddock.records import Completion, SamplingParams, Segment, ToolSpec
from paddock.text import train_tokenizer
from paddock.text.parse_events import ContentDelta, ReasoningDelta

TEXTS = ["Need the tool. Checking. get_weather city Oslo days Hello"]
TOKENIZER = train_tokenizer(TEXTS, vocab=330)
DECODER = TokenDecoder(TOKENIZER)
TOOL = ToolSpec(
    name="look",
    description="",
    parameters={"properties": {"at": {"type": "string"}, "far": {"type": "integer"}}},
)
REPLY = (
    "Need the tool.</think>Checking \U0001f600.<tool_call>look<arg_key>at</arg_key><arg_value>sky"
    ' "high"</arg_value><arg_key>far</arg_key><arg_value>2</arg_value></tool_call>'
    "<tool_call>look</tool_call><|observation|>"
)
IDS = tuple(TOKENIZER.encode(REPLY, specials=True))
PROMPT = tuple(TOKENIZER.encode("<|user|>Hi<|assistant|><think>", specials=True))


@dataclass(frozen=True)
class FakeOutput:
    """The part of an engine's request output that formatters use."""

    completion: Completion
    matched_stop: int | str | None = None
    id: str = "r"
    prompt_tokens: int = 9
    cached_tokens: int = 4
    reasoning_tokens: int = 3
    message: str = ""


@dataclass(frozen=True)
class FakeDelta:
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    output: FakeOutput | None = None
    top_logprobs: tuple = ()
    version: int = 0


def output_of(ids, finish="stop", matched=None):
    logprobs = tuple(-0.01 * i for i in range(len(ids)))
    segments = (Segment(0, len(ids)),) if ids else ()
    done = Completion(token_ids=tuple(ids), logprobs=logprobs, versions=segments, finish=finish)
    return FakeOutput(done, matched)


def deltas(ids, cuts, **end):
    """The reply in deltas that end at `cuts`, the last with the output."""
    answer = output_of(ids, **end)
    places = sorted({cut % (len(ids) + 1) for cut in cuts} | {0, len(ids)})
    for start, stop in pairwise(places):
        last = answer if stop == len(ids) else None
        yield FakeDelta(tuple(ids[start:stop]), answer.completion.logprobs[start:stop], last)


def parser(stops=(), tools=(TOOL,), prompt=PROMPT):
    return DeltaParser(TOKENIZER, tools=tools, prompt=prompt, stops=stops, call_id="call_{}".format)


def whole_reply(ids=IDS, stops=(), **end):
    found = parser(stops)
    (delta,) = deltas(ids, [], **end)
    found.feed(delta)
    return found.message


CUTS = st.lists(st.integers(0, 200), max_size=12)


def test_a_whole_reply_is_parsed():
    message = whole_reply()
    assert (message.reasoning, message.content) == ("Need the tool.", "Checking \U0001f600.")
    assert [dict(call.arguments) for call in message.tool_calls] == [
        {"at": 'sky "high"', "far": 2},
        {},
    ]


def parse_request(kind, body, make):
    return make(parse_body(kind, body), SamplingParams(), NO_THINKING_OPTIONS)


CHAT_REQUEST = parse_request(
    ChatCompletionBody,
    {"messages": [{"role": "user", "content": "x"}], "logprobs": True},
    parse_chat_request,
)
FRAME = ChatCompletionEnvelope(id="c", model="m", created=1, version=0)


@settings(max_examples=40)
@given(CUTS)
def test_a_chat_stream_joins_to_the_reply_for_any_split(cuts):
    found, stream = parser(), ChatCompletionStream(CHAT_REQUEST, 0, FRAME, DECODER)
    chunks = [stream.open()]
    for delta in deltas(IDS, cuts):
        chunks += stream.push(found.feed(delta), delta)
        if delta.output:
            chunks.append(stream.close(delta.output, calls=len(found.message.tool_calls)))
    choices = [chunk["choices"][0] for chunk in chunks]
    streamed = {"reasoning_content": "", "reasoning": "", "content": ""}
    calls = {}
    for choice in choices:
        for key in streamed:
            streamed[key] += choice["delta"].get(key, "")
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                calls[call["index"]] = [call["function"]["name"], ""]
            calls[call["index"]][1] += call["function"]["arguments"]
    expected = format_message_dict(CHAT_REQUEST, whole_reply())
    assert streamed == {key: expected[key] for key in streamed}
    assert [(n, json.loads(a)) for n, a in calls.values()] == [
        ("look", {"at": 'sky "high"', "far": 2}),
        ("look", {}),
    ]
    assert choices[-1]["finish_reason"] == "tool_calls"
    entries = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
    assert [e["logprob"] for e in entries] == list(output_of(IDS).completion.logprobs)
    spelled = b"".join(bytes(e["bytes"]) for e in entries)
    assert spelled.decode() == TOKENIZER.decode(IDS)


@settings(max_examples=40)
@given(CUTS)
def test_blocks_of_a_message_stream_join_to_the_reply_for_any_split(cuts):
    found, stream = parser(), MessageStream("m", "model", 9)
    events = stream.open()
    for delta in deltas(IDS, cuts):
        events += stream.push(found.feed(delta))
        if delta.output:
            events += stream.close(delta.output, calls=2)
    made, is_open = [], None
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert is_open is None and event["index"] == len(made)
                is_open = event["index"]
                made.append(dict(event["content_block"]))
            case "content_block_delta":
                assert event["index"] == is_open
                delta, block = event["delta"], made[-1]
                if delta["type"] == "input_json_delta":
                    block["json"] = block.get("json", "") + delta["partial_json"]
                else:
                    key = delta["type"].removesuffix("_delta")
                    block[key] += delta[key]
            case "content_block_stop":
                assert event["index"] == is_open
                is_open = None
                if "json" in made[-1]:
                    made[-1]["input"] = json.loads(made[-1].pop("json"))
    assert is_open is None and made == content_blocks(whole_reply())
    assert [e["type"] for e in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


RESPONSES_REQUEST = parse_request(
    ResponsesBody,
    {"input": "x", "include": ["message.output_text.logprobs"]},
    parse_responses_request,
)


@settings(max_examples=40)
@given(CUTS)
def test_items_of_a_response_stream_join_to_the_reply_for_any_split(cuts):
    frame = ResponsesEnvelope(
        id="resp_1", model="m", created=1, request=RESPONSES_REQUEST, token_decoder=DECODER
    )
    found, stream = parser(), ResponseStream(frame)
    events = stream.open()
    for delta in deltas(IDS, cuts):
        events += stream.push(found.feed(delta), delta)
        if delta.output:
            events += stream.close(delta.output)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = events[-1]["response"]
    expected = frame.format_response(whole_reply(), output_of(IDS))

    def bare(items):
        return [{k: v for k, v in item.items() if k != "content"} for item in items]

    assert bare(done["output"]) == bare(expected["output"])
    message = next(item for item in done["output"] if item["type"] == "message")
    streamed = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    assert streamed == message["content"][0]["text"] == "Checking \U0001f600."
    for item in done["output"]:
        ended = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        assert item in ended
    assert done["usage"] == expected["usage"] and done["status"] == "completed"


# --- ends -----------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.text("ab", max_size=12), st.sampled_from(["ab", "aab", "bb", "b"]), CUTS)
def test_a_stop_string_is_removed_for_any_split(text, stop, cuts):
    """The engine ends a reply with the token that completes a stop string."""
    at = text.find(stop)
    matched = stop if at >= 0 else None
    streamed = text if at < 0 else text[: at + len(stop)] + "z"  # the token may contain more
    held, found = HeldBackText([stop]), []
    places = sorted({cut % (len(streamed) + 1) for cut in cuts} | {0, len(streamed)})
    # Only the last delta may complete the stop string.
    places = [p for p in places if at < 0 or p < at + len(stop)] + [len(streamed)]
    for start, end in pairwise(places):
        piece = [ContentDelta(streamed[start:end])]
        found += held.finish(piece, matched) if end == len(streamed) else held.feed(piece)
    if not streamed:
        found = held.finish([], None)
    assert "".join(event.text for event in found) == (text if at < 0 else text[:at])


def test_a_stop_string_in_reasoning():
    held = HeldBackText(["END"])
    assert held.feed([ReasoningDelta("so EN")]) == [ReasoningDelta("so ")]
    assert held.feed([ContentDelta("D")]) == [ReasoningDelta("EN"), ContentDelta("D")]
    message = whole_reply(TOKENIZER.encode("so END", specials=True), ["END"], matched="END")
    assert (message.reasoning, message.content) == (None, "so ")


def test_a_reply_truncated_while_thinking_is_reasoning():
    ids = TOKENIZER.encode("so", specials=True)
    assert whole_reply(ids, finish="length").reasoning == "so"
    assert whole_reply(ids, finish="stop").content == "so"


def test_the_index_of_a_discarded_call_is_not_reused():
    """A second call must not be appended to the arguments of a discarded one."""
    text = "<tool_call>look<arg_key>at</arg_key><arg_value>x</arg_value><think>"
    text += "<tool_call>look</tool_call>"
    ids = TOKENIZER.encode(text, specials=True)
    prompt = TOKENIZER.encode("<|assistant|></think>", specials=True)
    found, stream = parser(prompt=prompt), ChatCompletionStream(CHAT_REQUEST, 0, FRAME, DECODER)
    chunks = []
    for delta in deltas(ids, range(len(ids))):
        chunks += stream.push(found.feed(delta), delta)
    calls = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", ())]
    started = [call["index"] for call in calls if "id" in call]
    assert started == sorted(set(started)) and len(found.message.tool_calls) == 1
    last = "".join(c["function"]["arguments"] for c in calls if c["index"] == started[-1])
    assert json.loads(last) == {}


def test_reasoning_can_be_hidden_or_joined():
    message = whole_reply()
    assert (
        format_message_dict(replace(CHAT_REQUEST, include_reasoning=False), message)["reasoning"]
        is None
    )
    joined = format_message_dict(replace(CHAT_REQUEST, inline_reasoning=True), message)
    assert joined["content"] == "<think>Need the tool.</think>Checking \U0001f600."
    request = replace(CHAT_REQUEST, inline_reasoning=True)
    found, stream, streamed = parser(), ChatCompletionStream(request, 0, FRAME, DECODER), ""
    for delta in deltas(IDS, range(40)):
        for chunk in stream.push(found.feed(delta), delta):
            streamed += chunk["choices"][0]["delta"].get("content", "")
    assert streamed == joined["content"]


def test_partial_characters_are_returned_as_bytes():
    ids = TOKENIZER.encode("\U0001f600", specials=True)
    assert len(ids) > 1
    assert b"".join(bytes(DECODER.bytes(i)) for i in ids).decode() == "\U0001f600"
    entries = format_chat_logprobs(DECODER, ids, [-1.0] * len(ids), ())
    assert [entry["token"] for entry in entries] == ["\ufffd"] * len(ids)
    assert len(set(DECODER.unique_texts(ids))) == len(set(ids)) or len(ids) != len(set(ids))


@pytest.mark.parametrize(("finish", "reason"), [("stop", "end_turn"), ("length", "max_tokens")])
def test_finish_reasons_of_a_message(finish, reason):
    stream = MessageStream("m", "model", 9)
    (_, last, _) = [None, *stream.close(output_of((5,), finish=finish), calls=0)]
    assert last["delta"]["stop_reason"] == reason
    assert last["usage"] == {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 1,
    }
