"""Dialogues as training rows: each reply is trained once, in its turn, except masked spans."""

import json
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddock.data.tokenize_dialogue import tokenize_dialogue
from paddock.records import Dialogue, LossMaskSpan, Message, ToolCall, ToolSpec
from paddock.text import ChatTemplate, ThinkingKwargs, Tokenizer, train_tokenizer
from paddock.text.chat_template import GLM_VERSIONS
from paddock.text.chat_template_renderer import ChatTemplateRenderer
from paddock.text.glm_renderer import GlmRenderer
from tests.data.tiny import byte_tokenizer

LOOK = ToolSpec(name="look", description="Look.", parameters={"type": "object"})
CHATML = (
    "{% for m in messages %}<|user|>{{ m.role }}\n"
    "{% if m.reasoning_content %}{{ m.reasoning_content }}\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n{{ c.function.name }} {{ c.function.arguments | tojson }}"
    "{% endfor %}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
)


def user(text):
    return Message(role="user", content=text)


def reply(content, reasoning=None, calls=()):
    return Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)


def call(name, **arguments):
    return ToolCall(id=name, name="look", arguments=arguments)


THREE = (
    user("One?"),
    reply("One.", "first"),
    user("Two?"),
    reply("Two.", "second"),
    user("Three?"),
    reply("Three.", "third"),
)


def renderer(version="5"):
    return GlmRenderer(byte_tokenizer(), version=version)


def trained_text(row, trained=True):
    """The text of the trained tokens, runs joined by a bar."""
    tokenizer, runs, before = byte_tokenizer(), [], None
    for token, flag in zip(row.token_ids, row.loss_mask, strict=True):
        if flag == trained:
            if before != trained:
                runs.append([])
            runs[-1].append(token)
        before = flag
    return "|".join(tokenizer.decode(run) for run in runs)


def text(row):
    return byte_tokenizer().decode(row.token_ids)


# --- modes ----------------------------------------------------------------------------------------


def test_preserved_reasoning_makes_one_row():
    (row,) = tokenize_dialogue(Dialogue(messages=THREE, thinking="preserved"), renderer())
    assert trained_text(row) == (
        "first</think>One.<|user|>|second</think>Two.<|user|>|third</think>Three.<|user|>"
    )


def test_interleaved_reasoning_is_trained_in_its_turn_and_dropped_later():
    rows = tokenize_dialogue(Dialogue(messages=THREE), renderer())
    assert [trained_text(row) for row in rows] == [
        "first</think>One.<|user|>",
        "second</think>Two.<|user|>",
        "third</think>Three.<|user|>",
    ]
    assert "first" not in text(rows[1]) and "second" not in text(rows[2])
    assert "<|assistant|></think>One." in text(rows[1])


def test_interleaved_reasoning_stays_within_a_tool_call_cycle():
    messages = (
        user("Up?"),
        reply("", "look", (call("a", far=1),)),
        Message(role="tool", content="sky", tool_call_id="a"),
        reply("Sky.", "seen"),
    )
    (row,) = tokenize_dialogue(Dialogue(messages=messages, tools=(LOOK,)), renderer())
    assert trained_text(row) == (
        "look</think><tool_call>look<arg_key>far</arg_key><arg_value>1</arg_value></tool_call>"
        "<|observation|>|seen</think>Sky.<|user|>"
    )


def test_thinking_off_leaves_reasoning_out():
    (row,) = tokenize_dialogue(Dialogue(messages=THREE, thinking="off"), renderer())
    assert trained_text(row) == "One.<|user|>|Two.<|user|>|Three.<|user|>"
    assert "first" not in text(row)


@pytest.mark.parametrize("version", GLM_VERSIONS)
def test_each_turn_is_trained_after_its_own_prompt(version):
    """Thinking switched by turn: trained tokens follow exactly what `render_prompt` returns."""
    messages = (*THREE[:3], reply("Two."), *THREE[4:])
    made = renderer(version)
    rows = tokenize_dialogue(Dialogue(messages=messages, thinking="turns"), made)
    trained = {}
    for row in rows:
        for k in (1, 3, 5):
            thinking = ThinkingKwargs(
                enable_thinking=messages[k].reasoning is not None, clear_thinking=False
            )
            prompt = made.render_prompt(messages[:k], thinking=thinking).token_ids
            if row.token_ids[: len(prompt)] == prompt and row.loss_mask[len(prompt)]:
                assert not row.loss_mask[len(prompt) - 1]
                trained[k] = True
    assert set(trained) == {1, 3, 5}
    if version == "5":  # append-only
        assert len(rows) == 1


