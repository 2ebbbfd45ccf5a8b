import resource
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

import paddock
from paddock.journal import GroupRecord, Ledger, LedgerError, LedgerView, TaskWeights
from paddock.records import Completion, Failure, Segment, Trajectory, Turn, Verdict


def entry(ordinal, *, task="sums", number=None, size=2, issued=0):
    number = ordinal if number is None else number
    return GroupRecord(ordinal=ordinal, task=task, number=number, size=size, issued=issued)


def rollout(ordinal, member, *versions, outcome=None):
    completion = Completion(
        token_ids=tuple(range(len(versions))),
        logprobs=(-0.25,) * len(versions),
        versions=tuple(Segment(version, 1) for version in versions),
        finish="stop",
    )
    trajectory = Trajectory(
        task_id="sums/0",
        group_id=f"g{ordinal}",
        session_id=f"s{ordinal}-{member}",
        turns=(Turn(added_ids=(5,), completion=completion),),
        outcome=outcome or Verdict(reward=1.0),
    )
    return (trajectory,)


def finished(ledger, ordinal, *versions, issued=0):
    """A finished group of two rollouts, sampled by these versions."""
    ledger.issue([entry(ordinal, issued=issued)])
    for member in range(2):
        ledger.record_rollout(ordinal, member, rollout(ordinal, member, *versions))
    ledger.end_group(ordinal, "finished")


def statuses(ledger):
    return {e.ordinal: e.status for e in ledger.groups()}


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as found:
        yield found


def test_a_group_ends_once(ledger):
    finished(ledger, 0, 0)
    ledger.record_update(0, 1, [0])
    for status in ("finished", "filtered", "failed"):
        with pytest.raises(
            LedgerError, match=f"group 0 cannot become {status}: it is not in flight"
        ):
            ledger.end_group(0, status, "why")
    with pytest.raises(LedgerError, match="group 0 cannot become trained: it is not finished"):
        ledger.record_update(1, 2, [0])
    assert statuses(ledger) == {0: "trained"}


def test_recording_an_update_is_atomic(ledger):
    finished(ledger, 0, 0)
    ledger.issue([entry(1)])
    with pytest.raises(LedgerError, match="group 1 cannot become trained: it is not finished"):
        ledger.record_update(0, 1, [0, 1])
    assert statuses(ledger) == {0: "finished", 1: "in flight"}
    assert ledger.batches() == []


def test_ending_a_group_needs_a_reason(ledger):
    ledger.issue([entry(0)])
    with pytest.raises(sqlite3.IntegrityError):
        ledger.end_group(0, "failed")


def test_a_group_number_is_unique(ledger):
    ledger.issue([entry(0, number=3)])
    with pytest.raises(sqlite3.IntegrityError):
        ledger.issue([entry(1, number=4), entry(2, number=3)])
    assert [e.number for e in ledger.groups()] == [3]


def test_a_lost_group_makes_the_counts_inconsistent(ledger, tmp_path):
    for ordinal in range(4):
        ledger.issue([entry(ordinal)])
    assert ledger.group_counts().is_consistent
    with sqlite3.connect(tmp_path / "ledger.sqlite") as other:
        other.execute("DELETE FROM groups WHERE ordinal = 2")
    assert not ledger.group_counts().is_consistent


def test_rollouts_round_trip(ledger):
    ledger.issue([entry(0)])
    failure = Failure(kind="grader", where="grade", what="no such file")
    whole, broken = rollout(0, 0, 3, 3, 4), rollout(0, 1, 3, outcome=failure)
    ledger.record_rollout(0, 1, broken)
    ledger.record_rollout(0, 0, whole)
    assert ledger.rollouts(0) == {0: whole, 1: broken}
    assert ledger.failure_counts() == {("sums", "grader", "grade"): 1}
    with pytest.raises(sqlite3.IntegrityError):
        ledger.record_rollout(0, 0, whole)


def test_a_rewind_makes_later_trained_groups_finished_again(ledger):
    for ordinal, version in enumerate((0, 0, 1, 2)):
        finished(ledger, ordinal, version, issued=version)
        ledger.record_update(ordinal, ordinal + 1, [ordinal])
    ledger.rewind(2, whole=False)
    assert statuses(ledger) == {0: "trained", 1: "trained", 2: "finished", 3: "finished"}
    assert [update for update, _, _ in ledger.batches()] == [0, 1]
    ledger.record_update(2, 3, [3])


