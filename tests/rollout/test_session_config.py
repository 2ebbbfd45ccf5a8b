"""What a gateway's rules are worth to its sessions, and to the clients of these."""

from dataclasses import dataclass, replace

import pytest

from paddock.records import Grammar, LogitBias, SamplingParams
from paddock.rollout.session_manager import SessionConfig
from paddock.text import ChatTemplate, SpecialToken
from paddock.text.chat_template_renderer import ChatTemplateRenderer
from tests.rollout.agents import AGENTS, HTTP, ChatAgent
from tests.rollout.conversations import ids_of
from tests.rollout.engines import Chancy, Scripted, completion, tokenizer
from tests.rollout.test_gateway import VARIANTS, exported, gateway, opened


def test_a_session_keeps_every_rule_that_it_was_not_opened_with():
    own = SessionConfig(
        sampling_params=SamplingParams(
            max_new_tokens=20,
            min_new_tokens=5,
            frequency_penalty=0.5,
            presence_penalty=0.25,
            logit_bias=(LogitBias(3, -1.0),),
            stop_token_ids=(7,),
            stop=("END",),
            ignore_eos=True,
            seed=4,
            thinking_budget=9,
            grammar=Grammar("regex", "a+"),
        )
    )
    with gateway(Chancy(), rules=own) as (url, sessions):
        opened(url, "as-ruled")
        opened(url, "other", max_tokens=3, stop=[], seed=5)
        assert sessions["as-ruled"].rules.sampling_params == own.sampling_params
        changed = replace(own.sampling_params, max_new_tokens=3, min_new_tokens=3, stop=(), seed=5)
        assert sessions["other"].rules.sampling_params == changed


@dataclass
class Matching(Scripted):
    """Says which text ended its reply, as an engine does."""

    async def generate(self, ask):
        answer = await super().generate(ask)
        said = tokenizer().decode(answer.completion.token_ids)
        return replace(answer, matched_stop=next(t for t in ask.sampling_params.stop if t in said))


@pytest.mark.parametrize(("name", "stream"), VARIANTS)
def test_a_text_that_ends_replies_by_the_sessions_rules_is_not_told(name, stream):
    ended = completion(ids_of("hm", SpecialToken.THINK_CLOSE, "so END"))
    with gateway(Matching([ended, ended])) as (url, _):
        door = opened(url, "s", stop=["END"])
        agent = AGENTS[name](door, stream=stream)
        for said in ("Hi", "Sure?"):
            agent.say(said)
            agent.turn()
        heard = str(agent.items if name == "responses" else agent.messages)
        assert "so " in heard and "END" not in heard
        assert [len(found["turns"]) for found in exported(url, "s")] == [2]


@pytest.mark.parametrize("matcher", ["strict", "loose"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_is_told_thoughts_as_content_goes_on_where_it_was(stream, matcher):
    ended = completion(ids_of("hm", SpecialToken.THINK_CLOSE, "so", SpecialToken.USER))
    with gateway(Scripted([ended, ended])) as (url, _):
        door = opened(url, "s", matcher=matcher)
        agent = ChatAgent(door, stream=stream)
        for said in ("Hi", "Sure?"):
            agent.say(said)
            agent.turn(extra_body={"separate_reasoning": False})
        assert agent.messages[1]["content"] == "<think>hm</think>so"
        assert [len(found["turns"]) for found in exported(url, "s")] == [2]


@pytest.mark.parametrize("path", ["chat/completions", "messages", "messages/count_tokens"])
def test_what_a_template_will_not_say_is_refused_at_every_door(path):
    picky = ChatTemplate("{{ raise_exception('no system here') }}", name="picky")
    with gateway(Chancy(), ChatTemplateRenderer(tokenizer(), picky)) as (url, _):
        door = opened(url, "s")
        body = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
        refused = HTTP.post(f"{door.url}/v1/{path}", json=body, headers=door.headers)
    assert refused.status_code == 400 and "no system here" in refused.text
