"""Requests in the shapes of agents that people use: each takes its tool turns in one branch.

The shapes are those that the agents of benchmarks/real_agents.py sent, which runs the agents.
"""

import json
from contextlib import contextmanager

import pytest

from paddock.checkpoint import load_pretrained
from paddock.engine import Engine, EngineSettings
from paddock.launch.engines import in_process_client
from paddock.text import Tokenizer, get_renderer
from tests.rollout.agents import HTTP, ChatAgent
from tests.rollout.test_gateway import gateway, opened
from tests.serve.random_model import calling, one_of, save_random_model, saying

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
CHAT_TOOL = {"type": "function", "function": {"name": "bash", "parameters": SCHEMA, "strict": True}}
FLAT_TOOL = {"type": "function", "name": "bash", "parameters": SCHEMA, "strict": False}
REPLY = calling("bash", command="echo hi")


# --- chat -----------------------------------------------------------------------------------------


def chat(body, take):
    return "chat/completions", {"model": "policy", "tools": [CHAT_TOOL], **body}, "messages", take


def text_part(text):
    return [{"type": "text", "text": text}]


def opencode(reply):
    (call,) = calls_of(reply)
    own = {"id": call["id"], "type": "function", "function": call["function"]}
    return [
        {"role": "assistant", "content": None, "tool_calls": [own]},
        {"role": "tool", "tool_call_id": call["id"], "content": "hi"},
    ]


def qwen_code(reply):
    """It writes arguments without blanks, and results as parts."""
    (call,) = calls_of(reply)
    compact = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"))
    own = {"id": call["id"], "type": "function", "function": {"name": "bash", "arguments": compact}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [own]},
        {"role": "tool", "tool_call_id": call["id"], "content": text_part("hi")},
    ]


def mini_swe_agent(reply):
    """Through litellm: the whole reply, with fields that litellm adds."""
    (call,) = calls_of(reply)
    added = {"provider_specific_fields": {"reasoning": None, "refusal": None}}
    message = {"content": None, "role": "assistant", "tool_calls": [call], "function_call": None}
    return [
        message | added,
        {"role": "tool", "tool_call_id": call["id"], "content": "<returncode>0</returncode>"},
    ]


def calls_of(reply):
    return reply["choices"][0]["message"]["tool_calls"]


# --- responses ------------------------------------------------------------------------------------


def responses(body, take):
    tools = [FLAT_TOOL, {"type": "web_search", "external_web_access": True}]
    return "responses", {"model": "policy", "tools": tools, **body}, "input", take


def codex(reply):
    """It sends items with their ids, and results with ids of its own."""
    (call,) = [item for item in reply["output"] if item["type"] == "function_call"]
    return [
        call,
        {
            "type": "function_call_output",
            "id": "fco_01a1f524",
            "call_id": call["call_id"],
            "output": "Process exited with code 0\nOutput:\nhi\n",
        },
    ]


def pydantic_ai(reply):
    (call,) = [item for item in reply["output"] if item["type"] == "function_call"]
    own = {key: call[key] for key in ("name", "arguments", "call_id", "type")}
    return [
        own,
        {"type": "function_call_output", "call_id": call["call_id"], "output": "hi"},
    ]


NAMESPACE = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "tools": [FLAT_TOOL | {"name": "spawn"}],
}
CODEX = {
    "tools": [FLAT_TOOL, NAMESPACE, {"type": "web_search", "external_web_access": True}],
    "instructions": "You are a coding agent.",
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a1f523-ef8b",
    "client_metadata": {"thread_id": "01a1f523-ef8b"},
    "input": [
        {
            "type": "message",
            "id": f"msg_{number}",
            "role": role,
            "content": [{"type": "input_text", "text": text}],
        }
        for number, (role, text) in enumerate(
            [("developer", "<skills/>"), ("user", "<cwd>/work</cwd>"), ("user", "Say hi.")]
        )
    ],
}

# --- messages -------------------------------------------------------------------------------------


