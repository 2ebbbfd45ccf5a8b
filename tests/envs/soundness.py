"""What every generator of tasks must hold, whatever it generates."""

import asyncio
from pathlib import Path

from paddock.envs import run_rollout
from paddock.envs.env import scripted_policy
from paddock.records import Message, Verdict

DATA = Path(__file__).parents[2].parent / "shared" / "data"  # public files, where they are there


def says(text):
    return scripted_policy(Message(role="assistant", content=text))


def always(text):
    """A player that says the same for ever."""

    async def speak(messages, tools):
        return Message(role="assistant", content=text)

    return speak


def outcomes(taskset, tasks, policy_of, at_once=8):
    """What a player, made for each task, gets for it."""

    async def all_of_them():
        gate = asyncio.Semaphore(at_once)

        async def attempt(task):
            async with gate:
                episode = await run_rollout(taskset.make_env(task), policy_of(task))
            assert not episode.leak, episode.leak
            return episode.outcome

        return await asyncio.gather(*map(attempt, tasks))

    return asyncio.run(all_of_them())


def rewards(taskset, tasks, policy_of, **options):
    found = outcomes(taskset, tasks, policy_of, **options)
    failed = [outcome for outcome in found if not isinstance(outcome, Verdict)]
    assert not failed, failed[0]
    return [outcome.reward for outcome in found]


def pass_rate(taskset, tasks, policy_of):
    found = rewards(taskset, tasks, policy_of)
    return sum(reward == 1.0 for reward in found) / len(found)


def check_sound(taskset, count, wrong_players=(), split="train"):
    """The solver gets everything; saying nothing, and every wrong player, does not."""
    tasks = [taskset.task(index, split) for index in range(count)]
    assert rewards(taskset, tasks, taskset.solver) == [1.0] * count
    assert max(rewards(taskset, tasks, lambda task: always(""))) < 1
    for wrong in wrong_players:
        assert max(rewards(taskset, tasks, wrong)) < 1


def check_tasks(make, count):
    """The same settings make the same tasks, another index another task, and no task is in both
    splits."""
    one, two = make(), make()
    asked = {
        split: [one.task(index, split) for index in range(count)] for split in ("train", "test")
    }
    assert asked["train"] == [two.task(index, "train") for index in range(count)]
    texts = {split: {task.messages[-1].content for task in tasks} for split, tasks in asked.items()}
    assert len(texts["train"]) == count
    assert not texts["train"] & texts["test"]
    for tasks in asked.values():
        assert len({task.id for task in tasks}) == count
