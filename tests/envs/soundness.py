"""Checks for every task generator: solvable, not solved by wrong answers, reproducible."""

import asyncio
from pathlib import Path

from paddock.envs import run_rollout
from paddock.envs.env import scripted_policy
from paddock.records import Message, Verdict

DATA = Path(__file__).parents[2].parent / "shared" / "data"  # public files, if present


def scripted_reply(text):
    return scripted_policy(Message(role="assistant", content=text))


def constant_policy(text):
    """A policy that always gives the same reply."""

    async def policy(messages, tools):
        return Message(role="assistant", content=text)

    return policy


def outcomes(taskset, tasks, policy_of, max_concurrent=8):
    """The outcome of each task with the policy that `policy_of` makes for it."""

    async def run_all():
        gate = asyncio.Semaphore(max_concurrent)

        async def rollout(task):
            async with gate:
                result = await run_rollout(taskset.make_env(task), policy_of(task))
            assert not result.leak, result.leak
            return result.outcome

        return await asyncio.gather(*map(rollout, tasks))

    return asyncio.run(run_all())


def rewards(taskset, tasks, policy_of, **options):
    found = outcomes(taskset, tasks, policy_of, **options)
    failed = [outcome for outcome in found if not isinstance(outcome, Verdict)]
    assert not failed, failed[0]
    return [outcome.reward for outcome in found]


def pass_rate(taskset, tasks, policy_of):
    found = rewards(taskset, tasks, policy_of)
    return sum(reward == 1.0 for reward in found) / len(found)


def check_sound(taskset, count, wrong_policies=(), split="train"):
    """The solver has reward 1; an empty reply and every wrong policy has less."""
    tasks = [taskset.task(index, split) for index in range(count)]
    assert rewards(taskset, tasks, taskset.solver) == [1.0] * count
    assert max(rewards(taskset, tasks, lambda task: constant_policy(""))) < 1
    for wrong in wrong_policies:
        assert max(rewards(taskset, tasks, wrong)) < 1


def check_tasks(make, count):
    """The same settings make the same tasks, tasks are distinct, and the splits are disjoint."""
    one, two = make(), make()
    by_split = {
        split: [one.task(index, split) for index in range(count)] for split in ("train", "test")
    }
    assert by_split["train"] == [two.task(index, "train") for index in range(count)]
    texts = {
        split: {task.messages[-1].content for task in tasks} for split, tasks in by_split.items()
    }
    assert len(texts["train"]) == count
    assert not texts["train"] & texts["test"]
    for tasks in by_split.values():
        assert len({task.id for task in tasks}) == count
