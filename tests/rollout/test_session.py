"""Sessions: the trainer gets exactly the ids, masks, logprobs and versions of the engine."""

import asyncio
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from paddock.api.delta_parser import DeltaParser
from paddock.records import Message, SamplingParams, ToolCall
from paddock.rollout.client import InferenceRequest, final_delta
from paddock.rollout.prefix_matcher import LOOSE, STRICT, PrefixMatcher
from paddock.rollout.session import PRESERVED, Session
from paddock.text import SpecialToken, ThinkingKwargs
from tests.rollout.conversations import (
    CALL_OF_NOW,
    EXPORT_ARGS,
    SILENT,
    assert_each_token_trained_once,
    follow_up,
    ids_of,
    rewritten,
    say,
    user,
)
from tests.rollout.engines import SPEC, RandomEngine, completion, renderer, tokenizer
from tests.text.conversations import MARKERS, WORDS, text

# --- A1, A2: random sessions ----------------------------------------------------------------------


async def run_append_only_session(session, engine, rng, *, modes):
    """An append-only agent in a random environment."""
    messages = [Message(role="system", content="Be brief.")] if rng.random() < 0.5 else []
    messages.append(user(text(rng, (*WORDS, *MARKERS))))
    tools = SPEC if rng.random() < 0.9 else ()
    for turn in range(rng.randint(1, 6)):
        thinking = rng.choice(modes)
        opening = session.begin_turn(messages, tools=tools, thinking=thinking)
        request = InferenceRequest(
            token_ids=opening.prompt, sampling_params=SamplingParams(), session_id=session.id
        )
        answer = await engine.generate(request)
        reading = DeltaParser(
            tokenizer(),
            tools=tools,
            prompt=opening.prompt,
            stops=(),
            call_id=f"c{turn}_{{}}".format,
        )
        reading.feed(final_delta(answer))
        session.record(opening, answer.completion, reading.message)
        messages += [reading.message, *follow_up(rng, reading.message)]


def assert_exact(session, log):
    """The only branch of a session equals the log of the engine."""
    (found,) = session.trajectories(**EXPORT_ARGS)
    assert len(found.turns) == len(log)
    for before, after in pairwise(log):
        past = before.prompt + before.completion.token_ids
        assert after.prompt[: len(past)] == past
    assert found.token_ids == log[-1].prompt + log[-1].completion.token_ids
    trained, logprobs, at = [False] * len(found.token_ids), [0.0] * len(found.token_ids), 0
    for turn, entry in zip(found.turns, log, strict=True):
        at = len(entry.prompt)
        assert turn.completion == entry.completion
        for i, (flag, logprob) in enumerate(
            zip(entry.completion.sampled, entry.completion.logprobs, strict=True)
        ):
            trained[at + i], logprobs[at + i] = flag, logprob
    assert found.loss_mask == tuple(trained)
    assert found.logprobs == tuple(logprobs)


@pytest.mark.parametrize("version", ["5", "5.1", "5.2", "5.3"])
def test_five_hundred_sessions_are_recorded_exactly(version):
    async def play_all():
        for number in range(130):
            rng, engine = Random(f"{version} {number}"), RandomEngine(seed=number)
            session = Session(str(number), renderer(version), rng.choice([LOOSE, STRICT]))
            modes = [PRESERVED, SILENT]
            if version == "5.2":  # its effort line at the top depends on thinking
                modes = [rng.choice(modes)]
            await run_append_only_session(session, engine, rng, modes=modes)
            assert_exact(session, engine.log)

    asyncio.run(play_all())


def test_non_canonical_tokens_are_kept():
    session, odd = Session("s", renderer()), []
    for letter in "the pony":
        odd += tokenizer().encode(letter, specials=False)
    assert odd != tokenizer().encode("the pony", specials=False)
    _, done, reply = say(session, [user()], [*odd, *ids_of("", SpecialToken.USER)], thinking=SILENT)
    assert reply.content == "the pony"
    opening, _, _ = say(session, [user(), reply, user()], ids_of("ok", SpecialToken.USER))
    assert opening.prompt.tolist()[len(session.tree.nodes[0].added) :][: len(odd)] == odd
    (found,) = session.trajectories(**EXPORT_ARGS)
    assert found.turns[0].completion == done


