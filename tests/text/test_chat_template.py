import json

import pytest
from transformers import PreTrainedTokenizerFast

from paddock.records import Message, ToolCall
from paddock.text import (
    DEFAULT_THINKING,
    ChatTemplate,
    ChatTemplateError,
    ThinkingKwargs,
    get_renderer,
    parse_messages,
    with_chat_template,
)
from paddock.text.chat_template import (
    GLM_VERSIONS,
    detect_glm_version,
    glm_chat_template,
    glm_chat_template_source,
    ignored_thinking_kwargs,
)
from paddock.text.glm_renderer import GlmRenderer
from paddock.text.messages import parse_tools
from tests.data.tiny import byte_tokenizer

RAW_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
CALL = {"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}
RAW = [
    {"role": "system", "content": "You are helpful."},
    {"role": "user", "content": "Weather in Oslo for 2 days?"},
    {
        "role": "assistant",
        "reasoning_content": "Need the tool.",
        "content": "Checking.",
        "tool_calls": [{"id": "call_1", "type": "function", "function": CALL}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": '{"t": 12}'},
]
RAW2 = [
    *RAW,
    {"role": "assistant", "reasoning_content": "It is 12.", "content": "12 C."},
    {"role": "user", "content": "And Bergen?"},
]
SECOND = {"role": "tool", "tool_call_id": "call_2", "content": "x"}
HI = [{"role": "user", "content": "Hi"}]

TOOLS = (
    "\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    '{"type": "function", "function": {"name": "get_weather", "description": "Weather", '
    '"parameters": {"type": "object", "properties": {"city": {"type": "string"}, '
    '"days": {"type": "integer"}}, "required": ["city"]}}}\n</tools>\n\n'
    "For each function call, output the function name and arguments within the following XML "
    "format:\n<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}"
    "</arg_value><arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>"
)
BARE_TOOLS = TOOLS.replace('{"type": "function", "function": ', "").replace('"]}}}', '"]}}')
TOOL_CALL = (
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
    "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
)
HEAD = f"[gMASK]<sop><|system|>{TOOLS}"
PROMPT = "<|system|>You are helpful.<|user|>Weather in Oslo for 2 days?<|assistant|>"
SEEN = '<|observation|><tool_response>{"t": 12}</tool_response>'
THOUGHT = f"{PROMPT}<think>Need the tool.</think>Checking.{TOOL_CALL}{SEEN}"
KEPT = f"{THOUGHT}<|assistant|><think>It is 12.</think>12 C.<|user|>And Bergen?<|assistant|>"
CLEARED = (
    f"{PROMPT}</think>Checking.{TOOL_CALL}{SEEN}"
    "<|assistant|></think>12 C.<|user|>And Bergen?<|assistant|>"
)
OFF, KEEP = ThinkingKwargs(enable_thinking=False), ThinkingKwargs(clear_thinking=False)
BOTH = ThinkingKwargs(enable_thinking=False, clear_thinking=False)

# The reference's own renderings, GLM-5.
GOLDEN = {
    "A": (HI, False, DEFAULT_THINKING, "[gMASK]<sop><|user|>Hi<|assistant|><think>"),
    "B": (HI, False, OFF, "[gMASK]<sop><|user|>Hi<|assistant|></think>"),
    "C": (RAW, True, DEFAULT_THINKING, f"{HEAD}{THOUGHT}<|assistant|><think>"),
    "D": (RAW2, True, DEFAULT_THINKING, f"{HEAD}{CLEARED}<think>"),
    "E": (RAW2, True, KEEP, f"{HEAD}{KEPT}<think>"),
    "F": (RAW2, True, BOTH, f"{HEAD}{KEPT}</think>"),
    "G": (HI, True, DEFAULT_THINKING, f"{HEAD}<|user|>Hi<|assistant|><think>"),
    "I": (
        [*RAW, SECOND],
        True,
        DEFAULT_THINKING,
        f"{HEAD}{THOUGHT}<tool_response>x</tool_response><|assistant|><think>",
    ),
}


def both(version, raw, tools, thinking=DEFAULT_THINKING):
    """The Jinja text, and the decoded tokens."""
    messages, specs = parse_messages(raw), parse_tools(RAW_TOOLS if tools else None)
    template, renderer = glm_chat_template(version), GlmRenderer(byte_tokenizer(), version=version)
    text = template.render(messages, tools=specs, thinking=thinking, add_generation_prompt=True)
    prompt = renderer.render_prompt(messages, tools=specs, thinking=thinking)
    return text, byte_tokenizer().decode(prompt.token_ids)


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_renderings_of_the_reference(case):
    raw, tools, thinking, golden = GOLDEN[case]
    assert both("5", raw, tools, thinking) == (golden, golden)


EFFORT = "[gMASK]<sop><|system|>Reasoning Effort: "
LATER = [  # version, messages, tools, thinking, rendering
    (
        "5.1",
        HI,
        True,
        DEFAULT_THINKING,
        f"[gMASK]<sop><|system|>{BARE_TOOLS}<|user|>Hi<|assistant|><think>",
    ),
    ("5.1", RAW2, True, KEEP, f"[gMASK]<sop><|system|>{BARE_TOOLS}{KEPT}<think>"),
    ("5.1", RAW2, True, DEFAULT_THINKING, f"[gMASK]<sop><|system|>{BARE_TOOLS}{CLEARED}<think>"),
    ("5.2", HI, False, DEFAULT_THINKING, f"{EFFORT}Max<|user|>Hi<|assistant|><think>"),
    (
        "5.2",
        HI,
        False,
        ThinkingKwargs(reasoning_effort="high"),
        f"{EFFORT}High<|user|>Hi<|assistant|><think>",
    ),
    (
        "5.2",
        HI,
        False,
        ThinkingKwargs(reasoning_effort="low"),
        f"{EFFORT}Max<|user|>Hi<|assistant|><think>",
    ),
    ("5.2", HI, False, OFF, "[gMASK]<sop><|user|>Hi<|assistant|><think></think>"),
    (
        "5.2",
        RAW2,
        True,
        DEFAULT_THINKING,
        f"{EFFORT}Max<|system|>{BARE_TOOLS}{CLEARED}<think>".replace(
            "<|assistant|></think>", "<|assistant|><think></think>"
        ),
    ),
    ("5.3", RAW2, True, DEFAULT_THINKING, f"{EFFORT}Max<|system|>{BARE_TOOLS}{KEPT}<think>"),
    ("5.3", HI, False, OFF, f"{EFFORT}Max<|user|>Hi<|assistant|><think>"),
    (
        "5.3",
        HI,
        False,
        ThinkingKwargs(reasoning_effort="low"),
        f"{EFFORT}Low<|user|>Hi<|assistant|><think>",
    ),
]


@pytest.mark.parametrize(("version", "raw", "tools", "thinking", "golden"), LATER)
def test_golden_renderings_of_later_versions(version, raw, tools, thinking, golden):
    assert both(version, raw, tools, thinking) == (golden, golden)


def test_5_1_marks_the_newest_reply_without_reasoning():
    raw = [
        *HI,
        {"role": "assistant", "content": "Hello"},
        *HI,
        {"role": "assistant", "content": "Yes"},
    ]
    text, _ = both("5.1", raw, False)
    assert "<|assistant|></think>Hello<|user|>Hi<|assistant|><think></think>Yes" in text


def test_5_3_puts_results_in_the_order_of_the_calls():
    two = [{"id": name, "function": {"name": "get_weather"}} for name in ("a", "b")]
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in ("b", "a")]
    raw = [*HI, {"role": "assistant", "tool_calls": two}, *results]
    sorted_, given = (
        "<tool_response>{}</tool_response><tool_response>{}</tool_response>",
        ("b", "a"),
    )
    for version in GLM_VERSIONS:
        order = sorted(given) if version == "5.3" else given
        assert all(sorted_.format(*order) in text for text in both(version, raw, True))
    # Ids may differ in case alone.
    two[1]["id"], results[0]["tool_call_id"] = "A", "A"
    assert all(sorted_.format("a", "b") in text for text in both("5.3", raw, True))
    # Not if a result is missing or duplicated.
    for changed in (results[:1], [*results, results[0]]):
        for text in both("5.3", [*HI, raw[1], *changed], True):
            assert text.index("<tool_response>b") == text.index("<tool_response>")


@pytest.mark.parametrize(
    ("content", "shown", "opened"),
    [
        ("<think>Hm.</think>Yes.", "<think>Hm.</think>Yes.", "<think>Hm.</think>Yes."),
        ("\n<think>\n Hm.\n</think>\n\nYes.", "<think>Hm.</think>Yes.", "<think>Hm.</think>Yes."),
        ("Hm.</think>Yes.</think>No.", "<think>Hm.</think>Yes.</think>No.", None),
        ("<think>\n</think>Yes.", "</think>Yes.", "<think></think>Yes."),
        ("<think> </think>Yes.", "<think></think>Yes.", "<think></think>Yes."),
    ],
)
def test_reasoning_may_be_inside_content(content, shown, opened):
    raw = [*HI, {"role": "assistant", "content": content}]
    for version, expected in (("5", shown), ("5.2", opened or shown), ("5.3", opened or shown)):
        for text in both(version, raw, False):
            assert f"<|assistant|>{expected}<|assistant|>" in text


@pytest.mark.parametrize("version", GLM_VERSIONS)
def test_null_content_is_empty_and_json_text_does_not_fail(version):
    call = {**CALL, "arguments": json.dumps(CALL["arguments"])}
    raw = [*HI, {"role": "assistant", "content": None, "tool_calls": [{"function": call}]}]
    for text in both(version, raw, True):
        assert f"</think>{TOOL_CALL}<|assistant|>" in text
        assert "None" not in text and "null" not in text


# --- in other programs ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peer")
    byte_tokenizer().save(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("version", GLM_VERSIONS)
def test_transformers_renders_the_same_from_our_file(peer, version):
    for raw, tools, thinking, _ in GOLDEN.values():
        theirs = peer.apply_chat_template(
            raw,
            tools=RAW_TOOLS if tools else None,
            chat_template=glm_chat_template_source(version),
            tokenize=False,
            add_generation_prompt=True,
            **thinking.as_kwargs,
        )
        assert theirs == both(version, raw, tools, thinking)[0]


def test_our_template_handles_inputs_that_the_published_one_does_not(peer):
    calls = [
        {"function": {"name": "now", "arguments": '{"zone": 1}'}},
        {"function": {"name": "now"}},
    ]
    raw = [*HI, {"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool"}]
    text = peer.apply_chat_template(
        raw, chat_template=glm_chat_template_source("5.3"), tokenize=False
    )
    expected = '</think><tool_call>now{"zone": 1}</tool_call><tool_call>now</tool_call>'
    assert text.endswith(f"{expected}<|observation|><tool_response></tool_response>")


@pytest.mark.parametrize("version", GLM_VERSIONS)
def test_a_saved_template_is_recognised_by_its_rendering(tmp_path, version):
    with_chat_template(byte_tokenizer(), version).save(tmp_path)
    renderer = get_renderer(type(byte_tokenizer()).load(tmp_path))
    assert isinstance(renderer, GlmRenderer) and renderer.version == version
    other = ChatTemplate(glm_chat_template_source(version).replace("[gMASK]", ""), name="other")
    assert detect_glm_version(other) is None


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "thinking", "names"),
    [
        ("5", ThinkingKwargs(enable_thinking=False, clear_thinking=True), []),
        ("5", ThinkingKwargs(reasoning_effort="high"), ["reasoning_effort"]),
        ("5.1", ThinkingKwargs(reasoning_effort="max"), ["reasoning_effort"]),
        ("5.2", ThinkingKwargs(reasoning_effort="high"), []),
        ("5.2", ThinkingKwargs(reasoning_effort="low"), ["reasoning_effort"]),
        (
            "5.2",
            ThinkingKwargs(enable_thinking=False, reasoning_effort="high"),
            ["reasoning_effort"],
        ),
        ("5.3", ThinkingKwargs(reasoning_effort="low", clear_thinking=True), []),
        ("5.3", ThinkingKwargs(enable_thinking=False), ["enable_thinking"]),
        ("5.3", ThinkingKwargs(enable_thinking=True), []),
    ],
)
def test_ignored_settings_change_nothing_and_are_named(version, thinking, names):
    assert list(ignored_thinking_kwargs(version, thinking)) == names
    rest = {name: value for name, value in thinking.as_kwargs.items() if name not in names}
    assert both(version, RAW2, True, thinking) == both(version, RAW2, True, ThinkingKwargs(**rest))


def test_an_unknown_version_is_rejected_with_the_known_ones():
    with pytest.raises(
        ChatTemplateError, match=r"GLM version must be one of 5, 5.1, 5.2, 5.3, got '6'"
    ):
        glm_chat_template_source("6")


# --- other templates ------------------------------------------------------------------------------

USER = Message(role="user", content="Hi")


def of_files(**files):
    content = {name.replace("__", "."): text.encode() for name, text in files.items()}
    return ChatTemplate.from_tokenizer(
        type(byte_tokenizer())({**byte_tokenizer().files, **content}, name="m")
    )


def test_a_folder_has_its_template_in_a_file_or_in_its_config():
    config = {"chat_template": "config {{ bos_token }}", "bos_token": {"content": "<s>"}}
    in_config = {"tokenizer_config__json": json.dumps(config)}
    assert of_files(**in_config).render([USER]) == "config <s>"
    assert of_files(**in_config, chat_template__jinja="file").render([USER]) == "file"
    tokens = {"special_tokens_map__json": json.dumps({"bos_token": "<s>"})}
    assert of_files(**tokens, chat_template__jinja="{{ bos_token }}").render([USER]) == "<s>"
    assert of_files() is None


def test_of_several_templates_tools_have_their_own():
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    template = of_files(tokenizer_config__json=json.dumps({"chat_template": named}))
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=parse_tools(RAW_TOOLS)) == "tools"


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{% if %}", "the chat template of m, line 1: Expected an expression"),
        ("{{ raise_exception('roles must alternate') }}", "template of m: roles must alternate"),
        ("{{ messages[0].content.items() }}", "template of m: 'str object' has no attribute"),
        ("{{ messages[7].role }}", "template of m: list object has no element 7"),
        ("{{ 1 // 0 }}", "template of m: integer division or modulo by zero"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' .* is unsafe"),
        ("{{ messages.append(1) }}", "is not safely callable|unsafe"),
        ("{{ strftime_now('%Y') }}", "'strftime_now' is undefined"),
    ],
)
def test_a_template_error_names_the_template_and_the_reason(source, complaint):
    with pytest.raises(ChatTemplateError, match=complaint):
        ChatTemplate(source, name="m").render([USER])


def test_templates_may_break_loops_and_mark_generation():
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert ChatTemplate(source, name="m").render([USER, USER]) == "Hi"


def test_control_lines_leave_no_whitespace():
    source = "a\n  {% if true %}\nb\n  {% endif %}\nc"
    assert ChatTemplate(source, name="m").render([USER]) == "a\nb\nc"


def test_json_is_written_as_it_is():
    call = ToolCall(id="a", name="f", arguments={"x": "<\u00e9>'&"})
    reply = Message(role="assistant", content="", tool_calls=(call,))
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert ChatTemplate(source, name="m").render([reply]) == '{"x": "<\u00e9>\'&"}'


def test_arguments_are_passed_as_text_to_templates_that_need_text():
    call = ToolCall(id="a", name="f", arguments={"x": 1})
    reply = Message(role="assistant", content="", tool_calls=(call,))
    source = "{{ 'f' + messages[0].tool_calls[0].function.arguments }}"
    assert ChatTemplate(source, name="m").render([reply]) == 'f{"x": 1}'
