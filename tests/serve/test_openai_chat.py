"""Chat completions of the openai client against a real server."""

import asyncio
import json

import openai
import pytest

from paddock.text.chat_template import tool_to_openai
from tests.patience import until, until_async
from tests.serve.memorized_model import CONTEXT, COUNTS, WEATHER

TOOLS = [tool_to_openai(WEATHER)]
HELLO = [{"role": "user", "content": "Say hello."}]
OSLO = [{"role": "user", "content": "Weather in Oslo?"}]
COUNT = [{"role": "user", "content": "Count."}]
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def client(live):
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as found:
        yield found


def test_models(client):
    model, *_ = client.models.list().data
    assert model.id == "tiny" and model.max_model_len == CONTEXT
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("huge")


def test_a_plain_chat(client):
    done = client.chat.completions.create(model="tiny", messages=HELLO, temperature=0)
    (choice,) = done.choices
    assert choice.message.content == "Hello there, friend!"
    assert choice.message.reasoning_content == choice.message.reasoning == "A greeting."
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None
    assert done.usage.completion_tokens_details.reasoning_tokens == 3
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens


@pytest.mark.parametrize(
    "off",
    [
        OFF,
        {"thinking": {"type": "disabled"}},
        {"reasoning_effort": "none"},
        {"reasoning": {"enabled": False}},
        # An explicit kwarg overrides an API field.
        OFF | {"thinking": {"type": "enabled"}},
    ],
)
def test_thinking_can_be_disabled_in_every_supported_way(client, off):
    done = client.chat.completions.create(model="m", messages=HELLO, temperature=0, extra_body=off)
    message = done.choices[0].message
    assert (message.content, message.reasoning_content) == ("Hello there, friend!", None)


def test_a_thinking_budget_is_kept(client):
    done = client.chat.completions.create(
        model="m",
        messages=HELLO,
        temperature=0,
        extra_body={"thinking_token_budget": 1, "return_meta_info": True},
    )
    assert done.choices[0].message.reasoning_content == "A"
    assert done.choices[0].meta_info["forced_positions"] == [1]


def test_a_tool_call_and_its_echo(client):
    """A whole turn of an agent: the reply is sent back as `model_dump` returns it."""
    first = client.chat.completions.create(
        model="tiny", messages=OSLO, tools=TOOLS, temperature=0
    ).choices[0]
    assert first.finish_reason == "tool_calls"
    (call,) = first.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "get_weather",
        {"city": "Oslo", "days": 2},
    )
    echoed = first.message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"t": 12}'}
    second = client.chat.completions.create(
        model="tiny", messages=[*OSLO, echoed, result], tools=TOOLS, temperature=0
    )
    assert second.choices[0].message.content == "12 C in Oslo."
    assert second.choices[0].message.reasoning == "It is 12."
    # Reasoning is kept, so the second prompt extends the first reply.
    assert second.usage.prompt_tokens_details.cached_tokens >= 80


