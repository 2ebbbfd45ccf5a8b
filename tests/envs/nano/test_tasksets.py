"""The three worlds: sound, fair, and their two splits apart."""

import asyncio
import re
from dataclasses import replace
from random import Random

import pytest

from paddock.envs import EnvError, make, run_rollout
from paddock.envs.env import scripted_policy
from paddock.envs.nano import DemonstrationStyle
from paddock.envs.nano.chain import find_wrong_steps
from paddock.envs.nano.demonstrations import replay_policy
from paddock.envs.nano.language import COLOUR_OF, KEYS, is_held_out
from paddock.envs.nano.rules import TOO_LONG_REWARD, apply_rules
from paddock.envs.nano.tools import KEYS_IN_STORE, evaluate_sum, tool_result
from paddock.records import Failure, Message, ToolCall

KINDS = ("follow", "plus", "file", "search")
TASKSETS = {
    "nano-chain": {},
    "nano-rules": {},
    "nano-tools": {"kinds": list(KINDS)},
}
PAIR = re.compile(r"is (see \w+|\d) , end (see \w+|\d)")


def taskset(name, changes=None):
    return make(name, TASKSETS[name] | (changes or {}))


def reward(name, task, policy, here=None):
    return asyncio.run(run_rollout((here or taskset(name)).make_env(task), policy)).outcome.reward


def says(content, reasoning=None):
    return scripted_policy(Message(role="assistant", content=content, reasoning=reasoning))


@pytest.mark.parametrize("name", TASKSETS)
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_task_can_be_solved_and_nothing_else_passes(name, split):
    here = taskset(name)
    for index in range(100):
        task = here.task(index, split)
        assert reward(name, task, here.solver(task)) == 1.0
        assert reward(name, task, says("")) == 0.0
        assert reward(name, task, says("12")) == 0.0


@pytest.mark.parametrize("name", TASKSETS)
def test_an_index_is_always_the_same_task_and_the_splits_share_none(name):
    train, test = (
        [taskset(name).task(index, split) for index in range(300)] for split in ("train", "test")
    )
    assert train == [taskset(name).task(index, "train") for index in range(300)]
    asked = [{task.messages[0].content for task in tasks} for tasks in (train, test)]
    if name != "nano-tools":  # there the question says nothing about the store
        assert not asked[0] & asked[1]
    assert len({task.id for task in (*train, *test)}) == 600


def test_no_pair_of_a_training_store_is_held_out_and_every_test_path_ends_in_one():
    here = taskset("nano-tools")
    for index in range(500):
        for split in ("train", "test"):
            task = here.task(index, split)
            puzzle = here.lookup_task(task.id)
            held_out = {key: is_held_out(f"{key} {value}") for key, value in puzzle.store.items()}
            if split == "test":
                assert held_out[puzzle.path[-1]]
            else:
                assert not any(held_out.values())
            for key in puzzle.store:
                value, stale = PAIR.fullmatch(tool_result(task.id, puzzle, key)).groups()
                assert value == puzzle.store[key]
                assert not is_held_out(f"{key} {stale}")
            assert len(puzzle.store) == KEYS_IN_STORE


def test_chain_questions_are_on_the_right_side_of_the_rule():
    here = taskset("nano-chain")
    for index in range(300):
        assert not is_held_out(here.task(index, "train").messages[0].content)
        assert is_held_out(here.task(index, "test").messages[0].content)


def test_a_finite_world_begins_again_in_another_order():
    here = taskset("nano-rules")
    size = here.size("train")
    assert size + here.size("test") == 512
    asked = [here.task(i).messages[0].content for i in range(2 * size)]
    assert len(set(asked[:size])) == size == len(set(asked[size:]))
    assert asked[:size] != asked[size:]


def test_a_setting_chooses_the_kinds_and_each_lends_its_tools():
    lent = {}
    for kind in KINDS:
        here = make("nano-tools", {"kinds": [kind]})
        tasks = [here.task(index) for index in range(50)]
        assert {here.lookup_task(task.id).kind for task in tasks} == {kind}
        lent[kind] = [tool.name for tool in here.make_env(tasks[0]).tools]
    assert lent["follow"] == lent["plus"] == ["calc", "look"]
    assert (lent["file"], lent["search"]) == (["calc", "read"], ["look", "search"])
    with pytest.raises(EnvError, match="kinds"):
        make("nano-tools", {"kinds": ["guess"]})


def test_tasks_take_two_to_four_turns():
    here = taskset("nano-tools")
    turns = set()
    for index in range(200):
        task = here.task(index)
        turns.add(asyncio.run(run_rollout(here.make_env(task), here.solver(task))).turns)
    assert turns == {2, 3, 4}


