"""The three nano environments: soundness, rewards and disjoint splits."""

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


def scripted_reply(content, reasoning=None):
    return scripted_policy(Message(role="assistant", content=content, reasoning=reasoning))


@pytest.mark.parametrize("name", TASKSETS)
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_task_is_solvable_and_wrong_answers_fail(name, split):
    here = taskset(name)
    for index in range(100):
        task = here.task(index, split)
        assert reward(name, task, here.solver(task)) == 1.0
        assert reward(name, task, scripted_reply("")) == 0.0
        assert reward(name, task, scripted_reply("12")) == 0.0


@pytest.mark.parametrize("name", TASKSETS)
def test_an_index_is_always_the_same_task_and_the_splits_share_none(name):
    train, test = (
        [taskset(name).task(index, split) for index in range(300)] for split in ("train", "test")
    )
    assert train == [taskset(name).task(index, "train") for index in range(300)]
    prompts = [{task.messages[0].content for task in tasks} for tasks in (train, test)]
    if name != "nano-tools":  # there the question does not describe the store
        assert not prompts[0] & prompts[1]
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


def test_chain_questions_are_in_the_split_of_the_rule():
    here = taskset("nano-chain")
    for index in range(300):
        assert not is_held_out(here.task(index, "train").messages[0].content)
        assert is_held_out(here.task(index, "test").messages[0].content)


def test_a_finite_taskset_repeats_in_another_order():
    here = taskset("nano-rules")
    size = here.size("train")
    assert size + here.size("test") == 512
    prompts = [here.task(i).messages[0].content for i in range(2 * size)]
    assert len(set(prompts[:size])) == size == len(set(prompts[size:]))
    assert prompts[:size] != prompts[size:]


def test_a_setting_selects_the_kinds_and_each_adds_its_tools():
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


def test_a_tool_returns_an_error_message_instead_of_raising():
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
    rollout = asyncio.run(run_rollout(here.make_env(task), scripted_policy(*replies, last)))
    assert not isinstance(rollout.outcome, Failure)
    assert rollout.outcome.reward == 0.0
    assert sum(message.role == "tool" for message in rollout.messages) == 4
    assert evaluate_sum("9" * 40 + "+1") == "bad sum"


def test_tool_calls_without_an_answer_have_reward_zero():
    """There are five turns; a call that names the answer is not an answer."""
    here = taskset("nano-tools")
    task = here.task(0)
    answer = here.lookup_task(task.id).answer
    lookup = Message(
        role="assistant",
        content=answer,
        tool_calls=(ToolCall(id="c", name="look", arguments={"key": "oak"}),),
    )
    assert reward("nano-tools", task, scripted_policy(*[lookup] * 5)) == 0.0


@pytest.mark.parametrize(
    ("thought", "worth"), [("the {} is {}", 1.0), ("well " * 8, TOO_LONG_REWARD)]
)
def test_a_correct_answer_that_is_too_long_has_less_reward(thought, worth):
    here = taskset("nano-rules", {"kinds": ["form"]})
    task = here.task(3)
    noun, rules = here.noun_and_rules(task.id)
    demonstration = here.demonstrate(task, DemonstrationStyle(style="kept-brief"), Random(0))
    answer = demonstration.messages[-1].content
    thought = thought.format(noun, "red")
    assert reward("nano-rules", task, scripted_reply(answer, thought), here) == worth
    assert reward("nano-rules", task, scripted_reply(answer + " x", thought), here) == 0.0
    assert apply_rules("red", rules) != "red"


@pytest.mark.parametrize("split", ["train", "test"])
def test_about_half_of_the_forbidden_rules_forbid_the_answer(split):
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
def test_a_demonstration_replays_in_its_environment(name, slips, thinks):
    here = taskset(name)
    for style in here.styles:
        for index in range(20):
            task = here.task(index)
            manner = DemonstrationStyle(style=style, makes_mistake=slips, thinks=thinks)
            shown = here.demonstrate(task, manner, Random(index))
            rollout = asyncio.run(run_rollout(here.make_env(task), replay_policy(shown)))
            assert rollout.messages == shown.messages
            assert rollout.outcome.reward > 0 or style.startswith("plain")
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


def test_a_wrong_lookup_is_masked_and_answered():
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
