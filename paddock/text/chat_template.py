"""Chat templates, rendered through Jinja2 as transformers does, and thinking arguments.

`glm5.jinja` holds GLM-5's template in four versions; `glm_chat_template_source` returns one of them
as the `chat_template.jinja` of a released checkpoint.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any, Literal, Self, get_args

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paddock.records import Message, ToolCall, ToolSpec
from paddock.text.tokenizer import TOKENIZER_CONFIG_FILE, Tokenizer

CHAT_TEMPLATE_FILE = "chat_template.jinja"

GlmVersion = Literal["5", "5.1", "5.2", "5.3"]
GLM_VERSIONS: tuple[GlmVersion, ...] = get_args(GlmVersion)


class ChatTemplateError(ValueError):
    """A chat template is missing, invalid, or cannot render a conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingKwargs:
    """The `chat_template_kwargs` about thinking; None means unset.

    GLM-5's default is interleaved thinking: reasoning stays in the prompt until the next user
    message. `clear_thinking=False` preserves it. `enable_thinking=False` turns thinking off for the
    next reply and does not change earlier turns.

    >>> ThinkingKwargs(enable_thinking=False).as_kwargs
    {'enable_thinking': False}
    """

    enable_thinking: bool | None = None
    clear_thinking: bool | None = None
    reasoning_effort: str | None = None

    @property
    def as_kwargs(self) -> dict[str, Any]:
        """The fields that are set."""
        pairs = ((name, getattr(self, name)) for name in self.__slots__)
        return {name: value for name, value in pairs if value is not None}


DEFAULT_THINKING = ThinkingKwargs()


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmTemplateVariant:
    """How a version of GLM-5's template differs from the others; mirrors glm5.jinja."""

    efforts: tuple[str, ...] = ()  # known levels; others map to the last; () means no effort line
    always_thinks: bool = False  # enable_thinking is ignored
    clears: bool = True  # default of clear_thinking
    opens: bool = False  # <think> precedes every reply; reasoning is not stripped
    opens_newest: bool = False  # <think> precedes replies after the last user message
    wraps_tools: bool = False  # in {"type": "function", "function": ...}
    sorts_results: bool = False  # of parallel calls, into the order of the calls

    def is_thinking_enabled(self, thinking: ThinkingKwargs) -> bool:
        return self.always_thinks or thinking.enable_thinking is not False

    def clears_reasoning(self, thinking: ThinkingKwargs) -> bool:
        """Whether reasoning before the last user message is dropped."""
        return self.clears if thinking.clear_thinking is None else thinking.clear_thinking

    def reasoning_effort(self, thinking: ThinkingKwargs) -> str | None:
        """The level in the effort line, or None without such a line."""
        if not self.efforts or not self.is_thinking_enabled(thinking):
            return None
        kwargs = thinking.reasoning_effort
        return kwargs if kwargs in self.efforts else self.efforts[-1]


GLM_TEMPLATE_VARIANTS: dict[GlmVersion, GlmTemplateVariant] = {
    "5": GlmTemplateVariant(wraps_tools=True),
    "5.1": GlmTemplateVariant(opens_newest=True),
    "5.2": GlmTemplateVariant(efforts=("high", "max"), opens=True),
    "5.3": GlmTemplateVariant(
        efforts=("low", "high", "max"),
        always_thinks=True,
        clears=False,
        opens=True,
        sorts_results=True,
    ),
}


def ignored_thinking_kwargs(version: GlmVersion, thinking: ThinkingKwargs) -> dict[str, str]:
    """The fields of `thinking` that GLM-5's template ignores, each with the reason for a warning.

    >>> ignored_thinking_kwargs("5.2", ThinkingKwargs(enable_thinking=True, reasoning_effort="low"))
    {'reasoning_effort': "GLM-5.2 supports high and max: 'low' means max"}
    """
    variant, kwargs = GLM_TEMPLATE_VARIANTS[version], thinking.as_kwargs
    found: dict[str, str] = {}
    if variant.always_thinks and kwargs.get("enable_thinking") is False:
        found["enable_thinking"] = f"GLM-{version} always thinks"
    if "reasoning_effort" in kwargs and variant.reasoning_effort(thinking) is None:
        why = (
            "has no reasoning effort"
            if not variant.efforts
            else "has no reasoning effort with thinking off"
        )
        found["reasoning_effort"] = f"GLM-{version} {why}"
    elif "reasoning_effort" in kwargs and kwargs["reasoning_effort"] not in variant.efforts:
        known = ", ".join(variant.efforts[:-1]) + f" and {variant.efforts[-1]}"
        fallback = f"{kwargs['reasoning_effort']!r} means {variant.efforts[-1]}"
        found["reasoning_effort"] = f"GLM-{version} supports {known}: {fallback}"
    return found


# --- rendering ------------------------------------------------------------------------------------