@pytest.mark.parametrize("mode", ["interleaved", "preserved", "turns", "off"])
@pytest.mark.parametrize("version", GLM_VERSIONS)
def test_each_reply_is_trained_exactly_once(mode, version):
    words = ["One.", "Two.", "Three."]
    rows = tokenize_dialogue(Dialogue(messages=THREE, thinking=mode), renderer(version))
    trained = "".join(trained_text(row) for row in rows)
    assert [trained.count(word) for word in words] == [1, 1, 1]


def test_base_training_masks_only_marked_tokens():
    marks = (LossMaskSpan(message=1, part="reasoning"),)
    rows = tokenize_dialogue(
        Dialogue(messages=THREE[:2], untrained=marks), renderer(), train_on="all"
    )
    assert trained_text(rows[0], trained=False) == "first"


# --- masked spans ---------------------------------------------------------------------------------


def marked(message, *marks, made=None):
    spans = tuple(LossMaskSpan(message=1, **mark) for mark in marks)
    whole = Dialogue(messages=(user("?"), message), untrained=spans, tools=(LOOK,))
    (row,) = tokenize_dialogue(whole, made or renderer())
    return row


def test_a_span_in_the_reasoning_masks_only_its_tokens_and_keeps_them_in_context():
    reasoning = "It is blue. No, it is red."
    row = marked(reply("Red.", reasoning), {"part": "reasoning", "start": 0, "end": 11})
    assert trained_text(row) == " No, it is red.</think>Red.<|user|>"
    assert "<think>It is blue. No, it is red.</think>Red." in text(row)


def test_a_span_in_the_content_does_not_mask_the_same_words_in_the_reasoning():
    row = marked(reply("red, red", "red, red"), {"part": "content", "start": 0, "end": 3})
    assert trained_text(row) == "red, red</think>|, red<|user|>"


def test_whitespace_stripped_by_the_template_does_not_shift_a_span():
    row = marked(reply("  \n no yes ", " a b "), {"part": "content", "start": 4, "end": 6})
    assert trained_text(row) in ("a b</think>| yes<|user|>", "a b</think>|yes<|user|>")
    assert "no" not in trained_text(row)


def test_tool_calls_are_masked_by_index():
    calls = (call("a", far=1), call("b", far=2))
    row = marked(reply("Ok.", "go", calls), {"part": "calls", "start": 0, "end": 1})
    assert "<arg_value>1<" not in trained_text(row) and "<arg_value>2<" in trained_text(row)
    assert trained_text(row).startswith("go</think>Ok.|<tool_call>look")


def test_a_message_is_masked_with_the_token_that_ends_it():
    messages = (user("?"), reply("Wrong."), user("?"))
    spans = (LossMaskSpan(message=1),)
    whole = Dialogue(messages=(*messages, reply("Right.")), untrained=spans, thinking="preserved")
    (row,) = tokenize_dialogue(whole, renderer())
    assert trained_text(row) == "Right.<|user|>"
    assert "Wrong." in text(row)


def test_a_span_in_dropped_reasoning_masks_nothing():
    """The content repeats the words of reasoning that was left out."""
    messages = (user("?"), reply("a b c", "b"), user("?"), reply("d"))
    whole = Dialogue(messages=messages, untrained=(LossMaskSpan(message=1, part="reasoning"),))
    first, second = tokenize_dialogue(whole, renderer())
    assert trained_text(first) == "</think>a b c<|user|>"
    assert trained_text(second) == "d<|user|>"


def test_a_token_that_overlaps_a_span_is_masked():
    tokenizer = byte_tokenizer()
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("morning", specials=False)]
    assert pieces == ["m", "orning"]
    row = marked(reply("morning"), {"part": "content", "start": 3, "end": 4})
    assert trained_text(row) == "m|<|user|>"


