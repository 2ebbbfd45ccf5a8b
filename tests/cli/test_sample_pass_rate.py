"""Tasks by their pass rate: what is kept, as a data file that an environment reads again."""

import json
from collections import Counter

import pytest
from typer.testing import CliRunner

from paddock.cli.__main__ import app
from paddock.envs import make
from tests.cli.untrained import save_untrained
from tests.serve.live import serving

# A reply passes more or less often, whatever an untrained network says.
REWARD = """
from zlib import crc32


def lucky(completions, luck, **_):
    return [float(crc32(c.encode()) % 8 < n) for c, n in zip(completions, luck)]
"""
ROWS = [
    {"prompt": f"Take {i} . Last digit ?", "answer": str(i), "luck": i, "id": f"q{i}"}
    for i in range(9)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_untrained(tmp_path_factory.mktemp("untrained") / "model", seed=1)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Env args of a data file with a reward function."""
    place = tmp_path_factory.mktemp("rows")
    (place / "lucky.py").write_text(REWARD)
    (place / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    return {"train_file": place / "rows.jsonl", "reward_funcs": f'["{place / "lucky.py"}:lucky"]'}


def command(model, rows, out, *more):
    words = ["sample", model, "ask", "--out", out, "--n", 6, "--max-tokens", 200, *more]
    for name, value in rows.items():
        words += ["--set", f"{name}={value}"]
    return CliRunner().invoke(app, list(map(str, words)))


def sampled(*arguments):
    found = command(*arguments)
    assert found.exit_code == 0, found.output
    return found.output


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def passed(out):
    """How many completions of each task passed, from the notes."""
    found = Counter({f"q{i}": 0 for i in range(9)})
    for note in lines(out.with_name(f"{out.name}.notes"))[1:]:
        row = int(note["id"].split("/")[-1].split("#")[0])
        found[f"q{row}"] += note["reward"] == 1.0
    return found


@pytest.fixture(scope="module")
def kept(folder, rows, tmp_path_factory):
    """A file of the tasks that are neither always nor never solved, with what was printed."""
    out = tmp_path_factory.mktemp("kept") / "tasks.jsonl"
    return out, sampled(folder, rows, out, "--pass-rate", "0.1:0.7")


def test_tasks_within_the_range_are_kept_with_their_rate(kept):
    out, printed = kept
    rates = {name: count / 6 for name, count in passed(out).items()}
    assert rates["q0"] == 0.0 and len(set(rates.values())) > 2  # luck 0 never passes
    verdicts = {q: "easy" if r > 0.7 else "hard" if r < 0.1 else "kept" for q, r in rates.items()}
    assert set(verdicts.values()) == {"easy", "hard", "kept"}
    found = lines(out)
    assert {row["id"]: row["pass_rate"] for row in found} == {
        name: rates[name] for name, verdict in verdicts.items() if verdict == "kept"
    }
    table = Counter(verdicts.values())
    for word, number in (("kept", table["kept"]), ("too easy", table["easy"])):
        assert f"{word} {number}" in " ".join(printed.split())


def test_the_file_is_the_environments_data_file(kept, rows):
    out, _ = kept
    by_id = {row["id"]: row for row in ROWS}
    for row in lines(out):  # every column is as it was
        assert {name: row[name] for name in by_id[row["id"]]} == by_id[row["id"]]
    again = make("ask", {"train_file": str(out), "correct_weight": 1.0})
    assert again.size("train") == len(lines(out))
    for index, row in enumerate(lines(out)):
        example = again.example_of(again.task(index))
        assert (example.question, example.answer) == (row["prompt"], row["answer"])
        assert example.columns["pass_rate"] == row["pass_rate"]


def test_another_range_samples_nothing_and_more_completions_only_what_is_missing(
    kept, folder, rows, tmp_path
):
    out, notes = tmp_path / "tasks.jsonl", tmp_path / "tasks.jsonl.notes"
    for file in kept[0].parent.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    before = notes.read_bytes()
    sampled(folder, rows, out, "--pass-rate", "0:0")
    assert notes.read_bytes() == before
    assert [row["id"] for row in lines(out)] == [q for q, n in passed(out).items() if n == 0]
    sampled(folder, rows, out, "--pass-rate", "0:1", "--n", "7")
    assert notes.read_bytes().startswith(before) and len(lines(notes)) == 1 + 9 * 7
    assert {row["pass_rate"] for row in lines(out)} <= {k / 7 for k in range(8)}
    found = command(folder, rows, out, "--pass-rate", "0:1", "--temperature", "0.5")
    assert found.exit_code == 1 and "was started with temperature" in found.output


def test_only_tasks_that_a_stronger_model_solves_are_kept(kept, folder, rows, tmp_path):
    for file in kept[0].parent.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    out = tmp_path / "tasks.jsonl"
    other = save_untrained(tmp_path / "other", seed=5)
    with serving(other) as live:
        sampled(folder, rows, out, "--pass-rate", "0:0.5", "--stronger-url", live.url)
    weak = {name for name, count in passed_by(out, "").items() if count / 6 <= 0.5}
    strong = passed_by(out, " by ")
    assert set(strong) == weak  # the others are not sampled
    assert {row["id"]: row["stronger_pass_rate"] for row in lines(out)} == {
        name: count / 6 for name, count in strong.items() if count
    }
    assert 0 in strong.values() and any(strong.values())


def passed_by(out, model):
    found = {}
    for note in lines(out.with_name(f"{out.name}.notes"))[1:]:
        sample_id, by, _ = note["id"].partition(" by ")
        if by == model:
            row = f"q{sample_id.split('/')[-1].split('#')[0]}"
            found[row] = found.get(row, 0) + (note["reward"] == 1.0)
    return found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--pass-rate", "0.9:0.1"), "must be LO:HI with 0 <= LO <= HI <= 1"),
        (("--pass-rate", "half"), "must be LO:HI with 0 <= LO <= HI <= 1"),
        (("--stronger-url", "http://127.0.0.1:9"), "--stronger-url needs --pass-rate"),
        (("--pass-rate", "0:1", "--stronger-url", "http://127.0.0.1:9"), "server unreachable"),
    ],
)
def test_wrong_options_are_reported(folder, rows, tmp_path, options, message):
    found = command(folder, rows, tmp_path / "t.jsonl", "--num-tasks", 1, *options)
    assert found.exit_code == 1 and message in " ".join(found.output.split())
