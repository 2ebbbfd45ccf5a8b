"""What an agent sent with the turn before is not read again, and nothing comes out otherwise."""

import asyncio
from dataclasses import replace
from random import Random

from paddock.api.delta_parser import DeltaParser
from paddock.records import Message, SamplingParams
from paddock.rollout.client import Ask, last_delta
from paddock.rollout.live import Live, Rules
from paddock.rollout.match import LOOSE, STRICT, Matcher
from paddock.rollout.session import PRESERVED, Past, Session
from paddock.text import SpecialToken, parse_completion
from paddock.text.messages import parse_messages
from tests.rollout.engines import SPEC, Chancy, completion, renderer, tokenizer
from tests.rollout.talks import CALL_OF_NOW, SILENT, follow_up, ids_of, rewritten, say, user


def as_sent(message, *, ids=True):
    """A message as an agent spells it."""
    calls = [
        {"function": {"name": call.name, "arguments": dict(call.arguments)}}
        | ({"id": call.id} if ids else {})
        for call in message.tool_calls
    ]
    found = {"role": message.role, "content": message.content}
    found |= {"reasoning_content": message.reasoning} if message.reasoning else {}
    found |= {"tool_call_id": message.tool_call_id} if message.tool_call_id and ids else {}
    return found | ({"tool_calls": calls} if calls else {})


def facts(opening):
    names = ("prompt", "added", "parent", "came", "key", "entries", "forked")
    return {name: getattr(opening, name) for name in names}


def test_going_on_from_the_turn_before_finds_what_reading_all_of_it_finds():
    """Whatever an agent does to its past, its thoughts, its tools and its ids."""
    assert sum(asyncio.run(roam(seed)) for seed in range(60)) > 100


async def roam(seed):
    """One session, each turn found both ways; in how many the past was not read again."""
    chance, engine = Random(seed), Chancy(seed=seed)
    rule = chance.choice([LOOSE, STRICT, Matcher("deaf", LOOSE.key, "ignored")])
    live = Live(Session("s", renderer(), rule), Rules(matcher=rule))
    session, named, skipped, messages = live.session, chance.random() < 0.7, 0, [user()]
    for _ in range(10):
        tools = SPEC if chance.random() < 0.9 else SPEC[:1]
        mode = {"tools": tools, "thinking": chance.choice([PRESERVED, PRESERVED, SILENT])}
        raw = [as_sent(message, ids=named) for message in messages]
        sent = live.sent(raw)
        found = session.found(sent.messages, past=sent.past, **mode)
        opening = session.opened(found)
        skipped += bool(sent.past) and "_all" not in vars(sent.messages)
        assert facts(opening) == facts(session.begin(parse_messages(raw), **mode))
        assert tuple(sent.messages) == parse_messages(raw)
        live.hear(sent, found.past)
        answer = await engine.respond(
            Ask(token_ids=opening.prompt, sampling=SamplingParams(), session="s")
        )
        reading = DeltaParser(
            tokenizer(), tools=tools, prompt=opening.prompt, stops=(), call_id="c{}".format
        )
        reading.feed(last_delta(answer))
        reply = reading.message
        if chance.random() < 0.9:
            session.record(opening, answer.completion, reply)
        if chance.random() < 0.1:
            reply = replace(reply, reasoning=chance.choice([None, "Something else."]))
        messages = [*messages, reply, *follow_up(chance, reply)]
        messages = rewritten(chance, messages) if chance.random() < 0.3 else messages
    return skipped


def test_agents_that_only_append_are_not_read_again():
    live = Live(Session("s", renderer()), Rules())
    messages = [user()]
    for turn in range(4):
        sent = live.sent([as_sent(message) for message in messages])
        found = live.session.found(sent.messages, past=sent.past, tools=SPEC, thinking=PRESERVED)
        opening = live.session.opened(found)
        assert bool(turn) == (sent.past is not None) == ("_all" not in vars(sent.messages))
        live.hear(sent, found.past)
        ids = ids_of(f"turn {turn}", *CALL_OF_NOW, SpecialToken.OBSERVATION)
        done = completion(ids)
        reply = parse_completion(
            tokenizer(), ids, finish="stop", tools=SPEC, prompt=opening.prompt
        ).message
        live.session.record(opening, done, reply)
        result = Message(role="tool", content="x" * 100, tool_call_id=reply.tool_calls[0].id)
        messages += [reply, result]
        again = live.session.found(messages, tools=SPEC, thinking=PRESERVED)
        assert again.letters == 100, "results of tools become tokens alone"
        asked = live.session.found([*messages, user()], tools=SPEC, thinking=PRESERVED)
        assert asked.letters > 100 * (turn + 1), "for a user the past may have to be said anew"


def test_a_twin_that_follows_other_thoughts_is_not_gone_on_from():
    """Two sub-agents say the same after replies that differ in what they thought alone."""
    session = Session("s", renderer())
    mode = {"tools": SPEC, "thinking": PRESERVED}
    one, other = (
        say(session, [user()], ids_of(thought, SpecialToken.THINK_CLOSE, "so", SpecialToken.USER))[
            2
        ]
        for thought in ("one", "other")
    )
    ids = ids_of("hm", SpecialToken.THINK_CLOSE, "same", SpecialToken.USER)
    asked = [session.found([user(), reply, user()], **mode) for reply in (one, other)]
    for found in asked:
        opening = session.opened(found)
        parsed = parse_completion(
            tokenizer(), ids, finish="stop", tools=SPEC, prompt=opening.prompt
        )
        session.record(opening, completion(ids), parsed.message)
    messages = [user(), one, user(), parsed.message, user()]
    again = session.opened(session.found(messages, past=asked[0].past, **mode))
    assert facts(again) == facts(session.begin(messages, **mode))
    assert "other" not in tokenizer().decode(again.prompt.tolist())


def test_a_result_that_comes_late_still_answers_its_call():
    """Without ids only the reply says which call it answers, so that must be read too."""
    call = {"function": {"name": "now", "arguments": "{}"}}
    raw = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "first"},
        {"role": "tool", "content": "second"},
    ]
    live = Live(Session("s", renderer()), Rules())
    live.hear(live.sent(raw[:3]), Past(length=3, head=b"", key=b""))
    sent = live.sent(raw)
    assert sent.messages[-1].tool_call_id == "call_1_1"