def test_what_a_tool_says_to_nonsense_is_said_not_raised():
    here = taskset("nano-tools")
    task = here.task(0)
    calls = [("look", {"key": "nowhere"}), ("look", {}), ("fly", {}), ("calc", {"sum": "1+"})]
    replies = [
        Message(
            role="assistant",
            content="",
            tool_calls=(ToolCall(id=f"c{i}", name=name, arguments=arguments),),
        )
        for i, (name, arguments) in enumerate(calls)
    ]
    last = Message(role="assistant", content="x")
    episode = asyncio.run(run_rollout(here.make_env(task), scripted_policy(*replies, last)))
    assert not isinstance(episode.outcome, Failure)
    assert episode.outcome.reward == 0.0
    assert sum(message.role == "tool" for message in episode.messages) == 4
    assert evaluate_sum("9" * 40 + "+1") == "bad sum"


def test_looking_without_answering_is_worth_nothing():
    """Five turns are all there are; a call that names the answer is no answer."""
    here = taskset("nano-tools")
    task = here.task(0)
    answer = here.lookup_task(task.id).answer
    asks = Message(
        role="assistant",
        content=answer,
        tool_calls=(ToolCall(id="c", name="look", arguments={"key": "oak"}),),
    )
    assert reward("nano-tools", task, scripted_policy(*[asks] * 5)) == 0.0


@pytest.mark.parametrize(
    ("thought", "worth"), [("the {} is {}", 1.0), ("well " * 8, TOO_LONG_REWARD)]
)
def test_a_right_answer_in_too_many_words_is_worth_less(thought, worth):
    here = taskset("nano-rules", {"kinds": ["form"]})
    task = here.task(3)
    noun, rules = here.noun_and_rules(task.id)
    demonstration = here.demonstrate(task, DemonstrationStyle(style="kept-brief"), Random(0))
    answer = demonstration.messages[-1].content
    thought = thought.format(noun, "red")
    assert reward("nano-rules", task, says(answer, thought), here) == worth
    assert reward("nano-rules", task, says(answer + " x", thought), here) == 0.0
    assert apply_rules("red", rules) != "red"


@pytest.mark.parametrize("split", ["train", "test"])
def test_half_of_what_is_forbidden_may_be_said(split):
    here = taskset("nano-rules", {"kinds": ["forbidden"]})
    refused = 0
    for index in range(here.size(split)):
        task = here.task(index, split)
        noun, (rule,) = here.noun_and_rules(task.id)
        answer = (
            here.demonstrate(task, DemonstrationStyle(style="kept-brief"), Random(0))
            .messages[-1]
            .content
        )
        assert answer == ("no" if rule.endswith(f" {COLOUR_OF[noun]}") else COLOUR_OF[noun])
        refused += answer == "no"
    assert 0.3 < refused / here.size(split) < 0.7


# --- demonstrations -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKSETS)
@pytest.mark.parametrize("slips", [False, True])
@pytest.mark.parametrize("thinks", [False, True])
def test_a_demonstration_is_what_its_world_would_have_said(name, slips, thinks):
    here = taskset(name)
    for style in here.styles:
        for index in range(20):
            task = here.task(index)
            manner = DemonstrationStyle(style=style, makes_mistake=slips, thinks=thinks)
            shown = here.demonstrate(task, manner, Random(index))
            episode = asyncio.run(run_rollout(here.make_env(task), replay_policy(shown)))
            assert episode.messages == shown.messages
            assert episode.outcome.reward > 0 or style.startswith("plain")
            replies = [m for m in shown.messages if m.role == "assistant"]
            assert all((m.reasoning is not None) == thinks for m in replies)


def test_only_wrong_steps_are_marked_and_all_of_them():
    here = taskset("nano-chain")
    for index in range(100):
        shown = here.demonstrate(
            here.task(index), DemonstrationStyle(style="worked", makes_mistake=True), Random(index)
        )
        (mark,) = shown.untrained
        thought = shown.messages[mark.message].reasoning
        assert thought[mark.end :].startswith(" , no , ")
        assert find_wrong_steps(replace(shown, untrained=())) == (mark,)
        right = here.demonstrate(
            here.task(index), DemonstrationStyle(style="worked"), Random(index)
        )
        assert right.untrained == find_wrong_steps(right) == ()


def test_a_wrong_look_up_is_a_marked_reply_that_is_answered():
    here = taskset("nano-tools")
    for index in range(50):
        task = here.task(index)
        shown = here.demonstrate(
            task, DemonstrationStyle(style="full", makes_mistake=True), Random(index)
        )
        (mark,) = shown.untrained
        (call,) = shown.messages[mark.message].tool_calls
        (key,) = call.arguments.values()
        assert key in KEYS and key not in here.lookup_task(task.id).store
        assert shown.messages[mark.message + 1].content == f"no entry {key}"
