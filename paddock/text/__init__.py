"""Tokenizers, chat templates, and parsing of completions.

chat_template.py  chat templates through Jinja2, and thinking arguments
chat_template_renderer.py  renderer for any Hugging Face chat template
completion_parser.py  completion tokens into reasoning, content and tool calls
gguf.py         the tokenizer inside a GGUF file
glm5.jinja      GLM-5's chat template, in four versions
glm_renderer.py  renderer for GLM-5's chat template
messages.py     OpenAI-style messages and tools into records
parse_events.py  events and result of the completion parser
prefix_check.py  whether a chat template preserves the prefix of a session
renderer.py     rendered tokens with source and loss mask, and the renderer protocol
renderer_factory.py  the renderer for a tokenizer
special_tokens.py  GLM-5's special tokens
tokenizer.py    tokenizer, incremental detokenizer, and BPE training
tool_arguments.py  tool-call arguments: lenient JSON, and types from a JSON schema
tool_call_grammar.py  grammar that allows exactly one tool call
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
from paddock.text.messages import message_to_openai, parse_messages
from paddock.text.prefix_check import find_prefix_change
from paddock.text.renderer import NotPrefixPreservingError, RenderedTokens, Renderer
from paddock.text.renderer_factory import get_renderer, with_chat_template
from paddock.text.special_tokens import SpecialToken, SpecialTokenIds
from paddock.text.tokenizer import (
    DETOKENIZE_CONTEXT_TOKENS,
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
    "find_prefix_change",
    "get_renderer",
    "glm_chat_template",
    "is_in_reasoning",
    "message_to_openai",
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
