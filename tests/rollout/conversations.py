"""Sessions by hand: one turn after another, in tokens that a test chooses."""

from dataclasses import replace

from paddock.records import Message, Verdict
from paddock.rollout.session import PRESERVED
from paddock.text import SpecialToken, parse_completion
from tests.rollout.engines import SPEC, completion, tokenizer
from tests.text.conversations import MARKERS, WORDS, text

JUDGED = {"task_id": "t", "group_id": "g", "outcome": Verdict(reward=1.0)}
SILENT = replace(PRESERVED, enable_thinking=False)


def user(said="Go on."):
    return Message(role="user", content=said)


def say(session, messages, ids, *, thinking=PRESERVED, tools=SPEC, **more):
    """One turn, recorded: what was asked, what was answered."""
    opening = session.begin_turn(messages, tools=tools, thinking=thinking)
    done = completion(ids, **more)
    parsed = parse_completion(
        tokenizer(), ids, finish=done.finish, tools=tools, prompt=opening.prompt
    )
    session.record(opening, done, parsed.message)
    return opening, done, parsed.message


def ids_of(said, *markers):
    """Plain text and markers as tokens."""
    found = []
    for part in (said, *markers):
        marker = isinstance(part, SpecialToken)
        found += (
            [tokenizer().special_token_ids[part]]
            if marker
            else tokenizer().encode(part, specials=False)
        )
    return found


CALL_OF_NOW = (SpecialToken.TOOL_CALL_OPEN, "now", SpecialToken.TOOL_CALL_CLOSE)


def assert_each_token_trained_once(session):
    every = session.trajectories(**JUDGED)
    assert sum(sum(t.loss_mask) for t in every) == sum(
        sum(node.completion().sampled) for node in session.tree.nodes
    )
    for found in every:
        assert found.branch == every.index(found)
        assert found.turns[-1].trained


def follow_up(chance, reply):
    """What a world might say to a reply."""
    words = (*WORDS, *MARKERS)
    results = [
        Message(role="tool", content=text(chance, words), tool_call_id=call.id)
        for call in reply.tool_calls
        if chance.random() < 0.95
    ]
    chance.shuffle(results)
    if not results or chance.random() < 0.2:
        results.append(Message(role="user", content=text(chance, words)))
    if chance.random() < 0.1:
        results.append(Message(role="system", content=text(chance, words)))
    return results


def rewritten(chance, messages):
    match chance.randrange(6):
        case 0:
            return messages[: chance.randint(1, len(messages) - 2)]  # go back
        case 1:
            return [messages[0], user("So far: nothing.")]  # compaction
        case 2:
            at = chance.randrange(len(messages))
            return [*messages[:at], replace(messages[at], content="edited"), *messages[at + 1 :]]
    return messages
