"""Chat requests of every API: sampling fields, thinking options, messages and tools."""

import pytest

from paddock.api import thinking_options
from paddock.api.anthropic_request import (
    CountTokensBody,
    MessagesBody,
    parse_count_tokens_request,
    parse_messages_request,
)
from paddock.api.body import parse_body
from paddock.api.openai_chat_request import ChatCompletionBody, parse_chat_request
from paddock.api.openai_responses_request import ResponsesBody, parse_responses_request
from paddock.api.sampling_fields import SamplingFields, parse_sampling_params
from paddock.api.thinking_options import NO_THINKING_OPTIONS, ThinkingOptions
from paddock.records import ApiError, LogitBias, SamplingParams
from paddock.text import ThinkingKwargs

DEFAULTS = SamplingParams(temperature=0.7, top_p=0.9, top_k=40)
SERVER = ThinkingOptions(thinking=ThinkingKwargs(clear_thinking=False), budget=500)
HI = [{"role": "user", "content": "Hi"}]


def chat_request(**fields):
    return parse_chat_request(
        parse_body(ChatCompletionBody, {"messages": HI} | fields), DEFAULTS, SERVER
    )


def test_sampling_fields_override_defaults():
    fields = parse_body(
        SamplingFields, {"top_k": -1, "stop": "x", "logit_bias": {"5": -3}, "seed": -1}
    )
    found = parse_sampling_params(fields, max_new_tokens=9, defaults=DEFAULTS)
    assert (found.temperature, found.top_p, found.top_k) == (0.7, 0.9, None)
    assert found.stop == ("x",) and found.logit_bias == (LogitBias(5, -3.0),)
    assert found.seed == 2**63 - 1 and found.max_new_tokens == 9
    assert (
        parse_sampling_params(
            parse_body(SamplingFields, {}), max_new_tokens=None, defaults=DEFAULTS
        ).top_k
        == 40
    )


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": -1}, "temperature: must be at least 0, got -1.0"),
        ({"temperature": "1"}, "temperature: Input should be a valid number"),
        ({"temperature": True}, "temperature: Input should be a valid number"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1, got 0"),
        ({"stop_token_ids": [-4]}, "stop_token_ids: must not hold a negative id, got (-4,)"),
        ({"seed": 1.5}, "seed: Input should be a valid integer"),
    ],
)
def test_an_invalid_field_is_named_as_the_client_sent_it(fields, named):
    with pytest.raises(ApiError) as error_info:
        chat_request(**fields)
    assert str(error_info.value) == named and error_info.value.param == next(iter(fields))


def test_both_names_of_max_tokens():
    assert chat_request(max_tokens=5).sampling.max_new_tokens == 5
    assert chat_request(max_tokens=5, max_completion_tokens=7).sampling.max_new_tokens == 7
    assert chat_request().sampling.max_new_tokens is None


# --- thinking -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected", "budget"),
    [
        ({}, {"clear_thinking": False}, 500),
        ({"reasoning_effort": "high"}, {"clear_thinking": False, "reasoning_effort": "high"}, 500),
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "clear_thinking": False}, 500),
        (
            {"thinking": {"type": "enabled", "clear_thinking": True}},
            {"enable_thinking": True, "clear_thinking": True},
            500,
        ),
        (
            {"reasoning": {"effort": "low", "max_tokens": 9}},
            {"clear_thinking": False, "reasoning_effort": "low"},
            9,
        ),
        ({"thinking_token_budget": 3}, {"clear_thinking": False}, 3),
        ({"max_thinking_tokens": 4}, {"clear_thinking": False}, 4),
        (
            {"chat_template_kwargs": {"thinking": True}, "reasoning_effort": "none"},
            {"enable_thinking": True, "clear_thinking": False},
            500,
        ),
    ],
)
def test_every_way_to_request_thinking(fields, expected, budget):
    request = chat_request(**fields)
    assert request.thinking.as_kwargs == expected
    assert request.sampling.thinking_budget == budget


def test_chat_template_kwargs_are_merged_with_the_defaults():
    request = chat_request(chat_template_kwargs={"enable_thinking": False})
    assert request.thinking == ThinkingKwargs(enable_thinking=False, clear_thinking=False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"chat_template_kwargs": {"enable_thinking": "no"}},
        {"thinking": {"type": 5}},
        {"thinking": {"type": "enabled", "budget_tokens": -1}},
        {"thinking": {"type": "enabled", "budget_tokens": True}},
        {"reasoning": {"effort": 3}},
        {"thinking_token_budget": -2},
    ],
)
def test_invalid_thinking_options_are_rejected(wrong):
    with pytest.raises(ApiError) as error_info:
        chat_request(**wrong)
    assert error_info.value.param == next(iter(wrong))


def test_explicit_thinking_options_take_precedence():
    strong, weak = (
        ThinkingOptions(budget=1),
        ThinkingOptions(thinking=ThinkingKwargs(enable_thinking=False), budget=2),
    )
    assert thinking_options.merge_thinking_options(strong, weak) == ThinkingOptions(
        thinking=weak.thinking, budget=1
    )
    assert thinking_options.merge_thinking_options() == NO_THINKING_OPTIONS


