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

from paddock.text import messages, parse_events
from paddock.text.chat_template import (
    DEFAULT_THINKING,
    ChatTemplate,
    ChatTemplateError,
    GlmVersion,
    ThinkingKwargs,
    glm_chat_template,
    tool_to_openai,
)
from paddock.text.completion_parser import CompletionParser, is_in_reasoning, parse_completion
from paddock.text.gguf import tokenizer_from_gguf
from paddock.text.messages import parse_messages
from paddock.text.renderer import NotPrefixPreservingError, RenderedTokens, Renderer
from paddock.text.renderer_factory import get_renderer, with_chat_template
from paddock.text.special_tokens import SpecialToken, SpecialTokenIds
from paddock.text.tokenizer import (
    DETOKENIZE_CONTEXT_TOKENS,
    TOKENIZER_CONFIG_FILE,
    IncrementalDetokenizer,
    TextTooLongError,
    Tokenizer,
    TokenizerError,
    train_tokenizer,
)
from paddock.text.tool_call_grammar import tool_call_grammar

__all__ = [
    "DEFAULT_THINKING",
    "DETOKENIZE_CONTEXT_TOKENS",
    "TOKENIZER_CONFIG_FILE",
    "ChatTemplate",
    "ChatTemplateError",
    "CompletionParser",
    "GlmVersion",
    "IncrementalDetokenizer",
    "NotPrefixPreservingError",
    "RenderedTokens",
    "Renderer",
    "SpecialToken",
    "SpecialTokenIds",
    "TextTooLongError",
    "ThinkingKwargs",
    "Tokenizer",
    "TokenizerError",
    "get_renderer",
    "glm_chat_template",
    "is_in_reasoning",
    "messages",
    "parse_completion",
    "parse_events",
    "parse_messages",
    "tokenizer_from_gguf",
    "tool_call_grammar",
    "tool_to_openai",
    "train_tokenizer",
    "with_chat_template",
]
