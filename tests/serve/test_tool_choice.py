"""A required tool call is a call, whatever the weights say: every client can read it."""

import json
import random

import anthropic
import jsonschema_rs
import openai
import pytest

from benchmarks.schemas import random_schema, smallest
from tests.serve.live import serving

pytest.importorskip("xgrammar", reason="the extra 'grammar' is not installed")

HELLO = [{"role": "user", "content": "Say hello."}]


@pytest.fixture(scope="module")
def hot(folder):
    """So hot that the weights have no say."""
    with serving(folder, temperature=50.0) as server:
        yield server
        assert server.audit() == []


def tool(schema, name="look"):
    return {"type": "function", "function": {"name": name, "parameters": schema}}


@pytest.mark.parametrize("seed", range(10))
def test_openai_reads_every_required_call(hot, seed):
    rng = random.Random(seed)
    schema = random_schema(rng)
    least = smallest(hot.tokenizer, "look", schema)
    client = openai.OpenAI(base_url=f"{hot.url}/v1", api_key="x", max_retries=0)
    done = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        tools=[tool(schema), tool({}, "wait")],
        tool_choice=rng.choice(["required", {"type": "function", "function": {"name": "look"}}]),
        max_tokens=least + 8,
        seed=seed,
        extra_body={"chat_template_kwargs": {"enable_thinking": seed % 2 == 0}},
    ).choices[0]
    assert (done.finish_reason, done.message.content) == ("tool_calls", None)
    (call,) = done.message.tool_calls
    if call.function.name == "look":
        jsonschema_rs.validate(schema, json.loads(call.function.arguments))
    else:
        assert call.function.name == "wait"


@pytest.mark.parametrize("seed", range(10))
def test_anthropic_reads_every_required_call(hot, seed):
    rng = random.Random(100 + seed)
    schema = random_schema(rng)
    least = smallest(hot.tokenizer, "look", schema)
    client = anthropic.Anthropic(base_url=hot.url, api_key="x", max_retries=0)
    done = client.messages.create(
        model="tiny",
        messages=HELLO,
        tools=[{"name": "look", "input_schema": schema}],
        tool_choice=rng.choice([{"type": "any"}, {"type": "tool", "name": "look"}]),
        max_tokens=least + 8,
        thinking={"type": "enabled" if seed % 2 else "disabled", "budget_tokens": 1024},
    )
    assert done.stop_reason == "tool_use"
    (call,) = [block for block in done.content if block.type == "tool_use"]
    jsonschema_rs.validate(schema, call.input)


def test_too_few_tokens_for_any_call_are_refused_with_the_number(hot):
    body = {"messages": HELLO, "tools": [tool({})], "tool_choice": "required", "max_tokens": 1}
    found = hot.post("/v1/chat/completions", body)
    assert found.status_code == 400
    assert "must be at least" in found.json()["error"]["message"]
