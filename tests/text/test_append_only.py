import pytest

from paddock.text import VERSIONS, ChatTemplateError, Mode, Template, Thinking, rewrite
from paddock.text.template import glm_template
from tests.data.tiny import byte_tokenizer

PRESERVED = Thinking(clear_thinking=False)
INTERLEAVED = Thinking(clear_thinking=True)
OFF = Thinking(enable_thinking=False)


def verdict(template, mode):
    return rewrite(template, byte_tokenizer(), mode)


@pytest.mark.parametrize("version", VERSIONS)
def test_preserved_thinking_only_grows(version):
    template = glm_template(version)
    for mode in (
        Mode(thinking=PRESERVED),
        Mode(thinking=PRESERVED, tools=False),
        Mode(thinking=PRESERVED, users=False),
        Mode(thinking=OFF),
    ):
        assert verdict(template, mode) is None


@pytest.mark.parametrize("version", VERSIONS)
def test_interleaved_thinking_only_grows_until_a_user_speaks(version):
    template = glm_template(version)
    assert verdict(template, Mode(thinking=INTERLEAVED, users=False)) is None
    found = verdict(template, Mode(thinking=INTERLEAVED))
    assert found.step == "messages[6] (user)"
    assert "Hm." in found.was and "</think>Looking" in found.became


@pytest.mark.parametrize(
    ("version", "grows"),
    [
        ("5", True),
        ("5.1", False),  # a reply without thoughts looks different once thinking is on again
        ("5.2", False),  # the line about effort comes and goes
        ("5.3", True),
    ],
)
def test_switching_thinking_from_turn_to_turn(version, grows):
    mode = Mode(thinking=PRESERVED, switching=True)
    assert (verdict(glm_template(version), mode) is None) is grows


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


def test_a_plain_template_only_grows():
    assert verdict(Template(GOOD + OPENER, name="good"), Mode()) is None


@pytest.mark.parametrize("name", BAD)
def test_a_template_that_rewrites_the_past_is_caught(name):
    found = verdict(Template(BAD[name], name=name), Mode())
    assert found is not None and found.was != found.became
    assert f"token {found.position} changes" in str(found)


def test_a_template_that_cannot_play_the_session_says_so():
    source = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    template = Template(source + GOOD + OPENER, name="m")
    with pytest.raises(ChatTemplateError, match="the chat template of m: no tools"):
        verdict(template, Mode())
