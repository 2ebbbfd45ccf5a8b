"""Completions, responses and grammars of the openai client against a real server."""

import json

import openai
import pytest
from pydantic import BaseModel

from paddock.text.chat_template import tool_to_openai
from tests.serve.live import serving
from tests.serve.memorized_model import CONTEXT, WEATHER

TOOLS = [tool_to_openai(WEATHER)]
HELLO = [{"role": "user", "content": "Say hello."}]
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def client(live):
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as found:
        yield found


def test_exceeding_the_context_is_an_error_with_the_numbers(client):
    ids = [5] * (CONTEXT + 10)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="m", prompt=ids, max_tokens=1)
    assert f"{CONTEXT + 10} tokens" in str(caught.value) and str(CONTEXT) in str(caught.value)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match=str(CONTEXT + 100)):
        client.completions.create(model="m", prompt=ids[:100], max_tokens=CONTEXT)


def test_completions_take_text_and_ids(client, live):
    ids = live.tokenizer.encode("Hello there", specials=True)
    by_text = client.completions.create(
        model="m", prompt="Hello there", temperature=0, max_tokens=3
    )
    by_ids = client.completions.create(model="m", prompt=ids, temperature=0, max_tokens=3)
    assert by_text.choices[0].text == by_ids.choices[0].text
    both = client.completions.create(model="m", prompt=[ids, ids], temperature=0, max_tokens=3, n=2)
    assert [c.index for c in both.choices] == [0, 1, 2, 3]
    assert {c.text for c in both.choices} == {by_text.choices[0].text}
    assert both.usage.prompt_tokens == 2 * len(ids)