# --- A3: boundaries -------------------------------------------------------------------------------

ROLES = {"user": SpecialToken.USER, "tool": SpecialToken.OBSERVATION, "system": SpecialToken.SYSTEM}


@pytest.mark.parametrize(
    "stop", [SpecialToken.USER, SpecialToken.OBSERVATION, SpecialToken.ENDOFTEXT, None]
)
@pytest.mark.parametrize("role", ["user", "tool", "system"])
@pytest.mark.parametrize("thinking", [PRESERVED, SILENT])
def test_role_markers_appear_once_and_only_sampled_tokens_are_trained(stop, role, thinking):
    session = Session("s", renderer())
    reply_ids = (
        ids_of("hm", SpecialToken.THINK_CLOSE, *CALL_OF_NOW)
        if thinking is PRESERVED
        else ids_of("hm", *CALL_OF_NOW)
    )
    ids = reply_ids + ([tokenizer().special_token_ids[stop]] if stop else [])
    finish = "stop" if stop else "length"
    _, _, reply = say(session, [user()], ids, thinking=thinking, finish=finish)
    answer = reply.tool_calls[0].id if role == "tool" else None
    after = Message(role=role, content="12 C.", tool_call_id=answer)
    opening, _, _ = say(session, [user(), reply, after], ids_of("x", SpecialToken.USER))
    opener = tokenizer().special_token_ids[ROLES[role]]
    boundary = [*ids[len(reply_ids) :], *opening.new_token_ids[:1]]
    assert boundary.count(opener) == 1, "between the reply and what follows"
    assert (opening.new_token_ids[0] == opener) == (stop != ROLES[role])
    (found,) = session.trajectories(**EXPORT_ARGS)
    first = len(session.tree.nodes[0].added)
    assert found.loss_mask[first : first + len(ids)] == (True,) * len(ids)
    assert not any(found.loss_mask[first + len(ids) :][: len(opening.new_token_ids)])


def test_truncated_reasoning_is_closed_by_an_untrained_marker():
    session = Session("s", renderer())
    _, _, reply = say(session, [user()], ids_of("hm hm"), finish="length")
    opening, _, _ = say(session, [user(), reply, user()], ids_of("x"))
    assert opening.new_token_ids[0] == tokenizer().special_token_ids[SpecialToken.THINK_CLOSE]
    (found,) = session.trajectories(**EXPORT_ARGS)
    assert sum(found.loss_mask) == len(ids_of("hm hm")) + len(ids_of("x"))


# --- A4: harnesses that rewrite -------------------------------------------------------------------


def reasoning_turn(session):
    """A first turn with reasoning, content and two tool calls."""
    call = (
        *(SpecialToken.TOOL_CALL_OPEN, "get_weather", SpecialToken.ARG_KEY_OPEN, "city"),
        *(
            SpecialToken.ARG_KEY_CLOSE,
            SpecialToken.ARG_VALUE_OPEN,
            "Oslo",
            SpecialToken.ARG_VALUE_CLOSE,
        ),
        *(
            SpecialToken.ARG_KEY_OPEN,
            "days",
            SpecialToken.ARG_KEY_CLOSE,
            SpecialToken.ARG_VALUE_OPEN,
            "2",
        ),
        *(SpecialToken.ARG_VALUE_CLOSE, SpecialToken.TOOL_CALL_CLOSE),
    )
    ids = ids_of(
        "Think.", SpecialToken.THINK_CLOSE, "Look. ", *call, *CALL_OF_NOW, SpecialToken.OBSERVATION
    )
    return say(session, [user()], ids)[2]


def results(reply):
    return [Message(role="tool", content="12", tool_call_id=call.id) for call in reply.tool_calls]


def changed_call(reply, **changes):
    return replace(reply, tool_calls=(replace(reply.tool_calls[0], **changes), reply.tool_calls[1]))