def test_a_rewind_reissues_groups_sampled_by_lost_weights(ledger):
    """Weights after update 2 are lost: version 3 will be different."""
    finished(ledger, 0, 1, 2)
    ledger.issue([entry(1)])
    ledger.record_rollout(1, 0, rollout(1, 0, 2))
    ledger.record_rollout(1, 1, rollout(1, 1, 2, 3))
    ledger.end_group(1, "finished")
    ledger.issue([entry(2)])
    ledger.record_rollout(2, 0, rollout(2, 0, 3))
    ledger.issue([entry(3)])
    ledger.record_rollout(3, 0, rollout(3, 0, 3))
    ledger.end_group(3, "failed", "it was bad")
    for update, groups in enumerate([[0], [], [], [1]]):
        ledger.record_update(update, update + 1, groups)
    ledger.rewind(2, whole=False)
    assert statuses(ledger) == {0: "trained", 1: "in flight", 2: "in flight", 3: "failed"}
    assert list(ledger.rollouts(1)) == [0]
    assert list(ledger.rollouts(2)) == []


def test_a_whole_rewind_removes_everything_later(ledger):
    finished(ledger, 0, 0, issued=0)
    finished(ledger, 1, 0, issued=0)
    ledger.record_update(0, 1, [0])
    ledger.record_task_weights(
        TaskWeights(since=1, weights={"sums": 0.0}, why="ill", asked=False), now=0
    )
    finished(ledger, 2, 1, issued=1)
    ledger.issue([entry(3, issued=1)])
    ledger.end_group(3, "failed", "it was bad")
    ledger.record_task_weights(
        TaskWeights(since=2, weights={"sums": 1.0}, why="well again", asked=False), now=1
    )
    ledger.record_task_weights(
        TaskWeights(since=2, weights={"sums": 3.0}, why="asked", asked=True), now=1
    )
    ledger.record_update(1, 2, [1])
    ledger.rewind(1, whole=True)
    assert statuses(ledger) == {0: "trained", 1: "finished"}
    assert [row.why for row in ledger.task_weights()] == ["ill", "asked"]
    assert ledger.group_counts().is_consistent


def test_checkpoints_are_known_until_they_are_removed(ledger):
    for update in range(3):
        ledger.record_update(update, update + 1, [])
        ledger.record_checkpoint(update + 1, f"step-{update + 1}")
    assert ledger.checkpoints() == {1: "step-1", 2: "step-2", 3: "step-3"}
    ledger.rewind(2, whole=False)
    assert ledger.checkpoints() == {1: "step-1", 2: "step-2"}


def test_tokens_can_be_dropped_and_outcomes_are_kept(ledger):
    for ordinal in range(2):
        finished(ledger, ordinal, 0)
        ledger.record_update(ordinal, ordinal + 1, [ordinal])
    ledger.drop_tokens(1)
    with pytest.raises(LedgerError, match="tokens of group 0 were dropped"):
        ledger.rollouts(0)
    assert len(ledger.rollouts(1)) == 2
    assert ledger.group_counts().trained == 2


