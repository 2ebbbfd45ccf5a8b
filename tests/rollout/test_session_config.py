"""Session config: defaults, stop strings, matchers and chat templates, as clients see them."""

from dataclasses import dataclass, replace

import pytest

from paddock.records import Grammar, LogitBias, SamplingParams
from paddock.rollout.session_manager import SessionConfig
from paddock.text import ChatTemplate, SpecialToken
from paddock.text.chat_template_renderer import ChatTemplateRenderer
from tests.rollout.agents import AGENTS, HTTP, ChatAgent
from tests.rollout.conversations import ids_of
from tests.rollout.engines import RandomEngine, ScriptedEngine, completion, tokenizer
from tests.rollout.test_gateway import VARIANTS, exported, gateway, opened


def test_a_session_inherits_every_field_it_does_not_set():
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
    with gateway(RandomEngine(), rules=own) as (url, sessions):
        opened(url, "as-ruled")
        opened(url, "other", max_tokens=3, stop=[], seed=5)
        assert sessions["as-ruled"].rules.sampling_params == own.sampling_params
        changed = replace(own.sampling_params, max_new_tokens=3, min_new_tokens=3, stop=(), seed=5)
        assert sessions["other"].rules.sampling_params == changed


@dataclass
class StopMatchingEngine(ScriptedEngine):
    """Reports the stop string that ended its reply, as an engine does."""

    async def generate(self, request):
        answer = await super().generate(request)
        text = tokenizer().decode(answer.completion.token_ids)
        return replace(
            answer, matched_stop=next(t for t in request.sampling_params.stop if t in text)
        )


@pytest.mark.parametrize(("name", "stream"), VARIANTS)
def test_a_stop_string_of_the_session_is_not_returned(name, stream):
    ended = completion(ids_of("hm", SpecialToken.THINK_CLOSE, "so END"))
    with gateway(StopMatchingEngine([ended, ended])) as (url, _):
        api = opened(url, "s", stop=["END"])
        agent = AGENTS[name](api, stream=stream)
        for text in ("Hi", "Sure?"):
            agent.say(text)
            agent.turn()
        history = str(agent.items if name == "responses" else agent.messages)
        assert "so " in history and "END" not in history
        assert [len(found["turns"]) for found in exported(url, "s")] == [2]


@pytest.mark.parametrize("matcher", ["strict", "loose"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_gets_reasoning_as_content_continues_its_branch(stream, matcher):
    ended = completion(ids_of("hm", SpecialToken.THINK_CLOSE, "so", SpecialToken.USER))
    with gateway(ScriptedEngine([ended, ended])) as (url, _):
        api = opened(url, "s", matcher=matcher)
        agent = ChatAgent(api, stream=stream)
        for text in ("Hi", "Sure?"):
            agent.say(text)
            agent.turn(extra_body={"separate_reasoning": False})
        assert agent.messages[1]["content"] == "<think>hm</think>so"
        assert [len(found["turns"]) for found in exported(url, "s")] == [2]


@pytest.mark.parametrize("path", ["chat/completions", "messages", "messages/count_tokens"])
def test_messages_a_template_cannot_render_are_rejected_by_every_api(path):
    picky = ChatTemplate("{{ raise_exception('no system here') }}", name="picky")
    with gateway(RandomEngine(), ChatTemplateRenderer(tokenizer(), picky)) as (url, _):
        api = opened(url, "s")
        body = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
        refused = HTTP.post(f"{api.url}/v1/{path}", json=body, headers=api.headers)
    assert refused.status_code == 400 and "no system here" in refused.text
