"""Text as the model sees it.

append_only.py  whether a template goes on from what it said before
arguments.py    arguments of calls: JSON that may be broken, text that a schema gives a type
calls.py        a grammar for exactly one tool call
events.py       what is heard of a reply while it is read
folder.py       conversations in tokens, by the chat template of a model's own folder
gguf.py         the tokenizer inside a GGUF file
glm.py          conversations in tokens, by GLM-5's chat template
glm5.jinja      GLM-5's chat template, in four versions
messages.py     conversations and tools from outside, as records
parse.py        a reply in tokens, into reasoning, content and calls
render.py       the renderer for a tokenizer
rendered.py     tokens that know where they come from, and what every renderer can do
special.py      the tokens that text cannot spell
template.py     chat templates through Jinja2; what is said about thinking
tokenizer.py    text into token ids and back; training a tokenizer
"""

from paddock.text.append_only import Mode, Rewrite, rewrite
from paddock.text.calls import call_grammar
from paddock.text.events import (
    CallArguments,
    CallDropped,
    CallEnded,
    CallStarted,
    ContentText,
    Event,
    NotReasoning,
    Parsed,
    ReasoningText,
)
from paddock.text.folder import FolderRenderer
from paddock.text.glm import GlmRenderer
from paddock.text.messages import MessageError, messages_from, tools_from
from paddock.text.parse import Parser, parse
from paddock.text.render import renderer_for, with_chat_template
from paddock.text.rendered import Producer, Rendered, Renderer, RewritesPast
from paddock.text.special import MissingToken, Special, Specials
from paddock.text.template import (
    UNSAID,
    VERSIONS,
    ChatTemplateError,
    Template,
    Thinking,
    Version,
    chat_template,
    ignored,
)
from paddock.text.tokenizer import Detokenizer, Tokenizer, TokenizerError, TooLong, train

__all__ = [
    "UNSAID",
    "VERSIONS",
    "CallArguments",
    "CallDropped",
    "CallEnded",
    "CallStarted",
    "ChatTemplateError",
    "ContentText",
    "Detokenizer",
    "Event",
    "FolderRenderer",
    "GlmRenderer",
    "MessageError",
    "MissingToken",
    "Mode",
    "NotReasoning",
    "Parsed",
    "Parser",
    "Producer",
    "ReasoningText",
    "Rendered",
    "Renderer",
    "Rewrite",
    "RewritesPast",
    "Special",
    "Specials",
    "Template",
    "Thinking",
    "Tokenizer",
    "TokenizerError",
    "TooLong",
    "Version",
    "call_grammar",
    "chat_template",
    "ignored",
    "messages_from",
    "parse",
    "renderer_for",
    "rewrite",
    "tools_from",
    "train",
    "with_chat_template",
]
