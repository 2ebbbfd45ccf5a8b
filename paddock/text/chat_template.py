"""Chat templates, through Jinja2 as transformers runs it: GLM-5's own, and whatever lies in a
model's folder.

The Jinja text is the definition of what a conversation looks like. `glm5.jinja` holds GLM-5's, in
four versions; `chat_template` gives one of them whole, to be laid beside released weights.
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
    """A chat template that is missing, is no template, or cannot render a conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingKwargs:
    """What a request says about thinking, in the words of `chat_template_kwargs`. None: nothing.

    GLM-5's default is interleaved: thoughts are shown back to the model until the next user
    message comes. With `clear_thinking=False` they are preserved for good. `enable_thinking=False`
    turns thinking off for the next reply and leaves the past alone.

    >>> ThinkingKwargs(enable_thinking=False).as_kwargs
    {'enable_thinking': False}
    """

    enable_thinking: bool | None = None
    clear_thinking: bool | None = None
    reasoning_effort: str | None = None

    @property
    def as_kwargs(self) -> dict[str, Any]:
        """What was said, as a template is told."""
        pairs = ((name, getattr(self, name)) for name in self.__slots__)
        return {name: value for name, value in pairs if value is not None}


DEFAULT_THINKING = ThinkingKwargs()


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmTemplateVariant:
    """How a version of GLM-5's template differs from the others, as glm5.jinja says it."""

    efforts: tuple[str, ...] = ()  # the levels it knows; any other is the last; () no effort line
    always_thinks: bool = False  # enable_thinking is ignored
    clears: bool = True  # what clear_thinking is if nothing is said
    opens: bool = False  # <think> stands before every reply; thoughts are shown as they are
    opens_newest: bool = False  # so it does before replies after the last user message
    wraps_tools: bool = False  # in {"type": "function", "function": ...}
    sorts_results: bool = False  # of parallel calls, into the order of the calls

    def is_thinking_enabled(self, thinking: ThinkingKwargs) -> bool:
        return self.always_thinks or thinking.enable_thinking is not False

    def clears_reasoning(self, thinking: ThinkingKwargs) -> bool:
        """Whether thoughts from before the last user message are left out."""
        return self.clears if thinking.clear_thinking is None else thinking.clear_thinking

    def reasoning_effort(self, thinking: ThinkingKwargs) -> str | None:
        """The level that the effort line names, if there is one."""
        if not self.efforts or not self.is_thinking_enabled(thinking):
            return None
        said = thinking.reasoning_effort
        return said if said in self.efforts else self.efforts[-1]


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
    """What of `thinking` GLM-5's template passes over, each with the reason, so that whoever
    takes requests can warn.

    >>> ignored_thinking_kwargs("5.2", ThinkingKwargs(enable_thinking=True, reasoning_effort="low"))
    {'reasoning_effort': "GLM-5.2 knows high and max: 'low' means max"}
    """
    rules, said = GLM_TEMPLATE_VARIANTS[version], thinking.as_kwargs
    found: dict[str, str] = {}
    if rules.always_thinks and said.get("enable_thinking") is False:
        found["enable_thinking"] = f"GLM-{version} always thinks"
    if "reasoning_effort" in said and rules.reasoning_effort(thinking) is None:
        why = "has no levels of effort" if not rules.efforts else "has none with thinking off"
        found["reasoning_effort"] = f"GLM-{version} {why}"
    elif "reasoning_effort" in said and said["reasoning_effort"] not in rules.efforts:
        known = ", ".join(rules.efforts[:-1]) + f" and {rules.efforts[-1]}"
        asked = f"{said['reasoning_effort']!r} means {rules.efforts[-1]}"
        found["reasoning_effort"] = f"GLM-{version} knows {known}: {asked}"
    return found


# --- rendering ------------------------------------------------------------------------------------


