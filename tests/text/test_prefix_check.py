import pytest

from paddock.text import ChatTemplate, ChatTemplateError, ThinkingKwargs
from paddock.text.chat_template import GLM_VERSIONS, glm_chat_template
from paddock.text.prefix_check import SessionPattern, find_prefix_change
from tests.data.tiny import byte_tokenizer

PRESERVED = ThinkingKwargs(clear_thinking=False)
INTERLEAVED = ThinkingKwargs(clear_thinking=True)
OFF = ThinkingKwargs(enable_thinking=False)


def verdict(template, mode):
    return find_prefix_change(template, byte_tokenizer(), mode)


@pytest.mark.parametrize("version", GLM_VERSIONS)
def test_preserved_thinking_is_append_only(version):
    template = glm_chat_template(version)
    for mode in (
        SessionPattern(thinking=PRESERVED),
        SessionPattern(thinking=PRESERVED, tools=False),
        SessionPattern(thinking=PRESERVED, users=False),
        SessionPattern(thinking=OFF),
    ):
        assert verdict(template, mode) is None


@pytest.mark.parametrize("version", GLM_VERSIONS)
def test_interleaved_thinking_is_append_only_until_a_user_message(version):
    template = glm_chat_template(version)
    assert verdict(template, SessionPattern(thinking=INTERLEAVED, users=False)) is None
    found = verdict(template, SessionPattern(thinking=INTERLEAVED))
    assert found.step == "messages[6] (user)"
    assert "Hm." in found.was and "</think>Looking" in found.became


@pytest.mark.parametrize(
    ("version", "grows"),
    [
        ("5", True),
        ("5.1", False),  # a reply without reasoning renders differently once thinking is on again
        ("5.2", False),  # the line about effort is not always there
        ("5.3", True),
    ],
)
def test_switching_thinking_from_turn_to_turn(version, grows):
    mode = SessionPattern(thinking=PRESERVED, switching=True)
    assert (verdict(glm_chat_template(version), mode) is None) is grows


GOOD = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
OPENER = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
BAD = {
    "counts": "{{ messages | length }} messages" + GOOD + OPENER,
    "forgets": GOOD.replace("messages", "messages[-4:]") + OPENER,
    "marks the last": GOOD.replace("{{ m.content }}", "{{ m.content }}{{ '!' if loop.last }}")
    + OPENER,
    "opens differently": GOOD + OPENER.replace("assistant|>", "assistant|>Well, "),
    "sorts": GOOD.replace("in messages", "in messages | sort(attribute='role')") + OPENER,
}


def test_a_plain_template_is_append_only():
    assert verdict(ChatTemplate(GOOD + OPENER, name="good"), SessionPattern()) is None


@pytest.mark.parametrize("name", BAD)
def test_a_template_that_is_not_prefix_preserving_is_detected(name):
    found = verdict(ChatTemplate(BAD[name], name=name), SessionPattern())
    assert found is not None and found.was != found.became
    assert f"token {found.position} changes" in str(found)


def test_a_template_that_cannot_render_the_session_is_reported():
    source = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    template = ChatTemplate(source + GOOD + OPENER, name="m")
    with pytest.raises(ChatTemplateError, match="the chat template of m: no tools"):
        verdict(template, SessionPattern())