REWRITES = {
    # how the reply is sent back -> whether the strict and the loose matcher accept it
    "as it was": (lambda r: r, True, True),
    "keys in another order": (
        lambda r: changed_call(r, arguments={"days": 2, "city": "Oslo"}), False, True,
    ),
    "a whole number as a float": (
        lambda r: changed_call(r, arguments={"city": "Oslo", "days": 2.0}), False, True,
    ),
    "reasoning left out": (lambda r: replace(r, reasoning=None), False, True),
    "reasoning inside content": (
        lambda r: replace(r, reasoning=None, content=f"<think>{r.reasoning}</think>{r.content}"),
        True, True,
    ),
    "blanks around content": (lambda r: replace(r, content=f"  {r.content}\n"), False, True),
    "ids of calls renamed": (lambda r: changed_call(r, id="other"), False, True),
    "other reasoning": (lambda r: replace(r, reasoning="Thought."), False, False),
    "other content": (lambda r: replace(r, content="Looked."), False, False),
    "other arguments": (
        lambda r: changed_call(r, arguments={"city": "Oslo", "days": 3}), False, False,
    ),
    "a call left out": (lambda r: replace(r, tool_calls=r.tool_calls[:1]), False, False),
}  # fmt: skip


@pytest.mark.parametrize("matcher", [STRICT, LOOSE], ids=lambda m: m.name)
@pytest.mark.parametrize("name", REWRITES)
def test_which_changes_of_a_reply_a_matcher_accepts(name, matcher):
    change, strict, loose = REWRITES[name]
    session = Session("s", renderer(), matcher)
    reply = reasoning_turn(session)
    echo = change(reply)
    opening, *_ = say(session, [user(), echo, *results(echo)], ids_of("ok", SpecialToken.USER))
    same = strict if matcher is STRICT else loose
    assert (opening.fork_reason == "") == same
    assert len(session.trajectories(**EXPORT_ARGS)) == (1 if same else 2)
    assert_each_token_trained_once(session)


def test_a_reply_that_contains_reasoning_markers_as_text_is_matched():
    session = Session("s", renderer())
    spelled = ids_of("<think>x</think>y", SpecialToken.USER)
    _, _, reply = say(session, [user()], spelled, thinking=SILENT)
    assert (reply.content, reply.reasoning) == ("<think>x</think>y", None)
    assert session.begin_turn([user(), reply, user()], tools=SPEC, thinking=SILENT).parent


def test_missing_arguments_equal_an_empty_object():
    session = Session("s", renderer())
    ids = ids_of("x", SpecialToken.THINK_CLOSE, *CALL_OF_NOW, SpecialToken.OBSERVATION)
    _, _, reply = say(session, [user()], ids)
    echo = replace(reply, tool_calls=(ToolCall(id="z", name="now", arguments={}),))
    assert session.begin_turn([user(), echo, *results(echo)], tools=SPEC, thinking=PRESERVED).parent


def test_a_custom_matcher():
    blind = PrefixMatcher("blind", lambda message: [message.role], "ignored")
    session = Session("s", renderer(), blind)
    reply = reasoning_turn(session)
    echo = Message(role="assistant", content="quite different")
    opening = session.begin_turn([user(), echo, user()], tools=SPEC, thinking=PRESERVED)
    assert opening.parent is session.tree.nodes[0] and reply != echo


def test_a_reply_split_into_several_messages_is_joined():
    session = Session("s", renderer())
    reply = reasoning_turn(session)
    first, second = reply.tool_calls
    parts = [
        Message(role="assistant", content="Look.", reasoning="Think.", tool_calls=(first,)),
        Message(role="assistant", content="", tool_calls=(second,)),
    ]
    opening = session.begin_turn([user(), *parts, *results(reply)], tools=SPEC, thinking=PRESERVED)
    assert opening.parent is session.tree.nodes[0]


def test_a_fork_keeps_the_shared_prefix():
    session, messages = Session("s", renderer()), [user()]
    for word in ("one", "two", "three"):
        _, _, reply = say(
            session, messages, ids_of(word, SpecialToken.THINK_CLOSE, word, SpecialToken.USER)
        )
        messages += [reply, user()]
    messages[3] = replace(messages[3], content="not two")  # the second reply
    opening, *_ = say(session, messages, ids_of("four", SpecialToken.USER))
    assert opening.parent is session.tree.nodes[0]
    past = session.tree.nodes[0].token_ids()
    assert opening.prompt[: len(past)] == past
    assert "not two" in tokenizer().decode(opening.new_token_ids.tolist())
    text = tokenizer().decode(opening.prompt.tolist())
    assert text.count("<|user|>") == 4 and "<|user|><|user|>" not in text
    straight, fork = session.trajectories(**EXPORT_ARGS)
    assert [t.trained for t in straight.turns] == [True, True, True]
    assert [t.trained for t in fork.turns] == [False, True]
    assert_each_token_trained_once(session)


