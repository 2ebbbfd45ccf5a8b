"""Sessions built turn by turn from tokens that a test chooses."""

from dataclasses import replace

from paddock.records import Message, Verdict
from paddock.rollout.session import PRESERVED
from paddock.text import SpecialToken, parse_completion
from tests.rollout.engines import SPEC, completion, tokenizer
from tests.text.conversations import MARKERS, WORDS, text

EXPORT_ARGS = {"task_id": "t", "group_id": "g", "outcome": Verdict(reward=1.0)}
SILENT = replace(PRESERVED, enable_thinking=False)


def user(content="Go on."):
    return Message(role="user", content=content)


def say(session, messages, ids, *, thinking=PRESERVED, tools=SPEC, **more):
    """Record one turn; returns its opening, completion and message."""
    opening = session.begin_turn(messages, tools=tools, thinking=thinking)
    done = completion(ids, **more)
    parsed = parse_completion(
        tokenizer(), ids, finish=done.finish, tools=tools, prompt=opening.prompt
    )
    session.record(opening, done, parsed.message)
    return opening, done, parsed.message


def ids_of(content, *markers):
    """Plain text and markers as tokens."""
    found = []
    for part in (content, *markers):
        marker = isinstance(part, SpecialToken)
        found += (
            [tokenizer().special_token_ids[part]]
            if marker
            else tokenizer().encode(part, specials=False)
        )
    return found


CALL_OF_NOW = (SpecialToken.TOOL_CALL_OPEN, "now", SpecialToken.TOOL_CALL_CLOSE)


def assert_each_token_trained_once(session):
    every = session.trajectories(**EXPORT_ARGS)
    assert sum(sum(t.loss_mask) for t in every) == sum(
        sum(node.completion().sampled) for node in session.tree.nodes
    )
    for found in every:
        assert found.branch == every.index(found)
        assert found.turns[-1].trained


def follow_up(rng, reply):
    """Random messages of an environment after a reply."""
    words = (*WORDS, *MARKERS)
    results = [
        Message(role="tool", content=text(rng, words), tool_call_id=call.id)
        for call in reply.tool_calls
        if rng.random() < 0.95
    ]
    rng.shuffle(results)
    if not results or rng.random() < 0.2:
        results.append(Message(role="user", content=text(rng, words)))
    if rng.random() < 0.1:
        results.append(Message(role="system", content=text(rng, words)))
    return results


def rewritten(rng, messages):
    match rng.randrange(6):
        case 0:
            return messages[: rng.randint(1, len(messages) - 2)]  # go back
        case 1:
            return [messages[0], user("So far: nothing.")]  # compaction
        case 2:
            at = rng.randrange(len(messages))
            return [*messages[:at], replace(messages[at], content="edited"), *messages[at + 1 :]]
    return messages