def test_scoring_a_prompt_returns_an_empty_completion(client):
    params = {"model": "m", "prompt": "one two", "echo": True, "logprobs": 1, "max_tokens": 0}
    whole = client.completions.create(**params)
    assert whole.choices[0].text == "one two"
    assert whole.usage.completion_tokens == 0 and whole.usage.total_tokens == 2
    parts = list(
        client.completions.create(**params, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(part.choices[0].text for part in parts[:-1]) == "one two"
    assert parts[-2].choices[0].finish_reason == "length"
    assert parts[-1].usage.completion_tokens == 0


def test_completions_echo_with_logprobs(client, live):
    ids = live.tokenizer.encode("one two three", specials=True)
    params = {"model": "m", "prompt": "one two three", "echo": True, "logprobs": 1}
    params |= {"max_tokens": 1, "temperature": 0, "logit_bias": {ids[0]: 100}}  # no special token
    done = client.completions.create(**params).choices[0]
    assert done.text.startswith("one two three")
    assert len(done.logprobs.token_logprobs) == len(ids) + 1
    assert done.logprobs.token_logprobs[0] is None and done.logprobs.top_logprobs[0] is None
    for token, top in zip(
        done.logprobs.token_logprobs[1:], done.logprobs.top_logprobs[1:], strict=True
    ):
        assert token in top.values() and max(top.values()) >= token
    assert done.logprobs.text_offset[0] == 0
    assert "".join(done.logprobs.tokens) == done.text
    scored = client.completions.create(
        model="m", prompt=ids, echo=True, logprobs=0, max_tokens=0, temperature=0
    ).choices[0]
    assert scored.logprobs.token_logprobs == pytest.approx(
        done.logprobs.token_logprobs[:-1], nan_ok=True
    )


@pytest.mark.parametrize("length", [0, 3])
def test_a_streamed_echo_has_prompt_logprobs(client, length):
    params = {"model": "m", "prompt": "one two three", "echo": True, "logprobs": 1}
    params |= {"max_tokens": length, "temperature": 0}
    whole = client.completions.create(**params).choices[0]
    parts = [part.choices[0] for part in client.completions.create(**params, stream=True)]
    assert "".join(part.text for part in parts) == whole.text
    for name in ("tokens", "token_logprobs", "text_offset"):
        streamed = [each for part in parts for each in getattr(part.logprobs, name)]
        assert streamed == pytest.approx(getattr(whole.logprobs, name), abs=1e-5), name
    assert parts[-1].finish_reason == whole.finish_reason


def test_completions_stream(client):
    params = {"model": "m", "prompt": "one two", "max_tokens": 6, "temperature": 0}
    chunks = list(
        client.completions.create(**params, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(c.text for chunk in chunks for c in chunk.choices)
    assert text == client.completions.create(**params).choices[0].text
    assert chunks[-1].usage.completion_tokens <= 6


def test_responses(client):
    done = client.responses.create(model="tiny", input="Say hello.", temperature=0)
    assert done.output_text == "Hello there, friend!" and done.status == "completed"
    assert [item.type for item in done.output] == ["reasoning", "message"]
    assert done.output[0].content[0].text == "A greeting."
    assert done.usage.output_tokens_details.reasoning_tokens == 3


def test_a_response_truncated_in_reasoning_has_no_message(client):
    """An empty message would be parsed by the client, and fail."""

    class Reply(BaseModel):
        text: str

    params = {"model": "m", "input": "Say hello.", "max_output_tokens": 2, "temperature": 0}
    cut = client.responses.parse(**params, text_format=Reply)
    assert (cut.status, cut.output_parsed) == ("incomplete", None)
    assert [item.type for item in cut.output] == ["reasoning"]


RESPONSE_TOOLS = [{"type": "function", **TOOLS[0]["function"]}, {"type": "web_search"}]


def test_counted_input_tokens_equal_the_usage(client):
    params = {"model": "m", "input": "Weather in Oslo?", "instructions": "Be brief."}
    first = client.responses.create(**params, tools=RESPONSE_TOOLS, max_output_tokens=1)
    counted = client.responses.input_tokens.count(**params, tools=RESPONSE_TOOLS)
    assert counted.input_tokens == first.usage.input_tokens
    gone_on = {"model": "m", "input": "Why?", "previous_response_id": first.id}
    second = client.responses.create(**gone_on, max_output_tokens=1)
    counted = client.responses.input_tokens.count(**gone_on)
    assert counted.input_tokens == second.usage.input_tokens


def test_a_tool_round_trip_with_responses(client):
    first = client.responses.create(
        model="m", input="Weather in Oslo?", tools=RESPONSE_TOOLS, temperature=0, store=False
    )
    call = first.output[-1]
    assert (call.type, call.name) == ("function_call", "get_weather")
    assert json.loads(call.arguments) == {"city": "Oslo", "days": 2}
    past = [item.model_dump(exclude_none=True) for item in first.output]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"t": 12}'}
    user = {"role": "user", "content": "Weather in Oslo?"}
    second = client.responses.create(
        model="m", input=[user, *past, result], tools=RESPONSE_TOOLS, temperature=0
    )
    assert second.output_text == "12 C in Oslo."
    assert second.usage.input_tokens_details.cached_tokens >= 80


def test_responses_stream_through_the_helper_of_the_client(client):
    with client.responses.stream(
        model="m", input="Weather in Oslo?", tools=RESPONSE_TOOLS[:1], temperature=0
    ) as stream:
        events = list(stream)
        done = stream.get_final_response()
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == list(
        range(len(events))
    )
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"
    assert [item.type for item in done.output] == ["reasoning", "message", "function_call"]
    assert done.output_text == "Checking."
    assert json.loads(done.output[2].arguments) == {"city": "Oslo", "days": 2}


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_can_continue_a_previous_one(client, stream):
    params = {"model": "m", "tools": RESPONSE_TOOLS[:1], "temperature": 0}
    if stream:
        with client.responses.stream(input="Weather in Oslo?", **params) as events:
            first = events.get_final_response()
    else:
        first = client.responses.create(input="Weather in Oslo?", **params)
    assert first.store and first.previous_response_id is None
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"t": 12}'}
    second = client.responses.create(input=[result], previous_response_id=first.id, **params)
    assert second.output_text == "12 C in Oslo."
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens_details.cached_tokens >= 80
    assert client.responses.retrieve(second.id).output_text == "12 C in Oslo."
    # The first response can be continued again, and instructions apply to one response only.
    again = client.responses.create(
        input=[result], instructions="Be brief.", previous_response_id=first.id, **params
    )
    assert again.usage.input_tokens > second.usage.input_tokens
    third = client.responses.create(input="Say hello.", previous_response_id=again.id, **params)
    past, more = ([i.model_dump(exclude_none=True) for i in r.output] for r in (first, again))
    oslo, hello = ({"role": "user", "content": x} for x in ("Weather in Oslo?", "Say hello."))
    whole = client.responses.create(input=[oslo, *past, result, *more, hello], **params)
    assert third.usage.input_tokens == whole.usage.input_tokens
    assert third.output_text == whole.output_text


def test_responses_that_are_not_stored_cannot_be_continued(client):
    unstored = client.responses.create(model="m", input="Say hello.", store=False, temperature=0)
    deleted = client.responses.create(model="m", input="Say hello.", temperature=0)
    assert not unstored.store
    client.responses.delete(deleted.id)
    for name in ("resp_1", unstored.id, deleted.id):
        with pytest.raises(openai.BadRequestError, match="not found: the newest 1000") as refused:
            client.responses.create(model="m", input="x", previous_response_id=name)
        assert refused.value.code == "previous_response_not_found"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(name)


def test_a_server_that_stores_no_responses_reports_it(folder):
    with serving(folder, max_stored_responses=0) as live:
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
        done = client.responses.create(model="m", input="Say hello.", temperature=0)
        assert not done.store
        with pytest.raises(openai.BadRequestError, match="stores no responses"):
            client.responses.create(model="m", input="x", previous_response_id=done.id)
        with pytest.raises(openai.NotFoundError, match="stores no responses"):
            client.responses.retrieve(done.id)


# --- grammars -------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"days": {"enum": [1, 2]}, "city": {"enum": ["Oslo", "Rome"]}},
    "required": ["days", "city"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("thinks", [True, False])
def test_a_reply_follows_a_json_schema(client, thinks):
    pytest.importorskip("xgrammar")
    jsonschema = pytest.importorskip("jsonschema_rs")
    form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
    # A model this small would generate endless whitespace, which JSON allows.
    more = {"response_format": form, "temperature": 0, "max_tokens": 100, "frequency_penalty": 2}
    body = {} if thinks else OFF
    chat = client.chat.completions.create(model="m", messages=HELLO, extra_body=body, **more)
    jsonschema.validate(SCHEMA, json.loads(chat.choices[0].message.content))
    assert (chat.choices[0].message.reasoning_content is not None) == thinks
    words = {"enum": ["Rome", "Oslo"]}
    flat = {"type": "json_schema", "name": "city", "schema": words}
    done = client.responses.create(
        model="m", input="Say hello.", text={"format": flat}, temperature=0, extra_body=body
    )
    jsonschema.validate(words, json.loads(done.output_text))


def test_an_invalid_schema_is_rejected(client):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wish"}}}
    with pytest.raises(openai.BadRequestError, match="grammar"):
        client.chat.completions.create(model="m", messages=HELLO, response_format=form)
