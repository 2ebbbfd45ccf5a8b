"""Incremental prefix matching: messages of the previous turn are not parsed again, same result."""

import asyncio
from dataclasses import replace
from random import Random

from paddock.api.delta_parser import DeltaParser
from paddock.records import Message, SamplingParams
from paddock.rollout.client import InferenceRequest, final_delta
from paddock.rollout.prefix_matcher import LOOSE, STRICT, PrefixMatcher
from paddock.rollout.session import PRESERVED, Session, SessionHistory
from paddock.rollout.session_manager import LiveSession, SessionConfig
from paddock.text import SpecialToken, parse_completion
from paddock.text.messages import parse_messages
from tests.rollout.conversations import CALL_OF_NOW, SILENT, follow_up, ids_of, rewritten, say, user
from tests.rollout.engines import SPEC, RandomEngine, completion, renderer, tokenizer


def as_sent(message, *, ids=True):
    """A message as an agent sends it."""
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
    names = ("prompt", "new_token_ids", "parent", "new_messages", "key", "entries", "fork_reason")
    return {name: getattr(opening, name) for name in names}


def test_incremental_matching_equals_full_matching():
    """Whatever an agent does to its history, reasoning, tools and ids."""
    assert sum(asyncio.run(run_random_session(seed)) for seed in range(60)) > 100


async def run_random_session(seed):
    """One session, each turn matched both ways; returns how many did not reparse the history."""
    rng, engine = Random(seed), RandomEngine(seed=seed)
    rule = rng.choice([LOOSE, STRICT, PrefixMatcher("deaf", LOOSE.key, "ignored")])
    live = LiveSession(Session("s", renderer(), rule), SessionConfig(matcher=rule))
    session, named, skipped, messages = live.session, rng.random() < 0.7, 0, [user()]
    for _ in range(10):
        tools = SPEC if rng.random() < 0.9 else SPEC[:1]
        mode = {"tools": tools, "thinking": rng.choice([PRESERVED, PRESERVED, SILENT])}
        raw = [as_sent(message, ids=named) for message in messages]
        sent = live.parse_messages(raw)
        found = session.match_prefix(sent.messages, past=sent.history, **mode)
        opening = session.build_prompt(found)
        skipped += bool(sent.history) and "_all" not in vars(sent.messages)
        assert facts(opening) == facts(session.begin_turn(parse_messages(raw), **mode))
        assert tuple(sent.messages) == parse_messages(raw)
        live.remember_messages(sent, found.history)
        answer = await engine.generate(
            InferenceRequest(
                token_ids=opening.prompt, sampling_params=SamplingParams(), session_id="s"
            )
        )
        reading = DeltaParser(
            tokenizer(), tools=tools, prompt=opening.prompt, stops=(), call_id="c{}".format
        )
        reading.feed(final_delta(answer))
        reply = reading.message
        if rng.random() < 0.9:
            session.record(opening, answer.completion, reply)
        if rng.random() < 0.1:
            reply = replace(reply, reasoning=rng.choice([None, "Something else."]))
        messages = [*messages, reply, *follow_up(rng, reply)]
        messages = rewritten(rng, messages) if rng.random() < 0.3 else messages
    return skipped


def test_an_append_only_history_is_not_parsed_again():
    live = LiveSession(Session("s", renderer()), SessionConfig())
    messages = [user()]
    for turn in range(4):
        sent = live.parse_messages([as_sent(message) for message in messages])
        found = live.session.match_prefix(
            sent.messages, past=sent.history, tools=SPEC, thinking=PRESERVED
        )
        opening = live.session.build_prompt(found)
        assert bool(turn) == (sent.history is not None) == ("_all" not in vars(sent.messages))
        live.remember_messages(sent, found.history)
        ids = ids_of(f"turn {turn}", *CALL_OF_NOW, SpecialToken.OBSERVATION)
        done = completion(ids)
        reply = parse_completion(
            tokenizer(), ids, finish="stop", tools=SPEC, prompt=opening.prompt
        ).message
        live.session.record(opening, done, reply)
        result = Message(role="tool", content="x" * 100, tool_call_id=reply.tool_calls[0].id)
        messages += [reply, result]
        again = live.session.match_prefix(messages, tools=SPEC, thinking=PRESERVED)
        assert again.num_chars == 100, "results of tools become tokens alone"
        matched = live.session.match_prefix([*messages, user()], tools=SPEC, thinking=PRESERVED)
        assert matched.num_chars > 100 * (turn + 1), (
            "a user message may need the history rendered again"
        )


def test_a_reply_that_follows_other_reasoning_is_not_continued():
    """Two sub-agents send the same after replies that differ only in reasoning."""
    session = Session("s", renderer())
    mode = {"tools": SPEC, "thinking": PRESERVED}
    one, other = (
        say(session, [user()], ids_of(thought, SpecialToken.THINK_CLOSE, "so", SpecialToken.USER))[
            2
        ]
        for thought in ("one", "other")
    )
    ids = ids_of("hm", SpecialToken.THINK_CLOSE, "same", SpecialToken.USER)
    matched = [session.match_prefix([user(), reply, user()], **mode) for reply in (one, other)]
    for found in matched:
        opening = session.build_prompt(found)
        parsed = parse_completion(
            tokenizer(), ids, finish="stop", tools=SPEC, prompt=opening.prompt
        )
        session.record(opening, completion(ids), parsed.message)
    messages = [user(), one, user(), parsed.message, user()]
    again = session.build_prompt(session.match_prefix(messages, past=matched[0].history, **mode))
    assert facts(again) == facts(session.begin_turn(messages, **mode))
    assert "other" not in tokenizer().decode(again.prompt.tolist())


def test_a_late_tool_result_still_matches_its_call():
    """Without ids only the reply tells which call it answers, so the reply must be parsed too."""
    call = {"function": {"name": "now", "arguments": "{}"}}
    raw = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "first"},
        {"role": "tool", "content": "second"},
    ]
    live = LiveSession(Session("s", renderer()), SessionConfig())
    live.remember_messages(
        live.parse_messages(raw[:3]), SessionHistory(length=3, head=b"", digest=b"")
    )
    sent = live.parse_messages(raw)
    assert sent.messages[-1].tool_call_id == "call_1_1"