def messages(body, take):
    tools = [{"name": "bash", "input_schema": SCHEMA, "eager_input_streaming": True}]
    return (
        "messages",
        {"model": "policy", "max_tokens": 32, "tools": tools, **body},
        "messages",
        take,
    )


def claude_code(reply):
    (call,) = [block for block in reply["content"] if block["type"] == "tool_use"]
    result = {"tool_use_id": call["id"], "type": "tool_result", "content": "hi", "is_error": False}
    return [
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result | {"cache_control": {"type": "ephemeral"}}]},
    ]


CLAUDE_CODE = {
    "max_tokens": 32_000,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "metadata": {"user_id": "{}"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "messages": [
        {"role": "user", "content": [*text_part("<system-reminder/>"), *text_part("Say hi.")]},
        {"role": "system", "content": "Available agent types: none."},
    ],
}

ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hi."}]
SHAPES = {
    "opencode": chat({"messages": ASK, "tool_choice": "auto", "max_tokens": 4000}, opencode),
    "qwen-code": chat({"messages": ASK, "max_tokens": 8000}, qwen_code),
    "mini-swe-agent": chat({"messages": ASK}, mini_swe_agent),
    "smolagents": chat(
        {
            "messages": [{"role": m["role"], "content": text_part(m["content"])} for m in ASK],
            "stop": ["Observation:", "Calling tools:"],
            "tool_choice": "required",
        },
        mini_swe_agent,
    ),
    "codex": responses(CODEX, codex),
    "openai-agents": responses(
        {"input": ASK[1:], "instructions": "Be brief.", "include": []}, codex
    ),
    "pydantic-ai": responses({"input": ASK, "tool_choice": "auto"}, pydantic_ai),
    "claude-code": messages(CLAUDE_CODE, claude_code),
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = save_random_model(tmp_path_factory.mktemp("random") / "model", context=4096)
    settings = EngineSettings(kv_cache_bytes=1 << 24, max_running_requests=8)
    with Engine(load_pretrained(folder), Tokenizer.load(folder), settings) as found:
        yield found


@contextmanager
def session(engine, reply):
    """A session whose every reply is this one."""
    renderer, limit = get_renderer(engine.tokenizer), engine.capacity.context_length
    rules = {
        "response_format": one_of(renderer, reply),
        "chat_template_kwargs": {"enable_thinking": False},
    }
    with gateway(in_process_client(engine), renderer, context_length=limit) as (url, sessions):
        yield opened(url, "s", **rules), sessions["s"].session


def check_three_turns(api):
    facts = HTTP.get(api.url, headers=api.headers).json()
    assert (facts["turns"], facts["branches"], facts["forks"]) == (3, 1, [])


@pytest.mark.parametrize("name", SHAPES)
def test_an_agent_takes_its_tool_turns_in_one_branch(engine, name):
    path, body, field, take = SHAPES[name]
    with session(engine, REPLY) as (api, kept):
        sent = list(body[field])
        for _ in range(3):
            asked = body | {field: sent}
            reply = HTTP.post(f"{api.url}/v1/{path}", json=asked, headers=api.headers)
            assert reply.status_code == 200, reply.text
            sent += take(reply.json())
        check_three_turns(api)
        replies = [node.messages()[1] for node in kept.tree.nodes]
        assert [reply.tool_calls[0].arguments for reply in replies] == [{"command": "echo hi"}] * 3


@pytest.mark.parametrize("added", ["", "</code>"])
def test_a_stop_string_may_be_sent_back_with_the_reply_that_it_ended(engine, added):
    with session(engine, saying("<code>\n1\n</code>")) as (api, _):
        agent = ChatAgent(api, stream=False, tools=[])
        for _ in range(3):
            agent.say("Go on.")
            agent.turn(stop=["</code>"])
            assert agent.messages[-1]["content"] == "<code>\n1\n"
            agent.messages[-1]["content"] += added
        check_three_turns(api)