def test_a_message_without_content_can_be_echoed(client):
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    past = [*OSLO, {"role": "assistant", "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "c", "content": "12"}
    done = client.chat.completions.create(
        model="tiny", messages=[*past, result], tools=TOOLS, max_tokens=4
    )
    assert done.usage.completion_tokens == 4


def joined(chunks):
    """The deltas of a stream joined."""
    found = {"content": "", "reasoning_content": "", "reasoning": "", "calls": {}, "finish": None}
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta.model_dump(exclude_none=True)
            for key in ("content", "reasoning_content", "reasoning"):
                found[key] += delta.get(key, "")
            for call in delta.get("tool_calls", ()):
                known = found["calls"].setdefault(call["index"], {"arguments": ""})
                known["name"] = call["function"].get("name", known.get("name"))
                known["arguments"] += call["function"].get("arguments", "")
            found["finish"] = choice.finish_reason or found["finish"]
    return found


def test_a_stream_equals_the_whole_reply(client):
    create = {"model": "tiny", "messages": OSLO, "tools": TOOLS, "temperature": 0}
    chunks = list(
        client.chat.completions.create(
            **create, stream=True, stream_options={"include_usage": True}, logprobs=True
        )
    )
    assert chunks[0].choices[0].delta.model_dump(exclude_none=True) == {
        "role": "assistant",
        "content": "",
    }
    found = joined(chunks)
    assert found["reasoning_content"] == found["reasoning"] == "Need the tool."
    assert (found["content"], found["finish"]) == ("Checking.", "tool_calls")
    assert found["calls"] == {
        0: {"name": "get_weather", "arguments": '{"city": "Oslo", "days": 2}'}
    }
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 31
    whole = client.chat.completions.create(**create, logprobs=True)
    streamed = [
        entry.logprob
        for chunk in chunks
        for choice in chunk.choices
        for entry in (choice.logprobs.content if choice.logprobs else ())
    ]
    assert streamed == pytest.approx([e.logprob for e in whole.choices[0].logprobs.content])
    assert len(streamed) == whole.usage.completion_tokens


def test_the_stream_helper_of_the_client_accumulates_the_reply(client):
    with client.chat.completions.stream(
        model="tiny", messages=OSLO, tools=TOOLS, temperature=0
    ) as stream:
        kinds = {event.type for event in stream}
        done = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    message = done.choices[0].message
    assert (message.content, message.reasoning_content) == ("Checking.", "Need the tool.")
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Oslo", "days": 2}


SILENT = {"model": "tiny", "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_call_can_be_required(client, choice):
    done = client.chat.completions.create(
        **SILENT, messages=OSLO, tools=TOOLS, temperature=0, tool_choice=choice
    ).choices[0]
    assert done.finish_reason == "tool_calls" and not done.message.content
    assert json.loads(done.message.tool_calls[0].function.arguments)["city"] == "Oslo"


def test_a_response_format_does_not_apply_to_a_required_call(client):
    done = client.chat.completions.create(
        **SILENT,
        messages=OSLO,
        tools=TOOLS,
        temperature=0,
        tool_choice="required",
        response_format={"type": "json_object"},
    ).choices[0]
    assert done.finish_reason == "tool_calls"
    assert json.loads(done.message.tool_calls[0].function.arguments)["city"] == "Oslo"


def test_tools_can_be_forbidden(client):
    with_none = client.chat.completions.create(
        model="tiny", messages=HELLO, tools=TOOLS, tool_choice="none", temperature=0
    )
    assert with_none.choices[0].message.content == "Hello there, friend!"


def test_unknown_tool_types_are_skipped(client, caplog):
    tools = [{"type": "web_search"}, {"type": "namespace", "name": "x"}]
    done = client.chat.completions.create(model="m", messages=HELLO, tools=tools, temperature=0)
    again = client.chat.completions.create(model="m", messages=HELLO, tools=tools, temperature=0)
    assert done.choices[0].message.content == "Hello there, friend!"
    assert again.usage.prompt_tokens == done.usage.prompt_tokens
    warnings = [r.message for r in caplog.records if "web_search" in r.message]
    assert warnings == ["tools of type 'web_search' are skipped: this server does not run them"]


def test_n_choices_and_seeds(client):
    def create(seed):
        done = client.chat.completions.create(
            model="m", messages=COUNT, n=2, temperature=3.0, seed=seed, max_tokens=12
        )
        assert [choice.index for choice in done.choices] == [0, 1]
        assert done.usage.completion_tokens <= 24
        return [choice.message.model_dump() for choice in done.choices]

    assert create(7) == create(7)
    assert create(7) != create(8)
    assert create(7)[0] != create(7)[1]


def test_n_choices_in_one_stream(client):
    chunks = client.chat.completions.create(
        model="m", messages=HELLO, n=2, temperature=0, stream=True, extra_body=OFF
    )
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "Hello there, friend!", 1: "Hello there, friend!"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_reply_and_is_not_returned(client, stream):
    done = client.chat.completions.create(
        model="m", messages=COUNT, temperature=0, stop=["ur fi"], stream=stream, extra_body=OFF
    )
    text = joined(done)["content"] if stream else done.choices[0].message.content
    assert text == "one two three fo"


def test_a_reply_is_cut_at_max_tokens(client):
    done = client.chat.completions.create(
        model="m", messages=COUNT, temperature=0, max_completion_tokens=4, extra_body=OFF
    )
    assert done.choices[0].finish_reason == "length"
    assert COUNTS.content.startswith(done.choices[0].message.content)


def test_a_final_message_can_be_continued(client):
    begun = [*COUNT, {"role": "assistant", "content": "one two three"}]
    done = client.chat.completions.create(
        model="m", messages=begun, temperature=0, extra_body=OFF | {"continue_final_message": True}
    )
    assert done.choices[0].message.content.strip() == "four five six seven eight nine ten"


def test_token_ids_can_be_returned_and_sent(client, live):
    done = client.chat.completions.create(
        model="m", messages=HELLO, temperature=0, extra_body={"return_token_ids": True}
    ).choices[0]
    again = client.chat.completions.create(
        model="m",
        messages=HELLO,
        temperature=0,
        extra_body={"input_ids": done.prompt_token_ids, "return_token_ids": True},
    ).choices[0]
    assert again.token_ids == done.token_ids and again.message == done.message
    assert done.prompt_token_ids[0] == live.tokenizer.token_to_id("[gMASK]")


def test_top_logprobs_contain_the_greedy_token(client):
    done = client.chat.completions.create(
        model="m", messages=HELLO, temperature=0, logprobs=True, top_logprobs=3
    )
    for entry in done.choices[0].logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert entry.top_logprobs[0].token == entry.token


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"top_p": 0},
        {"n": 0},
        {"max_tokens": 0},
        {"max_tokens": -5},
        {"stop": [""]},
        {"messages": []},
        {"messages": [{"role": "wizard", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"logit_bias": {"99999999": 1}},
        {"logit_bias": {"x": 1}},
        {"top_logprobs": 3},
        {"logprobs": True, "top_logprobs": 10_000},
        {"tool_choice": "required"},
        {"tools": [{"type": "function", "function": {}}]},
        {"response_format": {"type": "poem"}},
        {"stop_token_ids": [-1]},
        {"routed_dp_rank": 5},
        {"input_ids": [10**6]},
        {"input_ids": []},
    ],
)
def test_an_invalid_request_gets_400(client, live, wrong):
    body = {"model": "m", "messages": HELLO, "max_tokens": 3} | wrong
    found = live.post("/v1/chat/completions", body)
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert error["type"] == "invalid_request_error" and error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    streamed = live.post("/v1/chat/completions", body | {"stream": True})
    assert streamed.status_code == 400 and streamed.json() == found.json()


async def request_and_disconnect(live, body):
    async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="none") as client:
        pending = asyncio.create_task(client.chat.completions.create(**body))
        await until_async(lambda: any(engine.stats().waiting for engine in live.engines))
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
def test_disconnecting_aborts_the_request(client, live, stream):
    before = sum(engine.stats().counters.aborted for engine in live.engines)
    slow = {"model": "m", "messages": COUNT, "temperature": 1.0, "extra_body": {"ignore_eos": True}}
    if stream:
        found = client.chat.completions.create(**slow, stream=True)
        next(iter(found))
        found.close()
    else:
        for engine in live.engines:
            engine.pause(
                "in_place"
            )  # otherwise a fast engine finishes before the client disconnects
        asyncio.run(request_and_disconnect(live, slow))
    until(lambda: sum(engine.stats().counters.aborted for engine in live.engines) > before)
    for engine in live.engines:
        engine.resume()
    assert live.audit() == []
