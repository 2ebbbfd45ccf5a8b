"""Sessions by hand: one turn after another, in tokens that a test chooses."""

from dataclasses import replace

from paddock.records import Message, Verdict
from paddock.rollout.session import PRESERVED
from paddock.text import Special, parse
from tests.rollout.engines import SPEC, completion, tokenizer

JUDGED = {"task_id": "t", "group_id": "g", "outcome": Verdict(reward=1.0)}
SILENT = replace(PRESERVED, enable_thinking=False)


def user(said="Go on."):
    return Message(role="user", content=said)


def say(session, messages, ids, *, thinking=PRESERVED, tools=SPEC, **more):
    """One turn, recorded: what was asked, what was answered."""
    opening = session.begin(messages, tools=tools, thinking=thinking)
    done = completion(ids, **more)
    parsed = parse(tokenizer(), ids, finish=done.finish, tools=tools, prompt=opening.prompt)
    session.record(opening, done, parsed.message)
    return opening, done, parsed.message


def ids_of(said, *markers):
    """Plain text and markers as tokens."""
    found = []
    for part in (said, *markers):
        marker = isinstance(part, Special)
        found += (
            [tokenizer().specials[part]] if marker else tokenizer().encode(part, specials=False)
        )
    return found


CALL_OF_NOW = (Special.TOOL_CALL_OPEN, "now", Special.TOOL_CALL_CLOSE)


def assert_each_token_trained_once(session):
    every = session.trajectories(**JUDGED)
    assert sum(sum(t.trained) for t in every) == sum(
        sum(node.completion().sampled) for node in session.tree.nodes
    )
    for found in every:
        assert found.branch == every.index(found)
        assert found.turns[-1].trained
