import asyncio
from random import Random

import pytest

from paddock.envs import RolloutFailed, RolloutTrace, run_rollout
from paddock.evals import EvalSettings, evaluate
from paddock.evals.metrics import EvalError, compute_metrics, pass_at_k
from paddock.records import Budget, Failure, Message, Task, Verdict

LIMITS = Budget(turns=2, seconds=5, output_bytes=100)


def task(index):
    ask = Message(role="user", content=f"{index}?")
    return Task(id=f"count/{index}", env="count", messages=(ask,), budget=LIMITS)


def rollout_result(outcome, index=0, turns=1):
    return RolloutTrace(task=task(index), messages=(), outcome=outcome, turns=turns, seconds=0.1)


def won(reward, **parts):
    return rollout_result(Verdict(reward=reward, parts=parts))


def lost(kind, where="respond"):
    return rollout_result(Failure(kind=kind, where=where, what="the disk\nis full"))


class CountingTaskset:
    """Tasks that ask for a number."""

    name = "count"

    def __init__(self, size=None):
        self._size = size
        self.running = self.peak = 0

    def size(self, split):
        return self._size

    def task(self, index, split="train"):
        return task(index if split == "train" else index + 1000)

    def make_env(self, task):
        return CountingEnv(self, task)


class CountingEnv:
    tools = ()

    def __init__(self, taskset, task):
        self.taskset, self.task, self.reply_text = taskset, task, ""

    async def reset(self):
        self.taskset.running += 1
        self.taskset.peak = max(self.taskset.peak, self.taskset.running)
        await asyncio.sleep(0)

    async def step(self, reply):
        self.reply_text = reply.content
        return ()

    async def score(self):
        right = self.reply_text == self.task.messages[0].content.rstrip("?")
        return Verdict(reward=float(right), parts={"right": float(right)})

    async def close(self):
        self.taskset.running -= 1


def make_rollout(taskset, reply):
    async def rollout(task, number):
        async def policy(messages, tools):
            return reply(int(messages[0].content.rstrip("?")), number)

        return await run_rollout(taskset.make_env(task), policy)

    return rollout


def run_evaluation(taskset, right, **options):
    def reply(number, rollout):
        reply_text = str(number) if right(number, rollout) else "no"
        return Message(role="assistant", content=reply_text)

    settings = EvalSettings(**{"num_tasks": 20} | options)
    return asyncio.run(evaluate(taskset, make_rollout(taskset, reply), settings))


def test_the_reward_is_the_fraction_of_held_out_tasks_solved():
    found = run_evaluation(CountingTaskset(), lambda number, _: number % 4 == 0)
    assert found.metrics.mean_reward == 0.25
    assert found.metrics.num_tasks == 20
    assert found.metrics.reward_parts == {"right": 0.25}
    assert {e.task.id for group in found.rollouts for e in group} == {
        f"count/{i}" for i in range(1000, 1020)
    }


def test_a_finite_taskset_is_evaluated_once_per_task():
    assert run_evaluation(CountingTaskset(size=7), lambda *_: True).metrics.num_tasks == 7


def test_concurrent_rollouts_are_limited():
    taskset = CountingTaskset()
    run_evaluation(taskset, lambda *_: True, max_concurrent=3)
    assert taskset.peak == 3


def test_several_rollouts_give_pass_at_k():
    found = run_evaluation(
        CountingTaskset(), lambda number, rollout: rollout == number % 4, rollouts_per_task=4
    )
    assert found.metrics.mean_reward == 0.25
    assert found.metrics.pass_at_k == {1: 0.25, 2: 0.5, 4: 1.0}
    assert found.metrics.stderr == 0.0  # every task is solved equally often


def test_pass_at_k_is_the_probability_of_drawing_without_replacement():
    rng = Random(0)
    rollouts = [True] * 3 + [False] * 5
    drawn = sum(any(rng.sample(rollouts, 2)) for _ in range(20_000)) / 20_000
    assert pass_at_k(2, 8, 3) == pytest.approx(drawn, abs=0.02)


def test_policy_failures_count_and_environment_failures_do_not():
    groups = [[won(1.0)], [lost("policy")], [lost("world")], [won(1.0), lost("grader", "grade")]]
    found = compute_metrics(groups)
    assert found.mean_reward == pytest.approx(2 / 3)
    assert (found.num_tasks, found.num_rollouts) == (3, 3)
    assert found.failures == {"environment at respond": 1, "grader at grade": 1}
    assert str(found) == "0.667 ± 0.333 (3 tasks, 2 not scored)"


def test_too_many_environment_failures_raise():
    with pytest.raises(
        EvalError, match=r"only 1 rollouts .*: 2 x environment at respond \(the disk is full\)"
    ):
        compute_metrics([[won(1.0)], [lost("world")], [lost("world")]])
    with pytest.raises(EvalError, match="there are none"):
        compute_metrics([])


def test_a_bug_in_a_policy_ends_the_evaluation():
    def broken(number, rollout):
        raise KeyError("bug")

    taskset = CountingTaskset()
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(evaluate(taskset, make_rollout(taskset, broken), EvalSettings(num_tasks=3)))
    assert caught.group_contains(KeyError)


def test_a_policy_that_stops_has_reward_zero():
    def stops(number, rollout):
        raise RolloutFailed("policy", "context", "full")

    taskset = CountingTaskset()
    found = asyncio.run(evaluate(taskset, make_rollout(taskset, stops), EvalSettings(num_tasks=3)))
    assert found.metrics.mean_reward == 0.0


@pytest.mark.parametrize(("size", "first"), [(0, 0), (3, 3)])
def test_an_empty_taskset_is_reported(size, first):
    async def never(task, rollout):
        raise AssertionError

    settings = EvalSettings(num_tasks=2, first_task=first)
    with pytest.raises(EvalError, match=f"env 'count' has {size} test tasks, none from"):
        asyncio.run(evaluate(CountingTaskset(size), never, settings))
