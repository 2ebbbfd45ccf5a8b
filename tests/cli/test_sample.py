"""Rejection sampling: what is kept, and a dialogue file that survives kills of its writer."""

import json
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paddock.cli.__main__ import app
from paddock.data.dialogue import read_dialogues
from paddock.launch import UserError
from paddock.launch.dialogue_file import DialogueFile
from paddock.records import Failure, Verdict
from tests.cli.untrained import save_untrained
from tests.patience import until
from tests.serve.live import serving

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_untrained(tmp_path_factory.mktemp("untrained") / "model", seed=1)


def words(folder, out, *more, env="nano-chain"):
    arguments = ["sample", folder, env, "--out", out, "--n", 3, "--num-tasks", 6, "--min-reward", 0]
    return [str(word) for word in (*arguments, "--max-tokens", 40, "--max-concurrent", 4, *more)]


def sampled(folder, out, *more, **options):
    found = CliRunner().invoke(app, words(folder, out, *more, **options))
    assert found.exit_code == 0, found.output
    return found.output


def lines(out):
    return [json.loads(line) for line in out.read_text().splitlines()]


def by_id(out):
    return {line["id"]: line for line in lines(out)}


@pytest.fixture(scope="module")
def straight(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("straight") / "kept.jsonl"
    sampled(folder, out)
    return out


def test_kept_dialogues_can_be_trained_on_and_name_their_source(straight, folder):
    found = lines(straight)
    assert 3 <= len(found) < 18  # some replies never end: they are not kept
    for line in found:
        assert line["id"] == f"{line['task']}#{line['sample']}"
        assert (line["world"], line["split"]) == ("nano-chain", "train")
        assert line["model"] == str(folder) and line["version"] == "0"
        assert line["reward"] == 0.0 and line["parts"] == {"right": 0.0}
    assert [d.id for d in read_dialogues(straight)] == [line["id"] for line in found]
    notes = lines(straight.with_name("kept.jsonl.notes"))
    assert len(notes) == 1 + 18  # the settings, and every answer
    fates = Counter(note["fate"] for note in notes[1:])
    assert fates["accepted"] == len(found) and fates["policy failure"] > 0


def test_a_second_call_samples_nothing_and_with_a_larger_n_it_adds(straight, folder, tmp_path):
    out = tmp_path / "kept.jsonl"
    for file in straight.parent.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    before = out.read_bytes()
    sampled(folder, out)
    assert out.read_bytes() == before
    sampled(folder, out, "--num-tasks", "8")
    assert out.read_bytes().startswith(before)
    assert len(lines(tmp_path / "kept.jsonl.notes")) == 1 + 24


def test_other_settings_need_another_file(straight, folder):
    found = CliRunner().invoke(app, words(folder, straight, "--temperature", "0.5"))
    assert found.exit_code == 1
    assert "was started with temperature 1.0, not 0.5" in found.output
    other = CliRunner().invoke(app, words(folder, straight, env="nano-moon"))
    assert other.exit_code == 1 and "environment 'nano-moon' not found" in other.output


def test_a_file_of_another_command_is_not_overwritten(folder, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"a": 1}\n')
    found = CliRunner().invoke(app, words(folder, tmp_path / "mine.jsonl"))
    assert found.exit_code == 1 and "was not written by this command" in found.output
    assert (tmp_path / "mine.jsonl").read_text() == '{"a": 1}\n'


def test_killed_and_resumed_it_ends_with_the_same_dialogues(straight, folder, tmp_path):
    out = tmp_path / "kept.jsonl"
    command = [sys.executable, "-m", "paddock.cli", *words(folder, out, "--max-concurrent", "2")]
    notes = tmp_path / "kept.jsonl.notes"
    for _ in range(5):  # a busy machine may let the command end before this test sees its notes
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        until(lambda: notes.exists() and notes.read_text().count("\n") > 5)
        process.kill()
        process.wait()
        if len(lines(notes)) < 19:
            break
        for file in tmp_path.iterdir():
            file.unlink()
    assert len(lines(notes)) < 19
    sampled(folder, out)
    assert by_id(out) == by_id(straight)
    assert len(lines(out)) == len(by_id(out))


def test_a_server_can_be_used_instead(straight, folder, tmp_path):
    out = tmp_path / "kept.jsonl"
    with serving(folder) as live:
        arguments = ["sample", "tiny", "nano-chain", "--base-url", live.url, "--out", str(out)]
        arguments += ["--n", "3", "--num-tasks", "6", "--min-reward", "0", "--max-tokens", "40"]
        found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 0, found.output
    here, there = by_id(straight), by_id(out)
    assert set(here) == set(there)
    for name, line in there.items():  # the same seeds and network give the same text
        assert line["messages"] == here[name]["messages"]
        assert line["model"] == "tiny"


def test_an_unreachable_server_is_reported_at_once(tmp_path):
    arguments = ["sample", "x", "nano-chain", "--base-url", "http://127.0.0.1:9", "--out"]
    found = CliRunner().invoke(app, [*arguments, str(tmp_path / "k.jsonl")])
    assert found.exit_code == 1 and "server unreachable" in found.output


# --- the file -------------------------------------------------------------------------------------

BEGUN = {"model": "m"}
LONG = "x" * 20_000  # several pages, so that a kill can truncate a line


def line(task, k, reply):
    message = {"role": "assistant", "content": reply}
    return {"id": f"{task}#{k}", "task": task, "messages": [message], "reward": 1.0}


def test_only_dialogues_above_the_minimum_reward_are_kept_without_duplicates(tmp_path):
    with DialogueFile.open(tmp_path / "k.jsonl", BEGUN) as harvest:
        harvest.add("a#0", line("a", 0, "yes"), Verdict(reward=1.0), 0.5)
        harvest.add("a#1", line("a", 1, "yes"), Verdict(reward=1.0), 0.5)
        harvest.add("b#0", line("b", 0, "yes"), Verdict(reward=1.0), 0.5)
        harvest.add("b#1", line("b", 1, "no"), Verdict(reward=0.4), 0.5)
        harvest.add_failure("c#0", Failure(kind="policy", where="w", what="x"))
        harvest.add_failure("c#1", Failure(kind="world", where="w", what="x"))
    assert [entry["id"] for entry in lines(tmp_path / "k.jsonl")] == ["a#0", "b#0"]
    with DialogueFile.open(tmp_path / "k.jsonl", BEGUN) as again:
        assert again.done == {"a#0", "a#1", "b#0", "b#1", "c#0"}  # environment failures are retried
        again.add("a#2", line("a", 2, "yes"), Verdict(reward=1.0), 0.5)
    assert len(lines(tmp_path / "k.jsonl")) == 2


def test_one_writer_at_a_time(tmp_path):
    with (
        DialogueFile.open(tmp_path / "k.jsonl", BEGUN),
        pytest.raises(UserError, match="is in use by another process"),
        DialogueFile.open(tmp_path / "k.jsonl", BEGUN),
    ):
        pass


def test_a_truncated_line_is_removed_and_sampled_again(tmp_path):
    out = tmp_path / "k.jsonl"
    with DialogueFile.open(out, BEGUN) as harvest:
        for k in range(3):
            harvest.add(f"a#{k}", line("a", k, str(k)), Verdict(reward=1.0), 1.0)
    out.write_bytes(out.read_bytes()[:-7])
    notes = tmp_path / "k.jsonl.notes"
    notes.write_bytes(notes.read_bytes()[: notes.read_bytes().rindex(b'{"id": "a#2"')])
    with DialogueFile.open(out, BEGUN) as harvest:
        assert harvest.done == {"a#0", "a#1"}
        harvest.add("a#2", line("a", 2, "2"), Verdict(reward=1.0), 1.0)
    assert [entry["id"] for entry in lines(out)] == ["a#0", "a#1", "a#2"]


def test_a_dialogue_written_but_not_logged_is_not_sampled_again(tmp_path):
    out, notes = tmp_path / "k.jsonl", tmp_path / "k.jsonl.notes"
    with DialogueFile.open(out, BEGUN) as harvest:
        for k in range(2):
            harvest.add(f"a#{k}", line("a", k, str(k)), Verdict(reward=1.0), 1.0)
    notes.write_bytes(notes.read_bytes()[: notes.read_bytes().rindex(b'{"id": "a#1"')])
    with DialogueFile.open(out, BEGUN) as harvest:
        assert harvest.done == {"a#0", "a#1"} and harvest.counts["accepted"] == 2
    assert len(lines(notes)) == 3


WRITER = f"""
import sys
from pathlib import Path
from paddock.launch.dialogue_file import DialogueFile
from paddock.records import Verdict
from tests.killing import kill_after_calls

with DialogueFile.open(Path(sys.argv[1]), {BEGUN!r}) as harvest:
    kill_after_calls(int(sys.argv[2]))
    for k in range(400):
        if f"a#{{k}}" not in harvest.done:
            worth = float(k % 3 > 0)
            messages = [dict(role="assistant", content=f"{{k}} {LONG}")]
            line = dict(id=f"a#{{k}}", task="a", messages=messages, reward=1.0)
            harvest.add(f"a#{{k}}", line, Verdict(reward=worth), 1.0)
"""


def test_killed_at_any_point_no_line_is_truncated_duplicated_or_lost(tmp_path):
    out = tmp_path / "k.jsonl"
    command = [sys.executable, "-c", WRITER]
    rng, codes = random.Random(5), []
    while not codes or codes[-1] == -signal.SIGKILL:
        calls = str(rng.randint(1, 9000))
        codes.append(subprocess.run([*command, str(out), calls], cwd=ROOT).returncode)
    assert codes[-1] == 0 and len(codes) > 4
    assert sorted(by_id(out)) == sorted(f"a#{k}" for k in range(400) if k % 3 > 0)
    assert len(lines(out)) == len(by_id(out))
