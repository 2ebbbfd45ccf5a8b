import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.envs.context import OMITTED, discard_all, hierarchical, initial_messages, keep_recent
from paddock.records import Message, ToolCall

TASK = [Message(role="system", content="rules"), Message(role="user", content="question")]


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


def test_the_task_is_everything_before_the_first_reply():
    assert initial_messages(conversation(turn(1))) == TASK
    assert initial_messages(TASK) == TASK


@pytest.mark.parametrize(("turns", "kept"), [(0, 0), (1, 1), (2, 3), (3, 4), (9, 4)])
def test_only_recent_results_are_kept_and_results_of_one_reply_together(turns, kept):
    messages = conversation(turn(1), turn(2, calls=2), turn(3))
    shown = keep_recent(messages, turns)
    assert results(shown) == [OMITTED] * (4 - kept) + ["x" * 10] * kept
    assert [m.tool_call_id for m in shown] == [m.tool_call_id for m in messages]
    assert [m for m in shown if m.role != "tool"] == [m for m in messages if m.role != "tool"]


def test_the_history_is_discarded_beyond_the_limit():
    first = conversation(turn(1), turn(2))
    most = characters(first)
    assert discard_all(first, characters, most) == first
    assert discard_all(conversation(turn(1), turn(2), turn(3)), characters, most) == TASK
    anew = conversation(turn(1), turn(2), turn(3), turn(4))
    assert discard_all(anew, characters, most) == conversation(turn(4))


def test_omitting_comes_before_discarding():
    # With old results omitted three turns fit; without, they would not.
    messages = conversation(*(turn(n, size=400) for n in (1, 2, 3)))
    shown = hierarchical(messages, characters, turns=1, max_size=600)
    assert results(shown) == [OMITTED, OMITTED, "x" * 400]
    assert discard_all(messages, characters, 600) != messages
    many = conversation(*(turn(n, size=400) for n in range(30)))
    assert characters(hierarchical(many, characters, turns=1, max_size=600)) <= 600


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), max_size=12))
def test_the_context_never_exceeds_its_limit_and_drops_only_by_rule(shape):
    turns = [turn(n, calls, size) for n, (calls, size) in enumerate(shape)]
    most = 300
    for count in range(len(turns) + 1):
        shown = hierarchical(conversation(*turns[:count]), characters, turns=2, max_size=most)
        assert shown[: len(TASK)] == TASK
        assert characters(shown) <= most
        replies = [m.content for m in shown if m.role == "assistant"]
        every = [f"turn {n}" for n in range(count)]
        assert replies == every[len(every) - len(replies) :]
