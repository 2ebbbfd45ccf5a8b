"""A required tool call is always valid, whatever the weights: every client can parse it."""

import json
import random

import anthropic
import jsonschema_rs
import openai
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Tokens

from benchmarks.schemas import instance, random_schema, smallest
from paddock.checkpoint import save_pretrained
from paddock.model import Transformer
from paddock.text import SpecialToken, Tokenizer
from paddock.text.gguf import tokenizer_from_gguf
from tests.model.networks import grouped_config
from tests.serve.live import serving
from tests.text.test_chat_template_renderer import CHATML
from tests.text.tiny_gguf import write_gguf

pytest.importorskip("xgrammar", reason="the extra 'grammar' is not installed")

HELLO = [{"role": "user", "content": "Say hello."}]


@pytest.fixture(scope="module")
def hot(folder):
    """A temperature so high that sampling is uniform."""
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


@pytest.mark.parametrize("seed", range(4))
def test_a_required_call_is_streamed(hot, seed):
    schema = random_schema(random.Random(200 + seed))
    limit = smallest(hot.tokenizer, "look", schema) + 8
    kept = {"chat_template_kwargs": {"enable_thinking": seed % 2 == 0}}
    client = openai.OpenAI(base_url=f"{hot.url}/v1", api_key="x", max_retries=0)
    with client.chat.completions.stream(
        model="tiny",
        messages=HELLO,
        tools=[tool(schema)],
        tool_choice="required",
        max_tokens=limit,
        extra_body=kept,
    ) as stream:
        for _ in stream:
            pass
        (done,) = stream.get_final_completion().choices
    assert done.finish_reason == "tool_calls"
    (call,) = done.message.tool_calls
    jsonschema_rs.validate(schema, json.loads(call.function.arguments))
    other = anthropic.Anthropic(base_url=hot.url, api_key="x", max_retries=0)
    with other.messages.stream(
        model="tiny",
        messages=HELLO,
        tools=[{"name": "look", "input_schema": schema}],
        tool_choice={"type": "any"},
        max_tokens=limit,
        extra_body=kept,
    ) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    jsonschema_rs.validate(schema, message.content[-1].input)


def required(server, seed, limit):
    """Arguments of a required call, and its schema."""
    schema = random_schema(random.Random(seed))
    body = {"messages": HELLO, "tools": [tool(schema)], "tool_choice": "required", "seed": seed}
    kept = {"chat_template_kwargs": {"enable_thinking": seed % 2 == 0}}
    found = server.post("/v1/chat/completions", body | kept | {"max_tokens": limit(schema)}).json()
    (choice,) = found["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "look"
    return json.loads(call["function"]["arguments"]), schema


def test_a_required_call_with_speculative_decoding(folder, capfd):
    with serving(folder, temperature=50.0, engine={"num_speculative_tokens": 2}) as server:
        for seed in range(300, 306):
            limit = lambda schema: smallest(server.tokenizer, "look", schema) + 8  # noqa: E731
            arguments, schema = required(server, seed, limit)
            jsonschema_rs.validate(schema, arguments)
        assert server.engines[0].stats().counters.draft_tokens > 0
        assert server.audit() == []
    assert "GrammarMatcher" not in capfd.readouterr().err, "no word of every refused draft"


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """A model of another family, whose calls are JSON between markers, as in Qwen."""
    folder = tmp_path_factory.mktemp("family") / "model"
    gguf = write_gguf(folder.with_name("m.gguf"), pre="qwen2")
    files = tokenizer_from_gguf(gguf).files()
    inner = Tokens.from_buffer(files["tokenizer.json"])
    markers = (SpecialToken.TOOL_CALL_OPEN, SpecialToken.TOOL_CALL_CLOSE)
    inner.add_tokens([AddedToken(marker, normalized=False) for marker in markers])
    overrides = {"tokenizer.json": inner.to_str().encode(), "chat_template.jinja": CHATML.encode()}
    words = Tokenizer(files | overrides, name="family")
    end = words.token_to_id("<|im_end|>")
    config = grouped_config("gqa", "gqa", vocab=words.vocab_size, context=4096, eos=(end,))
    save_pretrained(Transformer.from_config(config, seed=1), folder)
    words.save(folder)
    return folder


def test_a_required_call_of_another_family(family):
    def limit(schema):
        call = {"name": "look", "arguments": instance(schema, schema)}
        text = json.dumps(call, ensure_ascii=False)
        return len(server.tokenizer.encode(f"\n{text}\n", specials=False)) + 2 + 8

    with serving(family, temperature=50.0) as server:
        for seed in range(400, 406):
            arguments, schema = required(server, seed, limit)
            jsonschema_rs.validate(schema, arguments)
        assert server.audit() == []


def test_too_few_tokens_for_any_call_are_rejected_with_the_minimum(hot):
    body = {"messages": HELLO, "tools": [tool({})], "tool_choice": "required", "max_tokens": 1}
    found = hot.post("/v1/chat/completions", body)
    assert found.status_code == 400
    assert "must be at least" in found.json()["error"]["message"]
