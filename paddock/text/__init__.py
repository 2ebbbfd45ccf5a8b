"""Text as the model sees it.

prefix_check.py  whether a template goes on from what it said before
tool_arguments.py  arguments of calls: JSON that may be broken, text that a schema gives a type
tool_call_grammar.py  a grammar for exactly one tool call
parse_events.py  what is heard of a reply while it is read
chat_template_renderer.py  conversations in tokens, by the chat template of a model's own folder
gguf.py         the tokenizer inside a GGUF file
glm_renderer.py  conversations in tokens, by GLM-5's chat template
glm5.jinja      GLM-5's chat template, in four versions
messages.py     conversations and tools from outside, as records
completion_parser.py  a reply in tokens, into reasoning, content and calls
renderer_factory.py  the renderer for a tokenizer
renderer.py     tokens that know where they come from, and what every renderer can do
special_tokens.py  the tokens that text cannot spell
chat_template.py  chat templates through Jinja2; what is said about thinking
tokenizer.py    text into token ids and back; training a tokenizer
"""

from paddock.text.chat_template import (
    DEFAULT_THINKING,
    GLM_VERSIONS,
    ChatTemplate,
    ChatTemplateError,
    GlmVersion,
    ThinkingKwargs,
    glm_chat_template_source,
    ignored_thinking_kwargs,
)
from paddock.text.chat_template_renderer import ChatTemplateRenderer
from paddock.text.completion_parser import CompletionParser, parse_completion
from paddock.text.glm_renderer import GlmRenderer
from paddock.text.messages import MessageError, parse_messages, parse_tools
from paddock.text.parse_events import (
    ContentDelta,
    ParsedCompletion,
    ParseEvent,
    ReasoningDelta,
    ReasoningRetraction,
    ToolCallArgumentsDelta,
    ToolCallDiscard,
    ToolCallEnd,
    ToolCallStart,
)
from paddock.text.prefix_check import PrefixChange, SessionPattern, find_prefix_change
from paddock.text.renderer import NotPrefixPreservingError, RenderedTokens, Renderer, TokenSource
from paddock.text.renderer_factory import get_renderer, with_chat_template
from paddock.text.special_tokens import MissingTokenError, SpecialToken, SpecialTokenIds
from paddock.text.tokenizer import (
    IncrementalDetokenizer,
    TextTooLongError,
    Tokenizer,
    TokenizerError,
    train_tokenizer,
)
from paddock.text.tool_call_grammar import tool_call_grammar

__all__ = [
    "DEFAULT_THINKING",
    "GLM_VERSIONS",
    "ChatTemplate",
    "ChatTemplateError",
    "ChatTemplateRenderer",
    "CompletionParser",
    "ContentDelta",
    "GlmRenderer",
    "GlmVersion",
    "IncrementalDetokenizer",
    "MessageError",
    "MissingTokenError",
    "NotPrefixPreservingError",
    "ParseEvent",
    "ParsedCompletion",
    "PrefixChange",
    "ReasoningDelta",
    "ReasoningRetraction",
    "RenderedTokens",
    "Renderer",
    "SessionPattern",
    "SpecialToken",
    "SpecialTokenIds",
    "TextTooLongError",
    "ThinkingKwargs",
    "TokenSource",
    "Tokenizer",
    "TokenizerError",
    "ToolCallArgumentsDelta",
    "ToolCallDiscard",
    "ToolCallEnd",
    "ToolCallStart",
    "find_prefix_change",
    "get_renderer",
    "glm_chat_template_source",
    "ignored_thinking_kwargs",
    "parse_completion",
    "parse_messages",
    "parse_tools",
    "tool_call_grammar",
    "train_tokenizer",
    "with_chat_template",
]
