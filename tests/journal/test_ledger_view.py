"""Read-only view of a ledger: it writes nothing, whatever state the ledger is in."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from paddock.journal import GroupRecord, Ledger, LedgerError, LedgerView, TokenTrainRecord
from tests.journal.test_ledger import rollout

WRITER = """
import sys
from paddock.journal import GroupRecord, Ledger
ledger = Ledger(sys.argv[1])
for ordinal in range(40):
    ledger.issue([GroupRecord(ordinal=ordinal, task="sums", number=ordinal, size=1, issued=0)])
print("written", flush=True)
sys.stdin.read()
"""


def trace(folder: Path) -> dict[str, tuple[str, int]]:
    """Digest and modification time of each file in a folder."""
    return {
        file.name: (hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_mtime_ns)
        for file in sorted(folder.iterdir())
    }


@pytest.fixture
def writer(tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path / "ledger.sqlite")]
    found = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert found.stdout.readline() == "written\n"
    yield found
    found.kill()
    found.communicate()


@pytest.mark.parametrize("state", ["live", "killed", "killed without its index"])
def test_the_write_ahead_log_is_read_and_nothing_is_written(writer, tmp_path, state):
    if state != "live":
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    if state == "killed without its index":
        (tmp_path / "ledger.sqlite-shm").unlink()
    assert (tmp_path / "ledger.sqlite-wal").stat().st_size > 0
    before = trace(tmp_path)
    with LedgerView(tmp_path / "ledger.sqlite") as view:
        assert view.newest_ordinal() == 39
        assert view.group_counts().in_flight == 40
    assert trace(tmp_path) == before


def test_a_closed_ledger_is_read_without_a_lock(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.issue([GroupRecord(ordinal=0, task="sums", number=0, size=1, issued=0)])
    before = trace(tmp_path)
    assert set(before) == {"ledger.sqlite"}
    with LedgerView(tmp_path / "ledger.sqlite") as view:
        assert view.newest_ordinal() == 0
    assert trace(tmp_path) == before


@pytest.mark.parametrize("state", ["closed", "live"])
def test_a_read_only_folder_can_be_read(state):
    """Run as another user without write permission, because root could write anyway."""
    folder = Path(tempfile.mkdtemp())
    try:
        ledger = Ledger(folder / "ledger.sqlite")
        ledger.issue([GroupRecord(ordinal=0, task="sums", number=0, size=1, issued=0)])
        if state == "closed":
            ledger.close()
        folder.chmod(0o555)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if os.geteuid() == 0:
                    os.seteuid(65534)
                assert not os.access(folder, os.W_OK, effective_ids=True)
                with LedgerView(folder / "ledger.sqlite") as view:
                    code = 0 if view.newest_ordinal() == 0 else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        ledger.close()
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_a_view_cannot_write(tmp_path):
    Ledger(tmp_path / "ledger.sqlite").close()
    with LedgerView(tmp_path / "ledger.sqlite") as view, pytest.raises(Exception, match="readonly"):
        view.set_metadata("format", 9)


def test_a_file_that_is_not_a_ledger_is_reported(tmp_path):
    with pytest.raises(LedgerError, match="ledger not found"):
        LedgerView(tmp_path / "ledger.sqlite")
    (tmp_path / "ledger.sqlite").write_bytes(b"not a database, but long enough to look" * 90)
    with pytest.raises(LedgerError, match="not a database"):
        LedgerView(tmp_path / "ledger.sqlite")
    (tmp_path / "empty.sqlite").touch()
    with pytest.raises(LedgerError, match="not a ledger"):
        LedgerView(tmp_path / "empty.sqlite")


def test_groups_are_listed_by_status(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.issue(
            [
                GroupRecord(ordinal=i, task="ab"[i % 2], number=i // 2, size=1, issued=i)
                for i in range(6)
            ]
        )
        for ordinal in (0, 3, 4):
            ledger.end_group(ordinal, "finished")
        ledger.end_group(5, "failed", "broken")
        ledger.record_update(7, 8, [0, 3])
    with LedgerView(tmp_path / "ledger.sqlite") as view:
        found = {
            "all": view.list_groups(9),
            "some": view.list_groups(2, before=4),
            "b": view.list_groups(9, task="b"),
            "failed": view.list_groups(9, status="failed"),
            "update": view.list_groups(9, update=7),
            "both": view.list_groups(9, update=7, task="a"),
        }
        assert view.find_ordinal("b", 1) == 3
        assert view.find_ordinal("b", 9) is None
    assert {name: [entry.ordinal for entry in every] for name, every in found.items()} == {
        "all": [5, 4, 3, 2, 1, 0],
        "some": [3, 2],
        "b": [5, 3, 1],
        "failed": [5],
        "update": [3, 0],
        "both": [0],
    }


def test_rollouts_are_found_by_index_and_not_by_scan(tmp_path):
    """Rows of rollouts hold their tokens: a scan would read all of them."""
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.issue(
            [GroupRecord(ordinal=i, task="a", number=i, size=2, issued=0) for i in range(9)]
        )
        for ordinal in range(9):
            ledger.record_rollout(ordinal, 0, rollout(ordinal, 0, 1, 2))
    queries = []
    with LedgerView(tmp_path / "ledger.sqlite") as view:
        view._base.set_trace_callback(queries.append)
        assert [each.ordinal for each in view.rollout_summaries([2, 3, 7])] == [2, 3, 7]
        view.trajectories(3, 0)
        view._base.set_trace_callback(None)
        plans = [str(view._base.execute(f"EXPLAIN QUERY PLAN {q}").fetchall()) for q in queries]
    assert len(plans) == 3
    assert all("SEARCH attempts" in plan and "SCAN" not in plan for plan in plans)


def test_token_records_round_trip_and_are_dropped_with_their_tokens(tmp_path):
    row = TokenTrainRecord(
        update=4, log_ratio=(0.5, -1.0), advantage=(2.0, 2.0), kept=(True, False)
    )
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.record_token_stats({("s", 0): row})
        with LedgerView(tmp_path / "ledger.sqlite") as view:
            assert view.token_record("s", 0) == row
            assert view.token_record("s", 1) is None
        ledger.drop_tokens(5)
        with LedgerView(tmp_path / "ledger.sqlite") as view:
            assert view.token_record("s", 0) is None


def test_a_ledger_from_before_numbers_could_be_skipped_is_counted(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        ledger.issue([GroupRecord(ordinal=0, task="a", number=0, size=1, issued=0)])
        ledger._base.execute("DROP TABLE skipped")
    with LedgerView(path) as view:
        assert view.group_counts().is_consistent and view.group_counts().issued == 1


def test_skipped_numbers_are_not_issued(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        late = GroupRecord(ordinal=0, task="a", number=3, size=1, issued=2)
        ledger.issue([late], [("a", 0), ("a", 1), ("a", 2)])
        assert ledger.group_counts().is_consistent and ledger.group_counts().issued == 1
        ledger.rewind(0, whole=True)
        assert ledger._base.execute("SELECT COUNT(*) FROM skipped").fetchone() == (0,)
