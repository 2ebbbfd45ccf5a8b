"""What an engine saw and sampled is what a trainer gets: ids, masks, log-probs, versions."""

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
    JUDGED,
    SILENT,
    assert_each_token_trained_once,
    follow_up,
    ids_of,
    rewritten,
    say,
    user,
)
from tests.rollout.engines import SPEC, Chancy, completion, renderer, tokenizer
from tests.text.conversations import MARKERS, WORDS, text

# --- A1, A2: random sessions ----------------------------------------------------------------------


async def wander(session, engine, chance, *, modes):
    """An agent that only ever appends, in a world of chance."""
    messages = [Message(role="system", content="Be brief.")] if chance.random() < 0.5 else []
    messages.append(user(text(chance, (*WORDS, *MARKERS))))
    tools = SPEC if chance.random() < 0.9 else ()
    for turn in range(chance.randint(1, 6)):
        thinking = chance.choice(modes)
        opening = session.begin_turn(messages, tools=tools, thinking=thinking)
        ask = InferenceRequest(
            token_ids=opening.prompt, sampling_params=SamplingParams(), session_id=session.id
        )
        answer = await engine.generate(ask)
        reading = DeltaParser(
            tokenizer(),
            tools=tools,
            prompt=opening.prompt,
            stops=(),
            call_id=f"c{turn}_{{}}".format,
        )
        reading.feed(final_delta(answer))
        session.record(opening, answer.completion, reading.message)
        messages += [reading.message, *follow_up(chance, reading.message)]


def assert_exact(session, log):
    """The one branch of a session is what the engine has in its log."""
    (found,) = session.trajectories(**JUDGED)
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
def test_five_hundred_sessions_are_recorded_bit_for_bit(version):
    async def play_all():
        for number in range(130):
            chance, engine = Random(f"{version} {number}"), Chancy(seed=number)
            session = Session(str(number), renderer(version), chance.choice([LOOSE, STRICT]))
            modes = [PRESERVED, SILENT]
            if version == "5.2":  # its effort line, before everything, goes with thinking
                modes = [chance.choice(modes)]
            await wander(session, engine, chance, modes=modes)
            assert_exact(session, engine.log)

    asyncio.run(play_all())


def test_tokens_that_no_tokenizer_would_choose_are_kept():
    session, odd = Session("s", renderer()), []
    for letter in "the pony":
        odd += tokenizer().encode(letter, specials=False)
    assert odd != tokenizer().encode("the pony", specials=False)
    _, done, reply = say(session, [user()], [*odd, *ids_of("", SpecialToken.USER)], thinking=SILENT)
    assert reply.content == "the pony"
    opening, _, _ = say(session, [user(), reply, user()], ids_of("ok", SpecialToken.USER))
    assert opening.prompt.tolist()[len(session.tree.nodes[0].added) :][: len(odd)] == odd
    (found,) = session.trajectories(**JUDGED)
    assert found.turns[0].completion == done


# --- A3: boundaries -------------------------------------------------------------------------------

ROLES = {"user": SpecialToken.USER, "tool": SpecialToken.OBSERVATION, "system": SpecialToken.SYSTEM}


@pytest.mark.parametrize(
    "stop", [SpecialToken.USER, SpecialToken.OBSERVATION, SpecialToken.ENDOFTEXT, None]
)
@pytest.mark.parametrize("role", ["user", "tool", "system"])
@pytest.mark.parametrize("thinking", [PRESERVED, SILENT])
def test_a_role_opens_exactly_once_and_only_what_was_sampled_is_trained(stop, role, thinking):
    session = Session("s", renderer())
    said = (
        ids_of("hm", SpecialToken.THINK_CLOSE, *CALL_OF_NOW)
        if thinking is PRESERVED
        else ids_of("hm", *CALL_OF_NOW)
    )
    ids = said + ([tokenizer().special_token_ids[stop]] if stop else [])
    finish = "stop" if stop else "length"
    _, _, reply = say(session, [user()], ids, thinking=thinking, finish=finish)
    answer = reply.tool_calls[0].id if role == "tool" else None
    after = Message(role=role, content="12 C.", tool_call_id=answer)
    opening, _, _ = say(session, [user(), reply, after], ids_of("x", SpecialToken.USER))
    opener = tokenizer().special_token_ids[ROLES[role]]
    boundary = [*ids[len(said) :], *opening.new_token_ids[:1]]
    assert boundary.count(opener) == 1, "between the reply and what follows"
    assert (opening.new_token_ids[0] == opener) == (stop != ROLES[role])
    (found,) = session.trajectories(**JUDGED)
    first = len(session.tree.nodes[0].added)
    assert found.loss_mask[first : first + len(ids)] == (True,) * len(ids)
    assert not any(found.loss_mask[first + len(ids) :][: len(opening.new_token_ids)])


