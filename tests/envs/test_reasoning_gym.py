import pytest

from paddock.envs import EnvError, make, reasoning_gym
from paddock.envs.reasoning_gym import ReasoningGymSettings
from paddock.envs.worker_pool import can_isolate
from tests.envs.soundness import (
    check_sound,
    check_tasks,
    outcomes,
    pass_rate,
    rewards,
    scripted_reply,
)

pytest.importorskip("reasoning_gym", reason="pip install 'paddock[envs]'")
OPEN = {"allow_unisolated": not can_isolate()}


def gym_taskset(dataset, **config):
    return make("gym", {**OPEN, "dataset": dataset, "config": config})


@pytest.mark.parametrize("dataset", ["leg_counting", "knights_knaves", "countdown"])
def test_a_generator_is_sound_behind_the_adapter(dataset):
    check_sound(gym_taskset(dataset), 12, [lambda task: scripted_reply("<answer>nothing</answer>")])


def test_tasks_are_reproducible_distinct_and_split():
    check_tasks(lambda: gym_taskset("chain_sum"), 40)


def test_a_generator_that_uses_the_global_rng_is_reproducible():
    one, two = gym_taskset("list_functions"), gym_taskset("list_functions")
    assert [one.task(n) for n in range(6)] == [two.task(n) for n in range(6)]


def test_splits_are_disjoint_where_problems_repeat():
    taskset = gym_taskset("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    prompts = [
        {taskset.task(n, split).messages[0].content for n in range(100)}
        for split in ("train", "test")
    ]
    assert not prompts[0] & prompts[1]


def test_partial_scores_of_the_scorer_are_kept():
    taskset = gym_taskset("spell_backward")
    task = taskset.task(0)
    answer = taskset.example_of(task).answer
    (half,) = rewards(taskset, [task], lambda task: taskset.scripted_answer(answer + "x"))
    assert 0 <= half < 1


def test_generator_settings_change_the_pass_rate():
    def first_number(task):
        return scripted_reply(
            f"<answer>{task.messages[0].content.split(':')[1].split()[0]}</answer>"
        )

    rates = []
    for terms in (1, 4):
        taskset = gym_taskset("chain_sum", min_terms=terms, max_terms=terms)
        rates.append(pass_rate(taskset, [taskset.task(n) for n in range(25)], first_number))
    assert rates[0] == 1.0
    assert rates[1] < 0.2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": "chain_sums"}, "generator not found; similar names: chain_sum"),
        ({"dataset": "chain_sum", "config": {"terms": 3}}, "unexpected keyword argument 'terms'"),
    ],
)
def test_an_invalid_setting_is_reported_by_make(changes, message):
    with pytest.raises(EnvError, match=message):
        make("gym", {**OPEN, **changes})


def test_an_answer_cannot_reach_the_scorer(tmp_path):
    mark = tmp_path / "mark"
    taskset = gym_taskset("string_insertion")  # whose scorer evaluates answers
    policies = [
        lambda task: taskset.scripted_answer(f"[open('{mark}', 'w').write('x')]"),
        lambda task: taskset.scripted_answer(f"[__import__('os').mkdir('{mark}')]"),
    ]
    for policy in policies if can_isolate() else policies[1:]:
        assert max(rewards(taskset, [taskset.task(0)], policy)) == 0
        assert not mark.exists()


def test_an_answer_with_two_underscores_is_not_evaluated():
    taskset = gym_taskset("string_insertion")
    (found,) = outcomes(
        taskset, [taskset.task(0)], lambda task: taskset.scripted_answer("__import__('os')")
    )
    assert found.reward == 0
    assert found.note == "correct: an answer with two underscores is not evaluated"


@pytest.mark.parametrize("answer", ["[9**9**9]", "exit()", "[0] * 10**12", "x" * 50_000])
def test_an_answer_that_breaks_the_scorer_has_reward_zero(answer):
    taskset = make("gym", {**OPEN, "dataset": "string_insertion", "scorer_timeout_s": 0.5})
    assert rewards(taskset, [taskset.task(0)], lambda task: taskset.scripted_answer(answer)) == [
        0.0
    ]


def test_running_without_isolation_must_be_allowed_explicitly(monkeypatch):
    monkeypatch.setattr(reasoning_gym, "can_isolate", lambda: False)
    with pytest.raises(EnvError, match="set allow_unisolated = true"):
        ReasoningGymSettings(dataset="chain_sum").make_taskset()


def test_prefetched_problems_equal_those_requested_in_any_order():
    def problems(rows):
        taskset = gym_taskset("chain_sum")
        return {row: taskset.task(row).messages for row in rows}

    forward = problems(range(45))
    assert problems([44, 3, 20, 21, 40, 0, 1, 2]).items() <= forward.items()
