"""The anthropic client against a real server."""

import anthropic
import pytest

from tests.serve.memorized_model import CONTEXT, WEATHER

TOOLS = [{"name": WEATHER.name, "description": "Weather", "input_schema": dict(WEATHER.parameters)}]
HELLO = [{"role": "user", "content": "Say hello."}]
OSLO = [{"role": "user", "content": "Weather in Oslo?"}]
GREEDY = {"model": "glm-5[1m]", "max_tokens": 100, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def client(live):
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as found:
        yield found


def test_a_plain_message(client):
    done = client.messages.create(**GREEDY, messages=HELLO)
    thought, text = done.content
    assert (thought.type, thought.thinking) == ("thinking", "A greeting.")
    assert (text.type, text.text) == ("text", "Hello there, friend!")
    assert (done.stop_reason, done.stop_sequence, done.model) == ("end_turn", None, "glm-5[1m]")


def test_thinking_can_be_disabled_and_bounded(client):
    off = client.messages.create(**GREEDY, messages=HELLO, thinking={"type": "disabled"})
    assert [block.type for block in off.content] == ["text"]
    few = client.messages.create(
        **GREEDY, messages=HELLO, thinking={"type": "enabled", "budget_tokens": 1}
    )
    assert few.content[0].thinking == "A"


def test_a_stream_of_reasoning_text_and_call(client):
    with client.messages.stream(**GREEDY, messages=OSLO, tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        done = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    thought, text, call = done.content
    assert (thought.thinking, text.text) == ("Need the tool.", "Checking.")
    assert (call.name, call.input) == ("get_weather", {"city": "Oslo", "days": 2})
    assert done.stop_reason == "tool_use"
    whole = client.messages.create(**GREEDY, messages=OSLO, tools=TOOLS)
    assert [b.type for b in whole.content] == [b.type for b in done.content]
    assert done.usage.output_tokens == whole.usage.output_tokens
    total = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert done.usage.input_tokens + done.usage.cache_read_input_tokens == total


def test_a_tool_result_round_trip(client):
    first = client.messages.create(**GREEDY, messages=OSLO, tools=TOOLS)
    call = first.content[-1]
    past = [
        *OSLO,
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
    ]
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": [{"type": "text", "text": '{"t": 12}'}],
    }
    second = client.messages.create(
        **GREEDY, messages=[*past, {"role": "user", "content": [result]}], tools=TOOLS
    )
    assert second.content[-1].text == "12 C in Oslo."
    # The reasoning was sent back, so the prompt extends the first reply.
    assert second.usage.cache_read_input_tokens >= 80


def test_thinking_blocks_are_signed(client):
    """litellm drops thinking blocks with an empty signature from the next request."""
    whole = client.messages.create(**GREEDY, messages=HELLO)
    with client.messages.stream(**GREEDY, messages=HELLO) as stream:
        streamed = stream.get_final_message()
    assert whole.content[0].signature
    assert streamed.content[0].signature == whole.content[0].signature


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner_keeps_its_conversation(client, stream):
    """It sends the whole history once it knows that the server stores none."""
    calls = []

    def get_weather(city, days):
        calls.append((city, days))
        return '{"t": 12}'

    tool = anthropic.beta_tool(
        get_weather, description="Weather", input_schema=dict(WEATHER.parameters)
    )
    runner = client.beta.messages.tool_runner(**GREEDY, messages=OSLO, tools=[tool], stream=stream)
    done = runner.until_done()
    assert (calls, done.content[-1].text) == ([("Oslo", 2)], "12 C in Oslo.")


def test_a_container_request_is_rejected_with_an_error_its_client_understands(client):
    with pytest.raises(
        anthropic.BadRequestError, match="thread: this server stores no threads"
    ) as found:
        client.messages.create(
            **GREEDY | {"extra_body": {"thread": {"type": "create"}}}, messages=HELLO
        )
    assert found.value.body["error"]["details"] == {"error_code": "thread_unsupported_request"}


@pytest.mark.parametrize(
    "tools", [None, TOOLS, [*TOOLS, {"type": "web_search_20250305", "name": "web_search"}]]
)
@pytest.mark.parametrize("system", [None, "Be brief.", [{"type": "text", "text": "Be brief."}]])
def test_counted_tokens_equal_the_usage(client, tools, system):
    params = {"messages": OSLO}
    params |= {"tools": tools} if tools else {}
    params |= {"system": system} if system else {}
    counted = client.messages.count_tokens(model="m", **params).input_tokens
    used = client.messages.create(**(GREEDY | {"max_tokens": 1}), **params).usage
    assert counted == used.input_tokens + used.cache_read_input_tokens


def test_the_billing_header_is_removed_from_the_prompt(client):
    def count(system):
        return client.messages.count_tokens(model="m", messages=HELLO, system=system).input_tokens

    billed = "x-anthropic-billing-header: cc_version=1.2.3; cch=abc\nBe brief."
    assert count(billed) == count("Be brief.")


def test_a_stop_sequence(client):
    done = client.messages.create(
        **GREEDY, messages=HELLO, stop_sequences=["there"], thinking={"type": "disabled"}
    )
    assert (done.stop_reason, done.stop_sequence) == ("stop_sequence", "there")
    assert done.content[0].text == "Hello "


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_call_can_be_required(client, choice):
    done = client.messages.create(**GREEDY, messages=OSLO, tools=TOOLS, tool_choice=choice)
    assert [block.type for block in done.content] == ["thinking", "tool_use"]


def test_max_tokens_is_cut_to_the_context_and_a_long_prompt_rejected(client):
    done = client.messages.create(**(GREEDY | {"max_tokens": 20_000}), messages=HELLO)
    assert done.stop_reason == "end_turn"
    with pytest.raises(anthropic.BadRequestError, match=rf"tokens > {CONTEXT - 1} maximum"):
        client.messages.create(**GREEDY, messages=[{"role": "user", "content": "ten " * CONTEXT}])


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"max_tokens": None},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"thinking": {"type": "sometimes"}},
        {"tool_choice": {"type": "whatever"}},
        {"tools": [{"name": "", "input_schema": {}}]},
        {"system": [{"type": "image"}]},
    ],
)
def test_errors_have_the_shape_of_the_api(live, wrong):
    body = {"max_tokens": 3, "messages": HELLO} | wrong
    found = live.post("/v1/messages", body)
    assert found.status_code == 400
    params = found.json()
    assert (params["type"], params["error"]["type"]) == ("error", "invalid_request_error")