def test_a_thought_that_was_cut_short_is_closed_and_the_close_is_not_trained():
    session = Session("s", renderer())
    _, _, reply = say(session, [user()], ids_of("hm hm"), finish="length")
    opening, _, _ = say(session, [user(), reply, user()], ids_of("x"))
    assert opening.new_token_ids[0] == tokenizer().special_token_ids[SpecialToken.THINK_CLOSE]
    (found,) = session.trajectories(**JUDGED)
    assert sum(found.loss_mask) == len(ids_of("hm hm")) + len(ids_of("x"))


# --- A4: harnesses that rewrite -------------------------------------------------------------------


def thoughtful(session):
    """A first turn that thought, spoke and called twice."""
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
    # how the reply comes back -> whether strict, loose take it for the same
    "as it was": (lambda r: r, True, True),
    "keys in another order": (
        lambda r: changed_call(r, arguments={"days": 2, "city": "Oslo"}), False, True,
    ),
    "a whole number as a float": (
        lambda r: changed_call(r, arguments={"city": "Oslo", "days": 2.0}), False, True,
    ),
    "thoughts left out": (lambda r: replace(r, reasoning=None), False, True),
    "thoughts inside content": (
        lambda r: replace(r, reasoning=None, content=f"<think>{r.reasoning}</think>{r.content}"),
        True, True,
    ),
    "blanks around content": (lambda r: replace(r, content=f"  {r.content}\n"), False, True),
    "ids of calls renamed": (lambda r: changed_call(r, id="other"), False, True),
    "other thoughts": (lambda r: replace(r, reasoning="Thought."), False, False),
    "other content": (lambda r: replace(r, content="Looked."), False, False),
    "other arguments": (
        lambda r: changed_call(r, arguments={"city": "Oslo", "days": 3}), False, False,
    ),
    "a call left out": (lambda r: replace(r, tool_calls=r.tool_calls[:1]), False, False),
}  # fmt: skip


@pytest.mark.parametrize("matcher", [STRICT, LOOSE], ids=lambda m: m.name)
@pytest.mark.parametrize("name", REWRITES)
def test_what_counts_as_the_same_reply(name, matcher):
    change, strict, loose = REWRITES[name]
    session = Session("s", renderer(), matcher)
    reply = thoughtful(session)
    echo = change(reply)
    opening, *_ = say(session, [user(), echo, *results(echo)], ids_of("ok", SpecialToken.USER))
    same = strict if matcher is STRICT else loose
    assert (opening.fork_reason == "") == same
    assert len(session.trajectories(**JUDGED)) == (1 if same else 2)
    assert_each_token_trained_once(session)


def test_a_reply_that_spells_the_markers_of_thoughts_is_found_again():
    session = Session("s", renderer())
    spelled = ids_of("<think>x</think>y", SpecialToken.USER)
    _, _, reply = say(session, [user()], spelled, thinking=SILENT)
    assert (reply.content, reply.reasoning) == ("<think>x</think>y", None)
    assert session.begin_turn([user(), reply, user()], tools=SPEC, thinking=SILENT).parent


def test_no_arguments_and_an_empty_object_are_the_same():
    session = Session("s", renderer())
    ids = ids_of("x", SpecialToken.THINK_CLOSE, *CALL_OF_NOW, SpecialToken.OBSERVATION)
    _, _, reply = say(session, [user()], ids)
    echo = replace(reply, tool_calls=(ToolCall(id="z", name="now", arguments={}),))
    assert session.begin_turn([user(), echo, *results(echo)], tools=SPEC, thinking=PRESERVED).parent


def test_a_matcher_of_ones_own():
    blind = PrefixMatcher("blind", lambda message: [message.role], "ignored")
    session = Session("s", renderer(), blind)
    reply = thoughtful(session)
    echo = Message(role="assistant", content="quite different")
    opening = session.begin_turn([user(), echo, user()], tools=SPEC, thinking=PRESERVED)
    assert opening.parent is session.tree.nodes[0] and reply != echo


def test_replies_that_some_dialects_tell_in_parts_are_one():
    session = Session("s", renderer())
    reply = thoughtful(session)
    first, second = reply.tool_calls
    parts = [
        Message(role="assistant", content="Look.", reasoning="Think.", tool_calls=(first,)),
        Message(role="assistant", content="", tool_calls=(second,)),
    ]
    opening = session.begin_turn([user(), *parts, *results(reply)], tools=SPEC, thinking=PRESERVED)
    assert opening.parent is session.tree.nodes[0]


