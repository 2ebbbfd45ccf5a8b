"""Text far beyond the token limit is rejected without encoding all of it."""

import pytest

from paddock.records import Message, ToolCall, ToolSpec
from paddock.text import ChatTemplate, TextTooLongError, train_tokenizer
from paddock.text.chat_template import glm_chat_template_source
from paddock.text.chat_template_renderer import ChatTemplateRenderer
from paddock.text.glm_renderer import GlmRenderer

WORDS = "one two three four five six seven eight nine ten eleven twelve, and so on.\n"


@pytest.fixture(scope="module", params=["bytes", "words"])
def tokenizer(request):
    return train_tokenizer([WORDS * 20], vocab=600, splitting=request.param)


class Counted:
    """Counts the characters passed to a tokenizer."""

    def __init__(self, tokenizer):
        self.characters = 0
        encode = tokenizer.encode

        def encode_and_count(text, *, specials):
            self.characters += len(text)
            return encode(text, specials=specials)

        tokenizer.encode = encode_and_count


@pytest.fixture
def counted(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "encode", tokenizer.encode)
    return Counted(tokenizer)


def conversations(text):
    user = Message(role="user", content="Hi.")
    call = ToolCall(id="a", name="f", arguments={"x": [text]})
    return {
        "content": ([Message(role="user", content=text)], ()),
        "many": ([Message(role="user", content=piece) for piece in text.split()], ()),
        "thought": ([user, Message(role="assistant", content="", reasoning=text)], ()),
        "call": ([user, Message(role="assistant", content="", tool_calls=(call,))], ()),
        "tool": ([user], (ToolSpec(name="f", description=text, parameters={}),)),
    }


@pytest.mark.parametrize("where", ["content", "many", "thought", "call", "tool"])
@pytest.mark.parametrize("family", ["glm", "folder"])
def test_a_much_too_long_conversation_is_rejected_after_encoding_a_part(
    tokenizer, counted, where, family
):
    renderer = GlmRenderer(tokenizer)
    if family == "folder":
        renderer = ChatTemplateRenderer(
            tokenizer, ChatTemplate(glm_chat_template_source("5"), name="a folder")
        )
    messages, tools = conversations(WORDS * 2000)[where]
    with pytest.raises(TextTooLongError, match="at least"):
        renderer.render_prompt(messages, tools=tools, max_tokens=200)
    with pytest.raises(TextTooLongError):
        renderer.render_dialogue(messages, tools=tools, max_tokens=200)
    assert counted.characters < 140_000  # of 150,000, twice


@pytest.mark.parametrize("repeats", [1, 100, 2000])
def test_text_within_the_limit_passes(tokenizer, repeats):
    for text in (WORDS * repeats, " " * 60 * repeats, "\u00e9\n" * repeats, "x" * 60 * repeats):
        count = len(tokenizer.encode(text, specials=False))
        tokenizer.check_max_tokens([text], count, specials=False)
        tokenizer.check_max_tokens([text[:7], text[7:]], count + 30, specials=False)
