import asyncio
import gzip
import json

import pytest

from paddock.envs import EnvError, make
from paddock.envs.answer_format import extract_code
from paddock.envs.code.generate import function_source
from paddock.envs.code.verifier import HiddenTests, make_test_verifier
from paddock.envs.datasets import QAExample
from paddock.envs.env import scripted_policy
from paddock.envs.jsonl import RowError
from paddock.records import Failure, Message, ToolCall
from paddock.sandbox import SandboxError, SandboxSettings, pick_backend
from tests.envs.soundness import (
    DATA,
    check_sound,
    check_tasks,
    constant_policy,
    outcomes,
    rewards,
    scripted_reply,
)


def sandboxed():
    try:
        pick_backend(SandboxSettings())
    except SandboxError as error:
        return str(error)
    return ""


WHY = sandboxed()
boxed = pytest.mark.skipif(bool(WHY), reason=WHY or "there is a sandbox")


@boxed
@pytest.mark.parametrize(("level", "count"), [(1, 14), (3, 14)])
def test_functions_are_sound_in_the_sandbox(level, count):
    taskset = make("code", {"level": level})
    check_sound(
        taskset, count, [lambda task: taskset.scripted_answer(taskset.example_of(task).near[0])]
    )


def test_hidden_tests_pass_the_solution_and_fail_shorter_ones():
    """The same 200 tasks without a sandbox: the code is trusted."""
    for level in (1, 2, 4, 5):
        taskset = make("code", {"level": level})
        for index in range(50):
            problem = taskset.example_of(taskset.task(index))
            assert fails(problem.answer, problem) == 0
            assert min(fails(near, problem) for near in problem.near) > 0


def fails(answer, problem):
    names = {}
    exec(answer, names)
    tests = HiddenTests.from_example(problem)
    return sum(names[tests.entry](*given) != right for given, right in tests.cases)


def test_level_changes_how_often_the_first_two_steps_are_enough():
    rates = []
    for level in (1, 2, 3, 5):
        taskset = make("code", {"level": level})
        problems = [taskset.example_of(taskset.task(index)) for index in range(100)]
        short = [
            "\n".join([*problem.answer.split("\n")[:3], "    return x"]) for problem in problems
        ]
        passed = [not fails(code, p) for code, p in zip(short, problems, strict=True)]
        rates.append(sum(passed) / len(passed))
    assert rates[:2] == [1.0, 1.0]
    assert max(rates[2:]) < 0.3


def test_tasks_are_reproducible_distinct_and_split():
    check_tasks(lambda: make("code", {"level": 2}), 200)


def test_a_function_is_rendered_as_source():
    assert function_source("f", []) == "def f(x):\n    return x"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```\na\n```\nand\n```py\nb\n```", "b\n"),
        ("```python\nx = 1\n``` and ```python\nx = 2", "x = 1\n"),
        ("```python\nopen", None),
        ("    return 1\n", "    return 1\n"),
        ("  \n", None),
    ],
)
def test_code_is_the_last_closed_fence_or_all(text, found):
    assert extract_code(text) == found


CHEATS = {
    "leaves early": "import os\nos._exit(0)",
    "leaves politely": "raise SystemExit(0)",
    "prints": "print('0' * 32 + '[]')",
    "equals everything": (
        "class Yes(list):\n    __eq__ = lambda a, b: True\ndef {name}(x): return Yes()"
    ),
    "replaces the judge": (
        "import __main__, builtins\n__main__.same = builtins.all = lambda *rest: True\n"
        "def {name}(x): return [1]"
    ),
    "replaces what runs the tests": (
        "import builtins\nempty = compile('', '', 'exec')\n"
        "builtins.compile, builtins.exec = lambda *rest: empty, lambda *rest: None"
    ),
    "replaces what reports": (
        "import __main__, json\njson.dumps = lambda *rest, **more: '[]'\n"
        "__main__._tried = __main__._run = lambda *rest: ''"
    ),
    "walks frames to the report": (
        "import sys\nframe = sys._getframe()\nwhile frame:\n"
        "    if 'report' in frame.f_locals: frame.f_locals['report']([])\n    frame = frame.f_back"
    ),
    "finds the report in memory": (
        "import gc, types\nfor each in gc.get_objects():\n"
        "    if isinstance(each, types.FunctionType) and each.__name__ == 'report': each([])"
    ),
    "says on every descriptor that all is well": (
        "import os, json\nfor said in ({{'passed': 8, 'failed': []}}, {{'value': []}}):\n"
        "    for fd in range(64):\n"
        "        try: os.write(fd, json.dumps(said).encode() + b'\\n')\n"
        "        except OSError: pass"
    ),
    "breaks": "def {name}(x): return x[",
    "another name": "def other(x): return x",
}


