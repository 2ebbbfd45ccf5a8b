"""Chat templates in sessions: prefix preservation, the same tokens as SFT, memory per token."""

from itertools import pairwise

import pytest

from paddock.records import Message, ToolCall
from paddock.rollout.prefix_matcher import STRICT
from paddock.rollout.session import PRESERVED, Session
from paddock.text import ChatTemplate, SpecialToken, Tokenizer, get_renderer
from paddock.text.chat_template import glm_chat_template
from paddock.text.chat_template_renderer import ChatTemplateRenderer
from paddock.text.gguf import tokenizer_from_gguf
from paddock.text.prefix_check import SessionPattern, find_prefix_change
from tests.rollout.conversations import EXPORT_ARGS, ids_of, say, user
from tests.rollout.engines import SPEC, completion, renderer, tokenizer
from tests.text.test_chat_template_renderer import CHATML
from tests.text.tiny_gguf import write_gguf


def test_the_prefix_check_passes_glm_and_fails_a_template_that_rewrites():
    mode = SessionPattern(thinking=PRESERVED, switching=True)
    assert find_prefix_change(glm_chat_template("5"), tokenizer(), mode) is None
    source = "{{ messages | length }}{% for m in messages %}<|user|>{{ m.content }}{% endfor %}"
    assert find_prefix_change(ChatTemplate(source, name="counts"), tokenizer(), mode) is not None


@pytest.mark.parametrize("version", ["5", "5.1", "5.2", "5.3"])
def test_a_session_of_canonical_replies_equals_the_sft_rendering(version):
    """Parallel tool results included: the same ids, the same loss mask."""
    calls = tuple(ToolCall(id=f"c{i}", name="now") for i in range(2))
    dialogue = [
        user(),
        Message(role="assistant", content="Look.", reasoning="Hm.", tool_calls=calls),
        *(Message(role="tool", content=str(i), tool_call_id=f"c{i}") for i in range(2)),
        Message(role="assistant", content="Done.", reasoning="Sure."),
        user(),
        Message(role="assistant", content="Bye.", reasoning="End."),
    ]
    whole = renderer(version).render_dialogue(dialogue, tools=SPEC, thinking=PRESERVED)
    session = Session("s", renderer(version), STRICT)
    for at, message in enumerate(dialogue):
        if message.role != "assistant":
            continue
        opening = session.begin_turn(dialogue[:at], tools=SPEC, thinking=PRESERVED)
        mine = renderer(version).render_last_reply(
            dialogue[: at + 1], tools=SPEC, thinking=PRESERVED
        )
        ids = [i for i, flag in zip(mine.token_ids, mine.loss_mask, strict=True) if flag]
        session.record(opening, completion(ids), message)
    (found,) = session.trajectories(**EXPORT_ARGS)
    assert found.token_ids == whole.token_ids
    assert found.loss_mask == whole.loss_mask


def test_a_long_session_takes_a_few_bytes_per_token():
    session, messages, words = Session("s", renderer()), [user()], "the pony is in the box " * 120
    for _ in range(20):
        ids = ids_of("x", SpecialToken.THINK_CLOSE, words, SpecialToken.USER)
        _, _, reply = say(session, messages, ids)
        messages += [reply, user(words)]
    assert session.tree.nbytes < 12 * session.num_tokens
    before = session.tree.nbytes / session.num_tokens
    for _ in range(20):
        _, _, reply = say(session, messages, ids)
        messages += [reply, user(words)]
    assert session.tree.nbytes / session.num_tokens < 1.1 * before, "linear, not quadratic"


# --- other families -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """A model folder with a template like that of Qwen2.5."""
    folder = tmp_path_factory.mktemp("family")
    files = tokenizer_from_gguf(write_gguf(folder / "m.gguf", pre="qwen2")).files()
    named = {**files, "chat_template.jinja": CHATML.encode()}
    return get_renderer(Tokenizer(named, name="family"))


@pytest.mark.parametrize("stops", [True, False])
def test_sessions_of_other_families_extend_their_own_tokens(family, stops):
    assert isinstance(family, ChatTemplateRenderer)
    end, encode = (
        family.stop_token_ids[0],
        lambda text: family.tokenizer.encode(text, specials=False),
    )
    session, messages, log = Session("s", family), [user("Hi")], []
    for turn in range(3):
        opening = session.begin_turn(messages)
        odd = [i for letter in f"reply {turn}" for i in encode(letter)]
        done = completion([*odd, *([end] if stops else [])], finish="stop" if stops else "length")
        log.append((tuple(opening.prompt), done))
        session.record(opening, done, Message(role="assistant", content=f"reply {turn}"))
        messages += [Message(role="assistant", content=f"reply {turn}"), user("More")]
    (found,) = session.trajectories(**EXPORT_ARGS)
    for (before, done), (after, _) in pairwise(log):
        past = before + done.token_ids
        assert after[: len(past)] == past
        assert (after[len(past)] == end) != stops, "one end of the turn, sampled or put there"
    assert found.token_ids == log[-1][0] + log[-1][1].token_ids
    assert sum(found.loss_mask) == sum(len(done.token_ids) for _, done in log)