def test_a_fork_after_truncated_reasoning_closes_it_first():
    session = Session("s", renderer())
    _, _, reply = say(session, [user()], ids_of("hm hm"), finish="length")
    foreign = Message(role="assistant", content="by others")
    opening, *_ = say(session, [user(), reply, user(), foreign, user()], ids_of("x"))
    assert opening.parent is session.tree.nodes[0]
    assert tokenizer().decode(opening.new_token_ids.tolist()).startswith("</think><|user|>Go on.")
    assert "by others" in tokenizer().decode(opening.new_token_ids.tolist())


def test_a_repeated_request_samples_a_sibling_from_the_same_prompt():
    session = Session("s", renderer())
    one, *_ = say(session, [user()], ids_of("one", SpecialToken.USER))
    other, *_ = say(session, [user()], ids_of("two", SpecialToken.USER))
    assert one.prompt == other.prompt
    assert [len(t.turns) for t in session.trajectories(**EXPORT_ARGS)] == [1, 1]
    assert_each_token_trained_once(session)


def test_other_tools_or_another_system_message_start_a_new_branch():
    for change in (
        {"tools": SPEC[:1]},
        {"messages": [Message(role="system", content="!"), user()]},
    ):
        session = Session("s", renderer())
        _, _, reply = say(session, [user()], ids_of("one", SpecialToken.USER))
        history = change.get("messages", [user()])
        opening = session.begin_turn(
            [*history, reply, user()], tools=change.get("tools", SPEC), thinking=PRESERVED
        )
        assert opening.parent is None and opening.fork_reason


def test_a_template_that_drops_reasoning_starts_a_new_branch_at_a_user_message():
    session, forgets = Session("s", renderer()), ThinkingKwargs(clear_thinking=True)
    ids = ids_of("deep", SpecialToken.THINK_CLOSE, "so", SpecialToken.USER)
    _, _, reply = say(session, [user()], ids, thinking=forgets)
    opening, *_ = say(session, [user(), reply, user()], ids_of("x"), thinking=forgets)
    assert opening.parent is None and "reasoning" in opening.fork_reason
    assert "deep" not in tokenizer().decode(opening.prompt.tolist())
    assert_each_token_trained_once(session)


@pytest.mark.parametrize("seed", range(40))
def test_random_rewrites_train_each_sampled_token_exactly_once(seed):
    """Branches, siblings, compaction: whatever an agent does to its history."""
    rng, engine = Random(seed), RandomEngine(seed=seed)
    session = Session("s", renderer(), rng.choice([LOOSE, STRICT]))

    async def play():
        messages = [user()]
        for _ in range(8):
            opening = session.begin_turn(messages, tools=SPEC, thinking=PRESERVED)
            request = InferenceRequest(
                token_ids=opening.prompt, sampling_params=SamplingParams(), session_id="s"
            )
            answer = await engine.generate(request)
            reading = DeltaParser(
                tokenizer(), tools=SPEC, prompt=opening.prompt, stops=(), call_id="c{}".format
            )
            reading.feed(final_delta(answer))
            session.record(opening, answer.completion, reading.message)
            messages = rewritten(rng, [*messages, reading.message, user(text(rng, WORDS))])

    asyncio.run(play())
    assert_each_token_trained_once(session)
    sent = {entry.prompt + entry.completion.token_ids for entry in engine.log}
    for found in session.trajectories(**EXPORT_ARGS):
        assert found.token_ids in sent, "a branch is exactly what the engine had before it"
    assert session.tree.num_sampled_tokens == sum(len(e.completion.token_ids) for e in engine.log)


def test_messages_are_restored_from_the_record_with_any_numbers():
    session, number = Session("s", renderer()), 10**30
    call = ToolCall(id="1", name="now", arguments={"at": number, "b": [0.1, None, "\u00e9"]})
    reply = Message(role="assistant", content="", reasoning="Hm.", tool_calls=(call,))
    opening = session.begin_turn([user()], tools=SPEC, thinking=PRESERVED)
    node = session.record(opening, completion(ids_of("x")), reply)
    assert node.messages() == ((user(),), reply)
