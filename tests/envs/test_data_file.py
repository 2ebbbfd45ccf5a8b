"""Environment `ask`: rows of data files, and reward functions called as TRL calls them."""

import json
import re
import socket

import pyarrow
import pytest
from pyarrow import parquet

from paddock.envs import EnvError, make
from paddock.envs.jsonl import RowError
from paddock.envs.worker_pool import can_isolate
from paddock.records import Failure, Message, Verdict
from tests.envs.soundness import outcomes, scripted_reply

FUNCTIONS = """
import asyncio, os, re, socket, time
import neighbour

def accuracy(completions, solution, **kwargs):
    return [float(text.strip() == right) for text, right in zip(completions, solution)]

async def awaited(prompts, completions, **kwargs):
    await asyncio.sleep(0)
    return [neighbour.half(len(text)) for text in completions]

def sees(**kwargs):
    raise KeyError(repr({name: kwargs[name] for name in sorted(kwargs)}))

def only_hard(completions, level, **kwargs):
    return [1.0 if each == "hard" else None for each in level]

def two(completions, **kwargs):
    return [1.0, 2.0]

def not_a_number(completions, **kwargs):
    return [float("nan")]

def hangs(completions, **kwargs):
    while completions == ["hang"]:
        pass
    return [1.0]

def crashes(completions, **kwargs):
    os._exit(3)

def connects(completions, **kwargs):
    with socket.create_connection(("127.0.0.1", int(completions[0])), timeout=5):
        return [1.0]

def trainer_reads(completions, trainer_state, **kwargs):
    return [float(trainer_state.global_step)]
"""
ROWS = [
    {"prompt": "2 + 2?", "solution": "4", "level": "hard"},
    {"prompt": "1 + 1?", "solution": "2", "level": "easy"},
]
CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "2 + 2?"},
]


@pytest.fixture
def ask(tmp_path):
    """Makes the environment over rows, with functions of a file."""
    (tmp_path / "neighbour.py").write_text("def half(x):\n    return x / 2\n")
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS)

    def make_env(*functions, rows=ROWS, **args):
        file = tmp_path / "rows.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        funcs = [f"{tmp_path / 'my_rewards.py'}:{name}" for name in functions]
        return make("ask", {"train_file": str(file), "reward_funcs": funcs, **args})

    return make_env


def outcome(taskset, reply, index=0):
    return outcomes(taskset, [taskset.task(index)], lambda task: scripted_reply(reply))[0]


def test_the_reward_is_the_weighted_sum_of_the_functions(ask):
    taskset = ask("accuracy", "awaited", reward_weights=[2.0, 0.5])
    found = outcome(taskset, "4")
    assert found.reward == 2.0 * 1.0 + 0.5 * 0.5
    assert {"accuracy": 1.0, "awaited": 0.5}.items() <= found.parts.items()
    assert outcome(taskset, "4", index=1).reward == 0.25


def test_text_prompts_and_columns_are_passed_as_trl_does(ask):
    found = outcome(ask("sees"), " so 4")
    expected = {
        "completions": [" so 4"], "level": ["hard"], "prompts": ["2 + 2?"], "solution": ["4"]
    }  # fmt: skip
    assert isinstance(found, Failure) and repr(expected) in found.what.replace('\\"', '"')


def test_chat_prompts_are_passed_as_messages(ask):
    taskset = ask("sees", rows=[{"prompt": CHAT}])
    assert [(m.role, m.content) for m in taskset.task(0).messages] == [
        ("system", "Be short."),
        ("user", "2 + 2?"),
    ]
    found = outcome(taskset, "4")
    expected = {"completions": [[{"role": "assistant", "content": "4"}]], "prompts": [CHAT]}
    assert repr(expected) in found.what


def test_a_function_that_does_not_apply_does_not_count(ask):
    taskset = ask("only_hard", "accuracy")
    assert outcome(taskset, "4").reward == 2.0
    easy = outcome(taskset, "2", index=1)
    assert easy.reward == 1.0 and "only_hard" not in easy.parts
    alone = outcome(ask("only_hard"), "2", index=1)
    assert (alone.kind, alone.what) == ("grader", "no reward function applies to this task")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("two", "returned 2 rewards for one completion"),
        ("not_a_number", "returned nan"),
        ("crashes", "its process died"),
        ("connects", "OSError|ConnectionRefused|Network"),
        ("trainer_reads", "missing 1 required positional argument: 'trainer_state'"),
    ],
)
def test_a_function_that_fails_is_a_failure_of_the_grader(ask, function, message):
    found = outcome(ask(function), "1")
    assert isinstance(found, Failure) and (found.kind, found.where) == ("grader", function)
    assert re.search(message, found.what)