class ChatTemplate:
    """A chat template from a checkpoint.

    The variables are those of transformers' `apply_chat_template` except the clock
    (`strftime_now`): a prompt that changes with the date cannot be extended. Templates that need
    the date fail with an error that names it.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str,
        with_tools: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """`with_tools` is a separate source for conversations with tools; `variables`, such as
        bos_token, are passed to every rendering."""
        self.name, self.source = name, source
        self._variables = dict(variables or {})
        self._plain = self._compile(source)
        self._with_tools = self._plain if with_tools is None else self._compile(with_tools)
        self._sources = [source, *([with_tools] if with_tools is not None else [])]

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> Self | None:
        """The template in a tokenizer's files: chat_template.jinja, else tokenizer_config.json."""
        config = json.loads(tokenizer.files.get("special_tokens_map.json", b"{}"))
        config |= json.loads(tokenizer.files[TOKENIZER_CONFIG_FILE])
        declared: Any = config.get("chat_template")
        if CHAT_TEMPLATE_FILE in tokenizer.files:
            declared = tokenizer.files[CHAT_TEMPLATE_FILE].decode()
        if isinstance(declared, list):  # several, by name
            declared = {each["name"]: each["template"] for each in declared}
        named = declared if isinstance(declared, dict) else {"default": declared}
        if not isinstance(named.get("default"), str):
            return None
        tokens = {
            key: _token_text(value) for key, value in config.items() if key.endswith("_token")
        }
        return cls(
            named["default"],
            name=tokenizer.name,
            with_tools=named.get("tool_use"),
            variables={key: token for key, token in tokens.items() if token is not None},
        )

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        thinking: ThinkingKwargs = DEFAULT_THINKING,
        add_generation_prompt: bool = False,
    ) -> str:
        """The conversation as text. Raises ChatTemplateError if the template fails."""

        def render_with(arguments: Callable[[ToolCall], object]) -> str:
            template = self._with_tools if tools else self._plain
            return template.render(
                messages=_dicts(messages, arguments),
                tools=[tool_to_openai(tool) for tool in tools] or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
                **thinking.as_kwargs,
            )

        try:
            try:
                return render_with(lambda call: dict(call.arguments))
            except TypeError:  # some templates (DeepSeek-V3) take arguments only as JSON text
                return render_with(lambda call: json.dumps(call.arguments, ensure_ascii=False))
        except Exception as error:  # template code may raise anything
            raise ChatTemplateError(f"the chat template of {self.name}: {error}") from None

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables that the template uses."""
        trees = (_environment().parse(source) for source in self._sources)
        return frozenset().union(*map(jinja2.meta.find_undeclared_variables, trees))

    def _compile(self, source: str) -> jinja2.Template:
        try:
            return _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the chat template of {self.name}, line {error.lineno}: {error.message}"
            ) from None


def glm_chat_template_source(version: GlmVersion) -> str:
    """GLM-5's template as the `chat_template.jinja` of a checkpoint."""
    if version not in GLM_TEMPLATE_VARIANTS:
        raise ChatTemplateError(
            f"GLM version must be one of {', '.join(GLM_VERSIONS)}, got {version!r}"
        )
    body = (files("paddock.text") / "glm5.jinja").read_text(encoding="utf-8")
    return f"{{%- set version = '{version}' -%}}\n{body}"


@cache
def glm_chat_template(version: GlmVersion) -> ChatTemplate:
    return ChatTemplate(glm_chat_template_source(version), name=f"GLM-{version}")


def detect_glm_version(template: ChatTemplate) -> GlmVersion | None:
    """The GLM-5 version whose template renders sample conversations identically, or None."""
    for version in GLM_VERSIONS:
        if all(
            _render_alike(template, glm_chat_template(version), thinking) for thinking in _SETTINGS
        ):
            return version
    return None


def tool_to_openai(tool: ToolSpec) -> dict[str, Any]:
    """The tool in OpenAI's function wrapper; empty fields are omitted."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = dict(tool.parameters)
    return {"type": "function", "function": function}


def _dicts(
    messages: Sequence[Message], arguments: Callable[[ToolCall], object]
) -> list[dict[str, Any]]:
    """The messages as the dicts that templates expect."""
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    found = []
    for message in messages:
        entry: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning is not None:
            entry["reasoning_content"] = message.reasoning
        if message.tool_calls:
            entry["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": arguments(call)},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id is not None:
            entry["tool_call_id"] = message.tool_call_id
            if message.tool_call_id in names:
                entry["name"] = names[message.tool_call_id]
        found.append(entry)
    return found


def _token_text(token: object) -> str | None:
    """The text of a token in tokenizer_config.json, where it is a string or an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


# --- Jinja environment ----------------------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks assistant text for transformers; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012  the interface

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _Generation],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter, without HTML escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


# --- version detection ----------------------------------------------------------------------------

_SETTINGS = (
    DEFAULT_THINKING,
    ThinkingKwargs(clear_thinking=False),
    ThinkingKwargs(enable_thinking=False),
)
_LOOK = ToolCall(id="a", name="look", arguments={"where": "up", "far": 2})
_WAIT = ToolCall(id="b", name="wait")
_TOOL = ToolSpec(name="look", description="Look.", parameters={"type": "object", "properties": {}})
_CONVERSATION = (
    Message(role="system", content="Be brief."),
    Message(role="user", content="What is up?"),
    Message(role="assistant", content="Now.", reasoning="Hm.", tool_calls=(_LOOK, _WAIT)),
    Message(role="tool", content="done", tool_call_id="b"),
    Message(role="tool", content="sky", tool_call_id="a"),
    Message(role="assistant", content="Sky."),
    Message(role="user", content="And now?"),
    Message(role="assistant", content="Night.", reasoning="Dark?"),
    Message(role="user", content="Sure?"),
)


def _render_alike(one: ChatTemplate, other: ChatTemplate, thinking: ThinkingKwargs) -> bool:
    def text(template: ChatTemplate, end: int) -> str:
        return template.render(
            _CONVERSATION[:end],
            tools=(_TOOL,),
            thinking=thinking,
            add_generation_prompt=end == len(_CONVERSATION),
        )

    try:
        return all(text(one, end) == text(other, end) for end in (6, 8, len(_CONVERSATION)))
    except ChatTemplateError:
        return False