def test_a_ledger_of_another_format_is_rejected(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        ledger.set_metadata("format", 99)
    with pytest.raises(LedgerError, match="ledger format 99 is not supported, expected 1"):
        Ledger(path)


def test_a_file_that_is_not_a_database_is_rejected_by_name(tmp_path):
    (tmp_path / "ledger.sqlite").write_text("half a ledger\n" * 100)
    with pytest.raises(LedgerError, match=r"ledger\.sqlite: file is not a database"):
        Ledger(tmp_path / "ledger.sqlite")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a ledger of thirty groups."""
    path = tmp_path_factory.mktemp("whole") / "ledger.sqlite"
    with Ledger(path) as made:
        for ordinal in range(30):
            finished(made, ordinal, *range(50))
            made.record_update(ordinal, ordinal + 1, [ordinal])
    return path.read_bytes()


def read_everything(path):
    with Ledger(path) as ledger:
        ledger.rewind(20, whole=False)
        for each in ledger.groups():
            ledger.rollouts(each.ordinal)


@pytest.mark.parametrize("spoilt", [bytes(4096), b"\xff" * 4096, Random(0).randbytes(4096)])
def test_a_damaged_page_is_reported_with_a_remedy(whole, tmp_path, spoilt):
    path = tmp_path / "ledger.sqlite"
    for start in range(0, len(whole), 4096):
        path.write_bytes(whole[:start] + spoilt + whole[start + 4096 :])
        with pytest.raises(
            LedgerError, match=r"ledger\.sqlite: .*: the file is damaged; restore a"
        ):
            read_everything(path)
        path.write_bytes(whole[: start + 100])
        with pytest.raises(
            LedgerError, match=r"ledger\.sqlite: .*: the file is damaged; restore a"
        ):
            read_everything(path)


def test_damage_is_reported_by_the_view_too(whole, tmp_path):
    path = tmp_path / "ledger.sqlite"
    for start in range(4096, len(whole), 4096):
        path.write_bytes(whole[:start] + b"\xff" * 4096 + whole[start + 4096 :])
        try:
            with LedgerView(path) as view:
                view.list_groups(30)
                view.rollout_summaries(range(30))
                view.tasks()
                for ordinal in range(30):
                    view.group_trajectories(ordinal)
        except LedgerError:
            continue


@pytest.mark.parametrize("at", [0, 5, 40, -1])
def test_damaged_tokens_are_reported_with_their_group(ledger, tmp_path, at):
    finished(ledger, 7, 0)
    packed = bytearray(ledger.packed_rollouts(7)[1])
    packed[at] ^= 0x10
    with sqlite3.connect(tmp_path / "ledger.sqlite") as other:
        other.execute("UPDATE attempts SET packed = ? WHERE member = 1", (bytes(packed),))
    with pytest.raises(LedgerError, match=r"of group 7 |rollout format 17"):
        ledger.rollouts(7)


def fill(ledger):
    for ordinal in range(1, 100):
        with ledger.transaction():
            finished(ledger, ordinal, *range(500))


def test_a_full_disk_is_reported_and_keeps_the_old_content(ledger):
    finished(ledger, 0, 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, limits[1]))
    try:
        with pytest.raises(LedgerError, match=r"ledger\.sqlite: .*free some disk space"):
            fill(ledger)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert all(len(ledger.rollouts(e.ordinal)) == 2 for e in ledger.groups())
    ledger.record_update(0, 1, [0])  # there is space again
    assert statuses(ledger)[0] == "trained"


def test_a_full_database_is_reported(ledger):
    ledger._base.execute("PRAGMA max_page_count = 20")  # SQLite reports a full disk
    with pytest.raises(LedgerError, match="full: free some disk space, then run the same command"):
        fill(ledger)


def test_the_ledger_can_be_read_while_written(ledger, tmp_path):
    finished(ledger, 0, 0)
    with ledger.transaction():
        ledger.issue([entry(1)])
        with Ledger(tmp_path / "ledger.sqlite") as reader:
            assert reader.group_counts().issued == 1
    with Ledger(tmp_path / "ledger.sqlite") as reader:
        assert reader.group_counts().issued == 2


def killed_after(calls, path, witness):
    """Run the writer and kill -9 it after `calls` Python calls."""
    command = [sys.executable, "-m", "tests.journal.ledger_writer", path, witness, str(calls)]
    done = subprocess.run(command, cwd=Path(paddock.__file__).parents[1])
    assert done.returncode == -signal.SIGKILL


def test_a_killed_writer_has_committed_every_move_and_no_partial_one(tmp_path):
    path, witness = tmp_path / "ledger.sqlite", tmp_path / "witness"
    rng = Random(7)
    for _ in range(5):
        killed_after(rng.randint(20_000, 60_000), path, witness)
        check(path, [line.split() for line in witness.read_text().splitlines()])


def check(path, lines):
    with Ledger(path) as ledger:
        assert ledger.group_counts().is_consistent
        entries = {e.ordinal: e for e in ledger.groups()}
        moves = {word: [line for line in lines if line[0] == word] for word in MOVES}
        issued = {int(line[1]) for line in moves["issued"]}
        assert issued <= entries.keys() and len(entries.keys() - issued) <= 5  # one per kill
        for word in ("filtered", "failed"):
            assert all(entries[int(line[1])].status == word for line in moves[word])
        for line in moves["attempt"]:
            assert int(line[2]) in ledger.packed_rollouts(int(line[1]))
        batches = ledger.batches()
        assert [update for update, _, _ in batches] == list(range(len(batches)))
        assert all(len(groups) == 4 for _, _, groups in batches)
        for line in moves["trained"]:
            found = {e.ordinal for e in batches[int(line[1])][2]}
            assert found == set(map(int, line[2:]))
        trained = [e.ordinal for _, _, groups in batches for e in groups]
        assert len(trained) == len(set(trained)) and len(trained) > 0


MOVES = ("issued", "attempt", "finished", "filtered", "failed", "trained")