def test_a_function_that_hangs_is_stopped_and_the_next_call_works(ask, tmp_path):
    func = f"{tmp_path / 'my_rewards.py'}:hangs"
    taskset = ask(rewards=[{"kind": "function", "func": func, "timeout_s": 0.3}])
    hung = outcome(taskset, "hang")
    assert isinstance(hung, Failure) and hung.kind == "grader"
    assert outcome(taskset, "go").reward == 1.0


def test_a_function_of_a_module_scores_generated_tasks():
    part = {"kind": "function", "func": "tests.envs.test_data_file:answers_given"}
    taskset = make("math", {"rewards": [part], "correct_weight": 0.0})
    found = outcomes(taskset, [taskset.task(0)], taskset.solver)[0]
    assert found.parts["answers_given"] == 1.0


def answers_given(prompts, completions, answer, **kwargs):
    return [float(right in text) for text, right in zip(completions, answer, strict=True)]


@pytest.mark.parametrize("missing", ["my_rewards.py:nothing", "nowhere.py:f", "no.such.module:f"])
def test_a_missing_function_is_an_error_that_names_it(ask, tmp_path, missing):
    name = missing if missing.startswith("no.") else str(tmp_path / missing)
    with pytest.raises(EnvError, match=f"reward function .*{missing}"):
        ask(reward_funcs=[name])


def test_weights_must_match_the_functions(ask):
    with pytest.raises(EnvError, match="one entry for each of the 1 reward_funcs, got 2"):
        ask("accuracy", reward_weights=[1.0, 2.0])


def test_parquet_and_jsonl_give_the_same_tasks(tmp_path):
    rows = [{"problem": f"{n} + 1?", "target": n + 1, "chat": CHAT, "x": [n]} for n in range(3)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    columns = {"prompt_column": "problem", "answer_column": "target"}
    exact = {"rewards": [{"kind": "exact"}], **columns}
    tasksets = [
        make("ask", {"train_file": str(tmp_path / name), **exact})
        for name in ("rows.parquet", "rows.jsonl")
    ]
    first, second = ([t.example_of(t.task(i)) for i in range(3)] for t in tasksets)
    assert first == second
    assert first[2].columns == {"prompt": "2 + 1?", "target": 3, "chat": CHAT, "x": [2]}
    assert outcome(tasksets[0], "2", index=1) == Verdict(
        reward=1.0, parts={"correct": 1.0, "formed": 1.0, "exact": 1.0}
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, "rows.jsonl:1: 'prompt' or 'question' is missing; it has text"),
        ({"prompt": 3}, "'prompt' must be a string or a list of messages"),
        ({"prompt": [{"role": "user"}]}, r"'prompt'\[0\] must be a message"),
        ({"prompt": CHAT[:1]}, "the last message of 'prompt' must be the user's"),
        ({"prompt": "x", "answer": [1]}, "'answer' must be a string"),
    ],
)
def test_an_invalid_row_is_named(ask, row, message):
    with pytest.raises(RowError, match=message):
        ask(rows=[row], rewards=[{"kind": "exact"}])


def test_a_broken_parquet_file_is_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(RowError, match=r"cannot read .*a\.parquet"):
        make("ask", {"train_file": str(tmp_path / "a.parquet"), "correct_weight": 1.0})


def test_a_test_prompt_is_removed_from_training(tmp_path):
    rows = [{"prompt": CHAT}, {"prompt": CHAT[1:]}, {"prompt": "2 + 2?"}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "test.jsonl").write_text(json.dumps(rows[0]))
    files = {f"{split}_file": str(tmp_path / f"{split}.jsonl") for split in ("train", "test")}
    taskset = make("ask", {**files, "correct_weight": 1.0})
    assert taskset.size("train") == 2
    assert taskset.task(0).messages == (Message(role="user", content="2 + 2?"),)


def test_a_function_reaches_the_network_only_if_allowed(ask, tmp_path):
    func = {"kind": "function", "func": f"{tmp_path / 'my_rewards.py'}:connects"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        taskset = ask(rewards=[{**func, "allow_network": True}])
        assert outcome(taskset, port).reward == 1.0
        if can_isolate():
            assert isinstance(outcome(ask(rewards=[func]), port), Failure)