@cache
def foreign():
    """A family without GLM-5's special tokens, with the template of its folder."""
    own = byte_tokenizer()
    bare = json.loads(own.files["tokenizer.json"])
    keep = {"<|user|>", "<|endoftext|>"}
    bare["added_tokens"] = [t for t in bare["added_tokens"] if t["content"] in keep]
    tokenizer = Tokenizer({"tokenizer.json": json.dumps(bare).encode()}, name="foreign")
    return ChatTemplateRenderer(tokenizer, ChatTemplate(CHATML, name="foreign"))


def test_other_families_are_masked_too():
    made = foreign()
    row = marked(
        reply("Red, I say.", "blue? no", (call("a", far=1),)),
        {"part": "reasoning", "start": 0, "end": 5},
        {"part": "content", "start": 0, "end": 3},
        {"part": "calls"},
        made=made,
    )
    trained = made.tokenizer.decode(
        [t for t, f in zip(row.token_ids, row.loss_mask, strict=True) if f]
    )
    assert "blue" not in trained and "Red" not in trained and "look" not in trained
    assert " no" in trained and "I say." in trained


FORGETS = (
    "{% for m in messages %}<|user|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}{{ m.reasoning_content }}: {% endif %}"
    "{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("mode", ["interleaved", "preserved"])
def test_with_a_template_that_drops_reasoning_each_reply_is_trained_in_its_turn(mode):
    """Reasoning is shown with the last message only, in every mode."""
    made = ChatTemplateRenderer(foreign().tokenizer, ChatTemplate(FORGETS, name="forgets"))
    rows = tokenize_dialogue(Dialogue(messages=THREE, thinking=mode), made)
    decode = made.tokenizer.decode
    trained = [
        decode([t for t, f in zip(row.token_ids, row.loss_mask, strict=True) if f]) for row in rows
    ]
    assert trained == [
        "first: One.<|endoftext|>",
        "second: Two.<|endoftext|>",
        "third: Three.<|endoftext|>",
    ]
    assert "first" not in decode(rows[1].token_ids)


WORDS = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12)


def test_an_empty_span_masks_nothing():
    made, message = renderer(), reply("0", "00ll")
    nothing = marked(message, {"part": "reasoning", "start": 3, "end": 3}, made=made)
    assert nothing == marked(message, made=made)


@given(reasoning=WORDS, content=WORDS, data=st.data())
@settings(max_examples=100)
def test_no_character_of_a_span_is_ever_trained(reasoning, content, data):
    """For any text, no trained token overlaps a masked character, and no other token is masked."""
    part = data.draw(st.sampled_from(["reasoning", "content"]))
    whole = reasoning if part == "reasoning" else content
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, len(whole)))
    made = renderer()
    message = reply(content, reasoning)
    plain = marked(message, made=made)
    row = marked(message, {"part": part, "start": start, "end": end}, made=made)
    assert row.token_ids == plain.token_ids
    assert all(
        before or not after for before, after in zip(plain.loss_mask, row.loss_mask, strict=True)
    )
    lost = len(whole) - len(whole.lstrip())
    kept = whole.strip()
    inside = kept[max(0, start - lost) : max(0, end - lost)]
    lost_ids = [
        token
        for token, before, after in zip(row.token_ids, plain.loss_mask, row.loss_mask, strict=True)
        if before and not after
    ]
    assert bool(lost_ids) == bool(inside)
    assert inside in byte_tokenizer().decode(lost_ids)
    # only tokens that overlap it
    assert len(lost_ids) <= len(inside.encode()) or not inside


def test_without_spans_nothing_is_masked():
    messages = (*THREE[:2],)
    one = tokenize_dialogue(Dialogue(messages=messages), renderer())
    two = tokenize_dialogue(replace(Dialogue(messages=messages), untrained=()), renderer())
    assert one == two


def test_word_level_tokenizers_are_masked_too():
    tokenizer = train_tokenizer(["the boat is red , no , blue"] * 50, vocab=400, splitting="words")
    made = GlmRenderer(tokenizer)
    row = marked(
        reply("red", "the boat is blue , no , the boat is red"),
        {"part": "reasoning", "start": 0, "end": 16},
        made=made,
    )
    trained = tokenizer.decode([t for t, f in zip(row.token_ids, row.loss_mask, strict=True) if f])
    assert trained == ", no , the boat is red</think>red<|user|>"
