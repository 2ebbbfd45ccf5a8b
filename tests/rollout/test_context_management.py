"""Context management: messages of the next prompt, restarts, the gateway's sessions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.records import Message, ToolCall
from paddock.rollout.context_management import (
    OMITTED,
    ContextManager,
    ContextSettings,
    initial_messages,
    omit_tool_results,
)
from paddock.text import SpecialToken
from tests.rollout.agents import AGENTS, HTTP
from tests.rollout.conversations import CALL_OF_NOW, assert_each_token_trained_once, ids_of
from tests.rollout.engines import ScriptedEngine, completion, tokenizer
from tests.rollout.test_gateway import ADMIN, gateway, opened

TASK = [Message(role="system", content="rules"), Message(role="user", content="question")]
MORE = Message(role="user", content="and now?")


def turn(number, calls=1, size=10):
    made = tuple(ToolCall(id=f"{number}.{n}", name="search") for n in range(calls))
    reply = Message(role="assistant", content=f"turn {number}", tool_calls=made)
    answers = [Message(role="tool", content="x" * size, tool_call_id=call.id) for call in made]
    return [reply, *answers]


def conversation(*turns):
    return [*TASK, *(message for one in turns for message in one)]


def characters(messages):
    return sum(len(message.content) for message in messages)


def results(messages):
    return [message.content for message in messages if message.role == "tool"]


def managed(**settings):
    return ContextManager(ContextSettings(**settings))


def shown(manager, messages):
    """What a policy does before it samples, with characters for tokens."""
    manager.restart(messages, characters(manager.visible(messages)))
    return list(manager.visible(messages))


def test_the_task_is_everything_before_the_first_reply():
    assert initial_messages(conversation(turn(1))) == TASK
    assert initial_messages(TASK) == TASK


@pytest.mark.parametrize(("turns", "kept"), [(1, 1), (2, 3), (3, 4), (9, 4)])
def test_only_recent_results_are_kept_and_results_of_one_reply_together(turns, kept):
    messages = conversation(turn(1), turn(2, calls=2), turn(3))
    found = omit_tool_results(messages, turns)
    assert results(found) == [OMITTED] * (4 - kept) + ["x" * 10] * kept
    assert [m.tool_call_id for m in found] == [m.tool_call_id for m in messages]
    assert [m for m in found if m.role != "tool"] == [m for m in messages if m.role != "tool"]


def test_everything_is_kept_unless_asked_otherwise():
    messages = conversation(*(turn(n, size=10_000) for n in range(9)))
    assert managed().visible(messages) is messages
    assert not managed().restart(messages, 10**9)


def test_a_prompt_beyond_the_limit_restarts_from_the_task():
    first = conversation(turn(1), turn(2))
    manager = managed(strategy="discard_all", max_tokens=characters(first))
    assert shown(manager, first) == first
    assert shown(manager, conversation(turn(1), turn(2), turn(3))) == TASK
    assert shown(manager, conversation(turn(1), turn(2), turn(3), turn(4))) == conversation(turn(4))


def test_what_the_user_said_after_the_last_reply_survives_a_restart():
    manager = managed(strategy="discard_all", max_tokens=40)
    assert shown(manager, [*conversation(turn(1, size=99)), MORE]) == [*TASK, MORE]


def test_a_prompt_that_no_restart_can_shorten_is_left_alone():
    manager = managed(strategy="discard_all", max_tokens=5)
    assert not manager.restart(TASK, characters(TASK))
    messages = conversation(turn(1))
    assert manager.restart(messages, characters(messages))
    assert not manager.restart(messages, characters(TASK)), "there is nothing new to discard"


def test_conversations_of_one_session_restart_each_on_its_own():
    manager = managed(strategy="discard_all", max_tokens=60)
    long, other = conversation(turn(1, size=99)), conversation(turn(2))
    assert shown(manager, long) == TASK
    assert shown(manager, other) == other, "a sub-agent with another history"
    edited = [*TASK, turn(1)[0], Message(role="tool", content="edited", tool_call_id="1.0")]
    assert shown(manager, edited) == edited, "a history that never was too long"
    assert shown(manager, [*long, *turn(3)]) == conversation(turn(3))


def test_omitting_comes_before_discarding():
    # With old results omitted three turns fit; without, they would not.
    messages = conversation(*(turn(n, size=400) for n in (1, 2, 3)))
    both = {"recent_turns": 1, "max_tokens": 600}
    assert results(shown(managed(strategy="hierarchical", **both), messages)) == [
        *([OMITTED] * 2),
        "x" * 400,
    ]
    assert shown(managed(strategy="discard_all", **both), messages) == TASK


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), max_size=12))
def test_the_context_never_exceeds_its_limit_and_drops_only_by_rule(shape):
    turns = [turn(n, calls, size) for n, (calls, size) in enumerate(shape)]
    manager = managed(strategy="hierarchical", recent_turns=2, max_tokens=300)
    for count in range(len(turns) + 1):
        found = shown(manager, conversation(*turns[:count]))
        assert found[: len(TASK)] == TASK
        assert characters(found) <= 300
        replies = [m.content for m in found if m.role == "assistant"]
        every = [f"turn {n}" for n in range(count)]
        assert replies == every[len(every) - len(replies) :]


# --- sessions of the gateway ----------------------------------------------------------------------


@pytest.mark.parametrize("name", AGENTS)
def test_a_session_shortens_what_its_agent_sends(name):
    """An agent that only ever appends; the prompts stay below the limit, each token is trained."""
    thought = ids_of("thought", SpecialToken.THINK_CLOSE, *CALL_OF_NOW, SpecialToken.OBSERVATION)
    engine, limit = ScriptedEngine([completion(thought)] * 12), 950
    rule = {"strategy": "hierarchical", "recent_turns": 1, "max_tokens": limit}
    with gateway(engine) as (url, sessions):
        agent = AGENTS[name](opened(url, "s", context_management=rule), stream=False)
        agent.say("Go.")
        for number in range(12):
            agent.answer([(call, f"result {number}") for call in agent.turn()])
        assert_each_token_trained_once(sessions["s"].session)
    prompts = [tokenizer().decode(list(entry.prompt)) for entry in engine.log]
    assert any(OMITTED in prompt for prompt in prompts)
    assert any("thought" not in prompt for prompt in prompts[1:]), "restarted"
    assert all(len(entry.prompt) <= limit for entry in engine.log)


@pytest.mark.parametrize("bad", [{"strategy": "summarize"}, {"max_tokens": 0}, {"turns": 3}])
def test_settings_that_do_not_exist_are_refused_by_name(bad):
    with gateway(ScriptedEngine([])) as (url, _):
        body = {"id": "s", "context_management": bad}
        reply = HTTP.post(f"{url}/sessions", json=body, headers=ADMIN)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "context_management"
    assert next(iter(bad)) in reply.json()["error"]["message"]