@boxed
@pytest.mark.parametrize("cheat", CHEATS)
def test_a_program_cannot_forge_its_result(cheat):
    taskset = make("code", {"level": 3})
    task = taskset.task(0)
    name = HiddenTests.from_example(taskset.example_of(task)).entry
    (found,) = outcomes(
        taskset, [task], lambda t: taskset.scripted_answer(CHEATS[cheat].format(name=name))
    )
    assert found.reward == 0
    assert found.parts["formed"] == 1
    assert found.note


FORGED = """
import sys, types, gc
for each in gc.get_objects():
    if isinstance(each, types.FunctionType) and each.__name__ == "report":
        cells = dict(zip(each.__code__.co_freevars, each.__closure__))
        cells["write"].cell_contents(
            cells["out"].cell_contents, f"{cells['word'].cell_contents}-100 ".encode()
        )
        cells["leave"].cell_contents(0)
"""


@boxed
def test_a_forged_report_has_reward_zero_with_partial_credit(tmp_path):
    taskset = make("code", {"level": 3, "partial_credit": True})
    task = taskset.task(0)
    assert rewards(taskset, [task], lambda t: taskset.scripted_answer(FORGED)) == [0.0]


EQUAL = "class Yes:\n    __eq__ = __le__ = __ge__ = lambda a, b: True\n    __hash__ = None\n"
NUMBERS = {
    "prompt": "Double.",
    "code": "def f(x): return 2 * x",
    "test_list": ["assert f(2) == 4", "assert f([1]) == [1, 1]", "assert abs(f(1) - 2) < 0.1"],
}


@boxed
@pytest.mark.parametrize(
    "answer",
    [
        EQUAL + "def f(x): return Yes()",
        "class Yes(int):\n    __eq__ = lambda a, b: True\ndef f(x): return Yes(7)",
        "def abs(x): return 0\ndef f(x): return 5",
        "import builtins\nbuiltins.abs = lambda x: 0\ndef f(x): raise StopIteration",
    ],
)
def test_return_values_are_compared_by_value(tmp_path, answer):
    taskset = make(
        "code-file", {"test_file": write(tmp_path / "a", NUMBERS), "partial_credit": True}
    )
    task = taskset.task(0, "test")
    assert rewards(taskset, [task], lambda t: taskset.scripted_answer(answer)) == [0.0]


@boxed
def test_tests_may_use_objects_and_exceptions_of_the_answer(tmp_path):
    row = {
        "prompt": "A node, and its depth.",
        "code": "class Node:\n    def __init__(self, n): self.n, self.next = n, None\n"
        "def depth(node): return 1 + depth(node.next) if node else 0\n"
        "def up(n):\n    yield from range(n)\ndef no(): raise ValueError('no')",
        "test_setup_code": "root = Node(1)\nroot.next = Node(2)",
        "test_list": [
            "assert depth(root) == 2 and root.next.n == 2",
            "assert list(up(3)) == [0, 1, 2] and sorted(up(2)) == [0, 1]",
            "try:\n    no()\n    assert False\nexcept ValueError as error:\n"
            "    assert str(error) == 'no'",
        ],
    }
    taskset = make("code-file", {"test_file": write(tmp_path / "a", row)})
    assert rewards(taskset, [taskset.task(0, "test")], taskset.solver) == [1.0]