# --- conversations --------------------------------------------------------------------------------

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"far": 2}'}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def test_three_apis_parse_the_same_conversation():
    openai = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look."},
        {"role": "assistant", "reasoning": "Far.", "content": "So:", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "sky"},
    ]
    blocks = [
        {"type": "thinking", "thinking": "Far.", "signature": ""},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "So:"},
        {"type": "tool_use", "id": "c1", "name": "look", "input": {"far": 2}},
    ]
    result = {
        "type": "tool_result",
        "tool_use_id": "c1",
        "content": [{"type": "text", "text": "sky"}],
    }
    anthropic = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [result]},
    ]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Look."}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Far."}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "So:"}],
        },
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"far": 2}'},
        {"type": "web_search_call", "id": "w"},
        {"type": "function_call_output", "call_id": "c1", "output": "sky"},
    ]
    tools = {"tools": [TOOL]}
    bare = {"tools": [{"name": "look", "input_schema": {"type": "object"}}]}
    first = parse_chat_request(
        parse_body(ChatCompletionBody, {"messages": openai} | tools), DEFAULTS, SERVER
    )
    body = {"messages": anthropic, "system": "Be brief.", "max_tokens": 5} | bare
    second = parse_messages_request(parse_body(MessagesBody, body), DEFAULTS, SERVER)
    flat = {"tools": [{"type": "function"} | TOOL["function"]]}
    body = {"input": items, "instructions": "Be brief."} | flat
    third = parse_responses_request(parse_body(ResponsesBody, body), DEFAULTS, SERVER)
    assert first.messages == second.messages == third.messages
    assert first.tools == second.tools == third.tools
    counted = {"messages": anthropic, "system": "Be brief."} | bare
    assert (
        parse_count_tokens_request(parse_body(CountTokensBody, counted), SERVER).messages
        == second.messages
    )


def test_a_failed_tool_and_text_next_to_results():
    fields = [
        {"type": "tool_result", "tool_use_id": "c1", "is_error": True, "content": "no sky"},
        {"type": "text", "text": "Try again."},
    ]
    body = {"messages": [{"role": "user", "content": fields}], "max_tokens": 5}
    request = parse_messages_request(parse_body(MessagesBody, body), DEFAULTS, SERVER)
    assert [(m.role, m.content) for m in request.messages] == [
        ("tool", "Error: no sky"),
        ("user", "Try again."),
    ]


def test_separate_replies_of_the_responses_api_stay_separate():
    def thought(text):
        return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}

    items = [
        thought("One."),
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "f", "arguments": "{}"},
        thought("Two."),
        {"type": "message", "role": "assistant", "content": "Done."},
    ]
    request = parse_responses_request(parse_body(ResponsesBody, {"input": items}), DEFAULTS, SERVER)
    one, two = request.messages
    assert (one.reasoning, [call.id for call in one.tool_calls]) == ("One.", ["a", "b"])
    assert (two.reasoning, two.content, two.tool_calls) == ("Two.", "Done.", ())


@pytest.mark.parametrize(
    "kept",
    [{"previous_response_id": "r"}, {"conversation": {"id": "c"}}, {"prompt": {"id": "p"}}],
)
def test_unknown_stored_items_are_rejected(kept):
    with pytest.raises(ApiError, match="stores no"):
        parse_responses_request(parse_body(ResponsesBody, {"input": "x"} | kept), DEFAULTS, SERVER)


def test_an_invalid_stop_is_named_as_in_its_api():
    with pytest.raises(ApiError, match="max_output_tokens: must be at least 1, got 0") as caught:
        parse_responses_request(
            parse_body(ResponsesBody, {"input": "x", "max_output_tokens": 0}), DEFAULTS, SERVER
        )
    assert caught.value.param == "max_output_tokens"
    fields = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    with pytest.raises(ApiError, match="stop_sequences: "):
        parse_messages_request(
            parse_body(MessagesBody, fields | {"stop_sequences": [""]}), DEFAULTS, SERVER
        )


@pytest.mark.parametrize(
    ("choice", "tools", "must", "only"),
    [
        (None, 1, False, None),
        ("auto", 1, False, None),
        ("none", 0, False, None),
        ("required", 1, True, None),
        ({"type": "function", "function": {"name": "look"}}, 1, True, "look"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, 0, False, None),
    ],
)
def test_choices_of_tools(choice, tools, must, only):
    request = chat_request(tools=[TOOL, {"type": "web_search"}], tool_choice=choice)
    assert (len(request.tools), request.must_call, request.only_tool) == (tools, must, only)
    assert request.skipped_tools == ("web_search",)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_choice_among_allowed_tools(mode):
    """In the format of the chat and the Responses API; tools that are not functions are skipped."""
    other = {"type": "function", "name": "wait", "parameters": {}}
    listed = [{"type": "function", "name": "look"}, {"type": "web_search"}]
    flat = {"type": "allowed_tools", "mode": mode, "tools": listed}
    named = [{"type": "function", "function": {"name": "look"}}]
    nested = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    body = {"input": "x", "tools": [TOOL, other, {"type": "web_search"}], "tool_choice": flat}
    for request in (
        chat_request(tools=[TOOL, other], tool_choice=nested),
        parse_responses_request(parse_body(ResponsesBody, body), DEFAULTS, SERVER),
    ):
        assert [tool.name for tool in request.tools] == ["look"]
        assert request.must_call == (mode == "required")


@pytest.mark.parametrize(
    "choice",
    [
        "maybe",
        {"type": "function", "function": {"name": "no"}},
        {},
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "allowed_tools": 3},
        {"type": "allowed_tools", "mode": "required", "tools": []},
        {"type": "allowed_tools", "mode": "none", "tools": [{"name": "look"}]},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "no"}]},
    ],
)
def test_a_choice_of_an_unknown_tool_is_rejected(choice):
    with pytest.raises(ApiError, match="tool_choice"):
        chat_request(tools=[TOOL], tool_choice=choice)


def test_two_tools_with_the_same_name_are_rejected():
    with pytest.raises(ApiError, match="duplicate name 'look'"):
        chat_request(tools=[TOOL, TOOL])


# --- prompts --------------------------------------------------------------------------------------