def test_a_fork_keeps_all_that_still_holds():
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
    straight, fork = session.trajectories(**JUDGED)
    assert [t.trained for t in straight.turns] == [True, True, True]
    assert [t.trained for t in fork.turns] == [False, True]
    assert_each_token_trained_once(session)


def test_a_fork_after_a_thought_that_was_cut_short_closes_it_first():
    session = Session("s", renderer())
    _, _, reply = say(session, [user()], ids_of("hm hm"), finish="length")
    foreign = Message(role="assistant", content="by others")
    opening, *_ = say(session, [user(), reply, user(), foreign, user()], ids_of("x"))
    assert opening.parent is session.tree.nodes[0]
    assert tokenizer().decode(opening.new_token_ids.tolist()).startswith("</think><|user|>Go on.")
    assert "by others" in tokenizer().decode(opening.new_token_ids.tolist())


def test_asking_again_samples_a_sibling_from_the_same_prompt():
    session = Session("s", renderer())
    one, *_ = say(session, [user()], ids_of("one", SpecialToken.USER))
    other, *_ = say(session, [user()], ids_of("two", SpecialToken.USER))
    assert one.prompt == other.prompt
    assert [len(t.turns) for t in session.trajectories(**JUDGED)] == [1, 1]
    assert_each_token_trained_once(session)


def test_other_tools_or_another_system_message_are_another_past():
    for change in (
        {"tools": SPEC[:1]},
        {"messages": [Message(role="system", content="!"), user()]},
    ):
        session = Session("s", renderer())
        _, _, reply = say(session, [user()], ids_of("one", SpecialToken.USER))
        said = change.get("messages", [user()])
        opening = session.begin_turn(
            [*said, reply, user()], tools=change.get("tools", SPEC), thinking=PRESERVED
        )
        assert opening.parent is None and opening.fork_reason


def test_where_the_template_forgets_thoughts_a_user_message_begins_anew():
    session, forgets = Session("s", renderer()), ThinkingKwargs(clear_thinking=True)
    ids = ids_of("deep", SpecialToken.THINK_CLOSE, "so", SpecialToken.USER)
    _, _, reply = say(session, [user()], ids, thinking=forgets)
    opening, *_ = say(session, [user(), reply, user()], ids_of("x"), thinking=forgets)
    assert opening.parent is None and "reasoning" in opening.fork_reason
    assert "deep" not in tokenizer().decode(opening.prompt.tolist())
    assert_each_token_trained_once(session)


@pytest.mark.parametrize("seed", range(40))
def test_random_rewrites_train_each_sampled_token_exactly_once(seed):
    """Branches, siblings, compaction: whatever a harness does to its past."""
    chance, engine = Random(seed), Chancy(seed=seed)
    session = Session("s", renderer(), chance.choice([LOOSE, STRICT]))

    async def play():
        messages = [user()]
        for _ in range(8):
            opening = session.begin_turn(messages, tools=SPEC, thinking=PRESERVED)
            ask = InferenceRequest(
                token_ids=opening.prompt, sampling_params=SamplingParams(), session_id="s"
            )
            answer = await engine.generate(ask)
            reading = DeltaParser(
                tokenizer(), tools=SPEC, prompt=opening.prompt, stops=(), call_id="c{}".format
            )
            reading.feed(final_delta(answer))
            session.record(opening, answer.completion, reading.message)
            messages = rewritten(chance, [*messages, reading.message, user(text(chance, WORDS))])

    asyncio.run(play())
    assert_each_token_trained_once(session)
    sent = {entry.prompt + entry.completion.token_ids for entry in engine.log}
    for found in session.trajectories(**JUDGED):
        assert found.token_ids in sent, "a branch is exactly what the engine had before it"
    assert session.tree.num_sampled_tokens == sum(len(e.completion.token_ids) for e in engine.log)


def test_what_was_said_comes_back_from_a_record_whatever_its_numbers():
    session, number = Session("s", renderer()), 10**30
    call = ToolCall(id="1", name="now", arguments={"at": number, "b": [0.1, None, "\u00e9"]})
    said = Message(role="assistant", content="", reasoning="Hm.", tool_calls=(call,))
    opening = session.begin_turn([user()], tools=SPEC, thinking=PRESERVED)
    node = session.record(opening, completion(ids_of("x")), said)
    assert node.messages() == ((user(),), said)