@boxed
def test_tests_that_fail_on_their_own_are_a_grader_failure(tmp_path):
    row = {**NUMBERS, "test_setup_code": "raise OSError('no such data')"}
    taskset = make("code-file", {"test_file": write(tmp_path / "a", row)})
    (found,) = outcomes(taskset, [taskset.task(0, "test")], taskset.solver)
    assert isinstance(found, Failure)
    assert (found.kind, found.where) == ("grader", "tests")
    assert "no such data" in found.what


@boxed
def test_a_program_that_never_ends_has_reward_zero_with_a_note():
    taskset = make("code", {"test_timeout_s": 1.0})
    (found,) = outcomes(
        taskset, [taskset.task(0)], lambda task: taskset.scripted_answer("while True: pass")
    )
    assert found.reward == 0
    assert found.note == "correct: over 1 s"


@boxed
def test_a_function_cannot_replace_the_checker_of_the_next_test():
    taskset = make("code", {"level": 3, "partial_credit": True})
    task = taskset.task(0)
    name = HiddenTests.from_example(taskset.example_of(task)).entry
    answer = f"def {name}(x):\n    globals()['same'] = lambda *rest: True"
    assert rewards(taskset, [task], lambda t: taskset.scripted_answer(answer)) == [0.0]


@boxed
def test_many_long_error_messages_are_reward_zero_and_not_a_grader_failure():
    check = make_test_verifier(SandboxSettings(), seconds=20, warm=0)
    tests = HiddenTests(checks=("f()",) * 300)
    problem = QAExample(question="", answer="", hidden=tests.to_json())
    score = asyncio.run(check("raise ValueError('\u00e9' * 299)", problem))
    assert score.value == 0
    assert score.note.startswith("300 of 300 failed: ValueError: ")


@boxed
def test_partial_credit_is_the_fraction_of_passed_tests():
    taskset = make("code", {"level": 1, "families": ["numbers"], "partial_credit": True})
    task = taskset.task(0)
    (found,) = rewards(
        taskset, [task], lambda t: taskset.scripted_answer(taskset.example_of(t).near[0])
    )
    assert 0 <= found < 1
    shares = rewards(
        taskset,
        [taskset.task(n) for n in range(6)],
        lambda t: taskset.scripted_answer(taskset.example_of(t).near[0]),
    )
    assert any(0 < share < 1 for share in shares)


def test_an_unavailable_sandbox_is_a_failure_and_not_reward_zero(monkeypatch):
    taskset = make("code", {"warm_sandboxes": 0})

    def broken(*arguments):
        raise SandboxError("no sandbox today")

    monkeypatch.setattr("paddock.sandbox.pool.open_sandbox", broken)
    (found,) = outcomes(taskset, [taskset.task(0)], taskset.solver)
    assert isinstance(found, Failure)
    assert (found.kind, found.where) == ("grader", "grade")
    assert "no sandbox today" in found.what


HUMANEVAL = {
    "task_id": "Own/0",
    "prompt": 'import math\n\ndef helper(x):\n    return x\n\ndef root(x):\n    """Root."""\n',
    "entry_point": "root",
    "canonical_solution": "    return helper(math.sqrt(x))\n",
    "test": "def check(candidate):\n    assert candidate(4) == 2\n",
}
MBPP = {
    "task_id": 1,
    "text": "Write a function to add.",
    "code": "def add(a, b):\r\n  return a + b",
    "test_setup_code": "",
    "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
    "challenge_test_list": ["assert add(-1, 1) == 0"],
}
CLEAN = {
    "source_file": "x",
    "prompt": "Write a function for pi.",
    "code": "def pi():\n    return math.pi",
    "test_imports": ["import math"],
    "test_list": ["assert math.isclose(pi(), 3.14159, rel_tol=0.001)"],
}