class ChatTemplate:
    """A chat template as its model's folder has it.

    The variables are those of transformers' `apply_chat_template`, but no clock (`strftime_now`):
    a prompt that changes with the day cannot be extended. Templates that want a date without it
    being given say so in their error.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str,
        with_tools: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """`with_tools` is a second source for conversations with tools; `variables` such as
        bos_token are the same in every rendering."""
        self.name, self.source = name, source
        self._variables = dict(variables or {})
        self._plain = self._compiled(source)
        self._with_tools = self._plain if with_tools is None else self._compiled(with_tools)
        self._sources = [source, *([with_tools] if with_tools is not None else [])]

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> Self | None:
        """The template among a tokenizer's files: chat_template.jinja, else in its config."""
        config = json.loads(tokenizer.files.get("special_tokens_map.json", b"{}"))
        config |= json.loads(tokenizer.files[TOKENIZER_CONFIG_FILE])
        given: Any = config.get("chat_template")
        if CHAT_TEMPLATE_FILE in tokenizer.files:
            given = tokenizer.files[CHAT_TEMPLATE_FILE].decode()
        if isinstance(given, list):  # several, by name
            given = {each["name"]: each["template"] for each in given}
        named = given if isinstance(given, dict) else {"default": given}
        if not isinstance(named.get("default"), str):
            return None
        tokens = {key: _spelling(value) for key, value in config.items() if key.endswith("_token")}
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
        """The conversation as text; ChatTemplateError if the template refuses it or fails."""

        def attempt(arguments: Callable[[ToolCall], object]) -> str:
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
                return attempt(lambda call: dict(call.arguments))
            except TypeError:  # some (DeepSeek-V3's) take arguments only as JSON text
                return attempt(lambda call: json.dumps(call.arguments, ensure_ascii=False))
        except Exception as error:  # whatever foreign code may raise
            raise ChatTemplateError(f"the chat template of {self.name}: {error}") from None

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables that the template mentions."""
        trees = (_environment().parse(source) for source in self._sources)
        return frozenset().union(*map(jinja2.meta.find_undeclared_variables, trees))

    def _compiled(self, source: str) -> jinja2.Template:
        try:
            return _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the chat template of {self.name}, line {error.lineno}: {error.message}"
            ) from None


def glm_chat_template_source(version: GlmVersion) -> str:
    """GLM-5's template, whole: what `chat_template.jinja` beside released weights should say."""
    if version not in GLM_TEMPLATE_VARIANTS:
        raise ChatTemplateError(
            f"no GLM-5 template {version!r}; there are {', '.join(GLM_VERSIONS)}"
        )
    body = (files("paddock.text") / "glm5.jinja").read_text(encoding="utf-8")
    return f"{{%- set version = '{version}' -%}}\n{body}"


@cache
def glm_chat_template(version: GlmVersion) -> ChatTemplate:
    return ChatTemplate(glm_chat_template_source(version), name=f"GLM-{version}")


def detect_glm_version(template: ChatTemplate) -> GlmVersion | None:
    """Which of GLM-5's templates this one is, by what it makes of a few conversations."""
    for version in GLM_VERSIONS:
        if all(_alike(template, glm_chat_template(version), thinking) for thinking in _SETTINGS):
            return version
    return None


def tool_to_openai(tool: ToolSpec) -> dict[str, Any]:
    """The tool in the wrapper that templates expect; what is empty is left out."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = dict(tool.parameters)
    return {"type": "function", "function": function}


def _dicts(
    messages: Sequence[Message], arguments: Callable[[ToolCall], object]
) -> list[dict[str, Any]]:
    """The messages as templates expect them."""
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


def _spelling(token: object) -> str | None:
    """A token as tokenizer_config.json has it: its text, or an object that holds it."""
    said = token.get("content") if isinstance(token, dict) else token
    return said if isinstance(said, str) else None


# --- the environment ------------------------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks, for transformers, what the assistant says; here it is only text."""

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
    """Without the HTML escapes of Jinja's own."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


# --- telling versions apart -----------------------------------------------------------------------

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


def _alike(one: ChatTemplate, other: ChatTemplate, thinking: ThinkingKwargs) -> bool:
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
