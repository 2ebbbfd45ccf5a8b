import ast
import asyncio
import json
import operator
import re
from fractions import Fraction

import pytest

from paddock.envs import EnvError, make
from paddock.envs.datasets import QAExample
from paddock.envs.jsonl import RowError
from paddock.envs.math.generate import FAMILIES
from paddock.envs.math.verifier import make_math_verifier
from paddock.records import Failure, Verdict
from tests.envs.soundness import (
    DATA,
    check_sound,
    check_tasks,
    outcomes,
    pass_rate,
    rewards,
    scripted_reply,
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("level", [1, 3, 5])
def test_problems_are_sound(family, level):
    taskset = make("math", {"families": [family], "level": level})
    nearest = [
        lambda task, n=n: taskset.scripted_answer(taskset.example_of(task).near[n]) for n in (0, 1)
    ]
    check_sound(taskset, 67, [*nearest, lambda task: scripted_reply("\\boxed{}")])


def test_every_near_answer_is_wrong():
    taskset = make("math", {"level": 3})
    for index in range(200):
        task = taskset.task(index)
        problem = taskset.example_of(task)
        assert len(problem.near) >= 2
        assert (
            max(rewards(taskset, [task], lambda t, p=problem: taskset.scripted_answer(p.near[-1])))
            == 0
        )


def test_tasks_are_reproducible_distinct_and_split():
    check_tasks(lambda: make("math", {"level": 3, "seed": 7}), 200)
    one, two = (make("math", {"seed": seed}).task(0).messages for seed in (0, 1))
    assert one != two


class Calculator(ast.NodeVisitor):
    """Evaluates an expression without numbers above `max_number`."""

    def __init__(self, max_number):
        self.max_number = max_number

    def visit_BinOp(self, node):
        left, right = self.visit(node.left), self.visit(node.right)
        table = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
        if left is None or right is None or max(abs(left), abs(right)) > self.max_number:
            return None
        return table[type(node.op)](left, right)

    def visit_Constant(self, node):
        return node.value


def calculating(max_number):
    def policy(task):
        text = re.search(r"What is (.*)\?", task.messages[0].content)[1]
        answer = Calculator(max_number).visit(ast.parse(text, mode="eval").body)
        return scripted_reply(f"\\boxed{{{answer}}}")

    return policy


def test_level_changes_the_pass_rate_of_a_solver_limited_to_small_numbers():
    rates = []
    for level in (1, 3, 5):
        taskset = make("math", {"families": ["arithmetic"], "level": level})
        tasks = [taskset.task(index) for index in range(200)]
        assert (
            pass_rate(taskset, tasks, calculating(10**40)) == 1
        )  # the questions are parsed correctly
        rates.append(pass_rate(taskset, tasks, calculating(3000)))
    assert rates[0] > 0.9
    assert rates[0] > rates[1] + 0.2 > rates[2] + 0.4


def test_equations_are_solved_by_their_answers():
    taskset = make("math", {"families": ["linear", "quadratic"], "level": 4})
    for index in range(100):
        problem = taskset.example_of(taskset.task(index))
        text = re.search(r"(?:Solve for x: |solution of )(.*?)\??$", problem.question)[1]
        text = re.sub(r"(\d)(x|\()", r"\1*\2", text).replace("^", "**")
        left, right = (eval(side, {"x": Fraction(problem.answer)}) for side in text.split("="))
        assert left == right, problem


def test_reward_parts_are_recorded():
    changes = {
        "format_weight": 0.1,
        "rewards": [
            {"kind": "length", "full_reward_chars": 20, "zero_reward_chars": 40, "weight": 0.5}
        ],
    }
    taskset = make("math", changes)
    task = taskset.task(0)
    (short,) = outcomes(taskset, [task], taskset.solver)
    assert short.parts == {"correct": 1.0, "formed": 1.0, "length": 1.0}
    assert short.reward == pytest.approx(1.6)
    (wordy,) = outcomes(taskset, [task], lambda task: scripted_reply("So, well, " * 10))
    assert wordy.parts == {"correct": 0.0, "formed": 0.0, "length": 0.0}
    assert wordy.reward == 0
    assert wordy.note == "formed: no answer was found"


def test_a_task_of_another_environment_is_rejected():
    task = make("math", {"level": 1}).task(0)
    with pytest.raises(EnvError, match="was not made by environment 'math' with these settings"):
        make("math", {"level": 2}).make_env(task)


GSM8K = {"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}
MATH = {"problem": "Half of one?", "solution": "It is $\\boxed{\\frac{1}{2}}$.", "level": "Level 1"}
ROW = {"problem": "Its square?", "answer": "(x+1)^2", "unique_id": "x"}


def write(path, *rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_both_layouts_are_read(tmp_path):
    test = write(tmp_path / "test.jsonl", GSM8K, MATH, ROW, {"problem": "Empty?", "answer": ""})
    train = write(tmp_path / "train.jsonl", GSM8K, {"question": "Other?", "answer": "#### 5"})
    taskset = make("math-file", {"test_file": test, "train_file": train, "verifier": "plain"})
    assert taskset.size("test") == 3
    assert taskset.size("train") == 1, "questions of the test split are not in the train split"
    answers = [taskset.example_of(taskset.task(index, "test")).answer for index in range(3)]
    assert answers == ["4", "\\frac{1}{2}", "(x+1)^2"]
    check_sound(taskset, 3, split="test")


def test_a_file_repeats_in_another_order(tmp_path):
    rows = [{"question": f"{n}?", "answer": f"#### {n}"} for n in range(20)]
    taskset = make("math-file", {"train_file": write(tmp_path / "a", *rows), "verifier": "plain"})
    passes = [[taskset.task(20 * n + index).id for index in range(20)] for n in range(3)]
    assert len({tuple(one) for one in passes}) == 3
    assert {frozenset(one) for one in passes} == {frozenset(passes[0])}
    with pytest.raises(EnvError, match="no test examples"):
        taskset.task(0, "test")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?"}, "a:1: 'answer' is missing"),
        ({"answer": "4"}, "a:1: 'question' or 'problem' or 'prompt' is missing"),
        ({"problem": "?", "solution": "4"}, "a:1: no answer: the solution has no "),
        ({"problem": "?", "answer": " "}, "has no examples"),
    ],
)
def test_an_invalid_row_is_named(tmp_path, row, message):
    with pytest.raises(RowError, match=message):
        make("math-file", {"train_file": write(tmp_path / "a", row)})


@pytest.fixture(scope="module")
def algebra():
    pytest.importorskip("math_verify", reason="pip install 'paddock[envs]'")
    check = make_math_verifier(seconds=5)

    def equal(answer, right):
        return asyncio.run(check(answer, QAExample(question="?", answer=right))).value

    return equal


@pytest.mark.parametrize(
    ("answer", "right", "value"),
    [
        ("0.5", "\\frac{1}{2}", 1),
        ("x^2 + 2x + 1", "(x+1)^2", 1),
        ("x^2 + 2x - 1", "(x+1)^2", 0),
        ("\\{2, 1\\}", "\\{1, 2\\}", 1),
        ("2\\sqrt{2}", "\\sqrt{8}", 1),
        ("180", "180\\text{ miles}", 1),
        ("(1, 2)", "(2, 1)", 0),
        ("I do not know", "7", 0),
        ("7" * 5000, "7", 0),
    ],
)
def test_answers_are_compared_as_mathematics(algebra, answer, right, value):
    assert algebra(answer, right) == value


EXPLODING = (
    "9^{9^{9}}",
    "10^{10^{10}}",
    "(1+x)^{100000}",
    "100000!",
    "((9!)!)!",
    "\\sum_{n=1}^{10^{9}} n^{n}",
    "\\int_0^{10^9} x^{x^{x}} dx",
    "\\binom{10^{9}}{5\\cdot 10^{8}}",
    "(x+y+z+w)^{900}",
    "{" * 400 + "1" + "}" * 400,
    "9" * 1500 + "^{99}",
)


def test_an_answer_that_explodes_has_reward_zero_and_is_not_a_failure(tmp_path):
    pytest.importorskip("math_verify", reason="pip install 'paddock[envs]'")
    taskset = make(
        "math-file", {"train_file": write(tmp_path / "a", ROW), "verifier_timeout_s": 0.5}
    )
    policies = iter([scripted_reply(f"\\boxed{{{answer}}}") for answer in (*EXPLODING, "x^2+2x+1")])
    tasks = [taskset.task(0)] * (len(EXPLODING) + 1)
    *exploded, fine = outcomes(taskset, tasks, lambda task: next(policies))
    assert [getattr(found, "reward", found) for found in exploded] == [0.0] * len(EXPLODING)
    assert isinstance(fine, Verdict) and fine.reward == 1


def test_a_reference_answer_that_cannot_be_evaluated_is_a_grader_failure(tmp_path):
    pytest.importorskip("math_verify", reason="pip install 'paddock[envs]'")
    row = {"problem": "?", "answer": "\\sum_{n=1}^{10^{9}} n^{n}"}
    taskset = make(
        "math-file", {"train_file": write(tmp_path / "a", row), "verifier_timeout_s": 0.5}
    )
    hung, fine = (
        outcomes(taskset, [taskset.task(0)], lambda task, text=text: scripted_reply(text))[0]
        for text in ("\\boxed{x+1}", f"\\boxed{{{row['answer']}}}")
    )
    assert isinstance(hung, Failure) and hung.kind == "grader"
    assert fine.reward == 1, "letter by letter it is right"


here = pytest.mark.skipif(not DATA.exists(), reason="the public data files are not on this machine")


@here
@pytest.mark.parametrize(("split", "count"), [("train", 7473), ("test", 1319)])
def test_gsm8k_is_readable_and_sound(split, count):
    path = str(DATA / "gsm8k" / f"{split}.jsonl.gz")
    taskset = make(
        "math-file", {f"{split}_file": path, "verifier": "plain", "answer_format": "number"}
    )
    assert taskset.size(split) == count
    tasks = [taskset.task(index, split) for index in range(0, count, count // 100)]
    assert set(rewards(taskset, tasks, taskset.solver)) == {1.0}
    assert max(rewards(taskset, tasks, lambda task: scripted_reply("-12345.6"))) == 0


@here
def test_math_is_readable_and_sound():
    path = str(DATA / "math" / "train.jsonl.gz")
    taskset = make("math-file", {"train_file": path, "verifier": "plain"})
    assert taskset.size("train") == 7498
    tasks = [taskset.task(index) for index in range(0, 7498, 70)]
    assert set(rewards(taskset, tasks, taskset.solver)) == {1.0}