def write(path, *entries):
    text = "\n".join(map(json.dumps, entries))
    path.write_bytes(gzip.compress(text.encode()))
    return str(path)


@boxed
def test_all_layouts_are_read_and_sound(tmp_path):
    path = write(tmp_path / "a.jsonl.gz", HUMANEVAL, MBPP, CLEAN)
    taskset = make("code-file", {"test_file": path})
    assert taskset.size("test") == 3
    check_sound(taskset, 3, [lambda task: constant_policy("```python\nx = 1\n```")], split="test")
    prompts = [taskset.task(index, "test").messages[0].content for index in range(3)]
    assert "assert add(1, 2) == 3" in prompts[1]
    assert "add(0, 0)" not in prompts[1], "the other tests are hidden"
    assert "candidate" not in prompts[0]


@boxed
def test_an_answer_may_be_a_whole_function_or_its_body(tmp_path):
    taskset = make("code-file", {"test_file": write(tmp_path / "a", HUMANEVAL)})
    task = taskset.task(0, "test")
    for answer in ("    return helper(math.sqrt(x))", "def root(x):\n    return math.sqrt(x)"):
        assert rewards(taskset, [task], lambda t, a=answer: taskset.scripted_answer(a)) == [1.0]
        assert rewards(taskset, [task], lambda t, a=answer: scripted_reply(a)) == [1.0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**HUMANEVAL, "entry_point": "other"}, "does not contain the function 'other'"),
        ({**MBPP, "test_list": [], "challenge_test_list": []}, "'test_list' is missing or empty"),
        ({**MBPP, "test_list": [1]}, "'test_list' must be a list of strings"),
        ({"text": "x", "test_list": ["y"]}, "'code' is missing"),
    ],
)
def test_an_invalid_row_is_named(tmp_path, row, message):
    with pytest.raises(RowError, match=f"a:1: .*{message}"):
        make("code-file", {"train_file": write(tmp_path / "a", row)})


@boxed
@pytest.mark.skipif(not DATA.exists(), reason="the public data files are not on this machine")
@pytest.mark.parametrize(
    ("path", "count"),
    [
        ("humaneval/HumanEval.jsonl.gz", 164),
        ("mbpp/mbpp.jsonl.gz", 974),
        ("mbpp/sanitized-mbpp.json.gz", 427),
    ],
)
def test_public_files_are_readable_and_a_sample_is_sound(path, count):
    taskset = make("code-file", {"test_file": str(DATA / path), "test_timeout_s": 120.0})
    assert taskset.size("test") == count
    tasks = [taskset.task(index, "test") for index in range(3, count, count // 5)]
    assert set(rewards(taskset, tasks, taskset.solver)) == {1.0}
    assert set(rewards(taskset, tasks, lambda task: constant_policy("pass"))) == {0.0}


@boxed
def test_the_python_tool_keeps_its_names_and_reports_errors():
    taskset = make("math", {"python_tool": {"timeout_s": 5.0}, "max_turns": 6, "level": 3})
    task = taskset.task(0)
    answer = taskset.example_of(task).answer

    def run(text):
        call = ToolCall(id="1", name="python", arguments={"code": text})
        return Message(role="assistant", content="", tool_calls=(call,))

    script = [
        run("from fractions import Fraction\nx = Fraction(1, 3)"),
        run("x * 6"),
        run("print(y)"),
        Message(role="assistant", content=f"\\boxed{{{answer}}}"),
    ]
    tool_results = []

    async def policy(messages, tools):
        assert [spec.name for spec in tools] == ["python"]
        tool_results.append(messages[-1].content)
        return await scripted_policy(*script)(messages, tools)

    assert rewards(taskset, [task], lambda task: policy) == [1.0]
    assert tool_results[1] == "(no output)"
    assert tool_results[2] == "Fraction(2, 1)"
    assert "NameError" in tool_results[3]


def test_tools_need_turns():
    with pytest.raises(EnvError, match="max_turns must be at least 2 with tools, got 1"):
        make("math", {"python_tool": {}})
