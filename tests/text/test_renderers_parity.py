"""Parity with the published `renderers` package, an independent implementation of the templates."""

from functools import lru_cache
from random import Random

import pytest
from renderers import GLM5Renderer, GLM51Renderer, GLM53Renderer
from renderers.configs import GLM5RendererConfig, GLM51RendererConfig, GLM53RendererConfig
from transformers import PreTrainedTokenizerFast

from paddock.text import SpecialToken, ThinkingKwargs, parse_completion, parse_messages
from paddock.text.glm_renderer import GlmRenderer
from paddock.text.messages import parse_tools
from tests.data.tiny import byte_tokenizer
from tests.text.conversations import MARKERS, TOOLS, WORDS, conversation, without_null

ORACLES = {
    "5": (GLM5Renderer, GLM5RendererConfig, {"enable_thinking": (True, False)}),
    "5.1": (GLM51Renderer, GLM51RendererConfig, {"enable_thinking": (True, False)}),
    "5.3": (GLM53Renderer, GLM53RendererConfig, {"reasoning_effort": ("low", "high", "max")}),
}


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    """Our tokenizer as transformers reads it. Short texts repeat, so they are cached."""
    folder = tmp_path_factory.mktemp("peer")
    byte_tokenizer().save(folder)
    peer = PreTrainedTokenizerFast.from_pretrained(folder)
    encode = lru_cache(maxsize=None)(lambda text: tuple(type(peer).encode(peer, text)))
    peer.encode = lambda text, add_special_tokens: list(encode(text))
    return peer


def settings(rng, version):
    choices = {"clear_thinking": (True, False), **ORACLES[version][2]}
    return {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.6}


def disagreements(peer, version, words, numbers):
    """The conversations that `renderers` renders differently."""
    ours = GlmRenderer(byte_tokenizer(), version=version, specials_in_text=True)
    renderer, config, _ = ORACLES[version]
    for number in numbers:
        rng = Random(number)
        raw, tools = conversation(rng, words)
        kwargs = settings(rng, version)
        theirs = renderer(peer, config(**kwargs)).render(without_null(raw), tools=tools)
        mine = ours.render_dialogue(
            parse_messages(raw),
            tools=parse_tools(tools),
            thinking=ThinkingKwargs(**kwargs),
            closed=False,
        )
        if (
            list(mine.token_ids) != theirs.token_ids
            or list(mine.loss_mask) != theirs.sampled_mask
            or [-1 if m is None else m for m in mine.message_indices] != theirs.message_indices
            or [producer != "template" for producer in mine.sources] != theirs.is_content
        ):
            yield number


@pytest.mark.parametrize(("version", "count"), [("5", 2000), ("5.1", 200), ("5.3", 200)])
def test_ids_masks_and_message_indices_match_renderers(peer, version, count):
    assert list(disagreements(peer, version, WORDS, range(count))) == []


@pytest.mark.parametrize("version", ORACLES)
def test_text_with_special_tokens_matches_renderers_where_allowed(peer, version):
    assert list(disagreements(peer, version, (*WORDS, *MARKERS), range(5000, 5060))) == []


# --- continuing a session -------------------------------------------------------------------------

NEXT = {
    "tools": [
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
        {"role": "tool", "tool_call_id": "b", "content": ""},
    ],
    "user": [{"role": "user", "content": " And? "}],
    "system": [{"role": "system", "content": "Hurry."}, {"role": "user", "content": "And?"}],
}


@pytest.mark.parametrize("version", ORACLES)
@pytest.mark.parametrize("messages", NEXT)
@pytest.mark.parametrize(
    "stop", [SpecialToken.USER, SpecialToken.OBSERVATION, SpecialToken.ENDOFTEXT]
)
def test_continued_sessions_match_renderers(peer, version, messages, stop):
    tokenizer, raw = byte_tokenizer(), NEXT[messages]
    ours = GlmRenderer(tokenizer, version=version)
    renderer, config, _ = ORACLES[version]
    prompt = [*ours.render_prompt(parse_messages([{"role": "user", "content": "Hi"}])).token_ids]
    # Not the tokenizer's own tokens: sampled tokens stay as they are.
    reply = [
        *map(tokenizer.token_to_id, "thought"),
        *tokenizer.encode("</think>Hello", specials=True),
    ]
    past = [*prompt, *reply, tokenizer.special_token_ids[stop]]
    thinking = {"clear_thinking": False}
    theirs = renderer(peer, config(**thinking)).bridge_to_next_turn(
        prompt, past[len(prompt) :], raw
    )
    new = ours.render_next_turn(past, parse_messages(raw), thinking=ThinkingKwargs(**thinking))
    assert [*past, *new.token_ids] == theirs.token_ids
    assert not any(new.loss_mask)


# --- parsing replies ------------------------------------------------------------------------------


def test_well_formed_replies_are_parsed_like_renderers(peer):
    tokenizer, read = byte_tokenizer(), 0
    tools = parse_tools(TOOLS)
    ours, theirs = GlmRenderer(tokenizer), GLM5Renderer(peer)
    for number in range(300):
        raw, _ = conversation(Random(number))
        messages = parse_messages(raw)
        if messages[-1].role != "assistant":
            continue
        whole = ours.render_last_reply(
            messages, tools=tools, thinking=ThinkingKwargs(clear_thinking=False)
        )
        start = whole.loss_mask.index(True)
        prompt, reply = whole.token_ids[:start], whole.token_ids[start:]
        if prompt[-1] != tokenizer.special_token_ids[SpecialToken.THINK_OPEN]:
            continue
        mine = parse_completion(tokenizer, reply, finish="stop", tools=tools, prompt=prompt)
        other = theirs.parse_response(list(reply), tools=TOOLS)
        assert (mine.message.reasoning or "").rstrip() == (other.reasoning_content or "")
        assert mine.message.content.strip() == other.content.strip()
        calls = [(call.name, sorted(call.arguments)) for call in mine.message.tool_calls]
        assert calls == [(call.name, sorted(call.arguments)) for call in other.tool_calls]
        read += 1
    assert read > 50
