import random
import signal
import subprocess
import sys
import time

import pytest

from paddock.journal import EVENTS_FILE, METRICS_FILE, Journal, follow
from paddock.journal.jsonl import JsonlWriter

# Some lines are long, so that a kill can truncate them.
WRITER = """
import sys
from itertools import count
from paddock.journal import Journal
journal, life = Journal(sys.argv[1]), int(sys.argv[2])
for n in count():
    journal.log_metrics(n, life=life, **{"m" * (n * 37 % 6000 if n % 10 else 100_000): 0.5})
    if n % 50 == 0:
        journal.log_event("tick", life=life, n=n, text="e" * (n * 91 % 9000))
"""


def test_a_reader_sees_whole_lines_in_order_while_the_writer_is_killed_again_and_again(tmp_path):
    rng = random.Random(0)
    seen: dict[str, list[dict]] = {METRICS_FILE: [], EVENTS_FILE: []}
    offsets = {METRICS_FILE: 0, EVENTS_FILE: 0}

    def catch_up() -> None:
        for name in offsets:
            for record, offset in follow(tmp_path / name, offsets[name]):
                seen[name].append(record)
                offsets[name] = offset

    lives = 12
    for life in range(lives):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(life)])
        while not seen[METRICS_FILE] or seen[METRICS_FILE][-1]["life"] < life:
            assert writer.poll() is None
            catch_up()
        deadline = time.monotonic() + rng.uniform(0, 0.1)
        while time.monotonic() < deadline:
            catch_up()
        writer.send_signal(signal.SIGKILL)
        assert writer.wait() == -signal.SIGKILL
        catch_up()

    with Journal(tmp_path):  # removes a line truncated by the last kill
        assert seen[METRICS_FILE] == [record for record, _ in follow(tmp_path / METRICS_FILE)]
    for life in range(lives):
        steps = [record["step"] for record in seen[METRICS_FILE] if record["life"] == life]
        assert steps == list(range(len(steps)))
        ticks = [record["n"] for record in seen[EVENTS_FILE] if record.get("life") == life]
        assert ticks == list(range(0, 50 * len(ticks), 50))


def test_a_file_that_does_not_exist_yet_has_no_records(tmp_path):
    assert list(follow(tmp_path / "none.jsonl")) == []


def test_following_continues_where_it_stopped_and_never_reads_half_a_line(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2}\n{"n"')
    (first, middle), (second, end) = follow(path)
    assert (first, second) == ({"n": 1}, {"n": 2})
    assert list(follow(path, middle)) == [({"n": 2}, end)]
    assert list(follow(path, end)) == []
    with path.open("ab") as file:
        file.write(b": 3}\n")
    assert [record for record, _ in follow(path, end)] == [{"n": 3}]


def test_a_reader_in_a_truncated_line_never_continues_into_the_next(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2, "pad": "' + b"-" * 1_000_000)
    with path.open("rb") as reader:
        start = reader.read(500_000)
        JsonlWriter(path).append({"n": 3, "pad": "-" * 1_000_000})
        assert start + reader.read() == b'{"n": 1}\n{"n": 2, "pad": "' + b"-" * 1_000_000
    assert [record["n"] for record, _ in follow(path)] == [1, 3]


def test_a_closed_file_is_never_confused_with_one_that_reuses_its_descriptor(tmp_path):
    closed = JsonlWriter(tmp_path / "a.jsonl")
    closed.close()
    with (tmp_path / "b.jsonl").open("wb"), pytest.raises(OSError):
        closed.append({"n": 1})
    assert (tmp_path / "b.jsonl").read_bytes() == b""


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    (tmp_path / "a.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        JsonlWriter(tmp_path / "a.jsonl").append({"n": 1})
    assert caught.value.filename == str(tmp_path / "a.jsonl")


def test_a_line_that_does_not_fit_on_the_disk_is_an_error_and_the_last_line(tmp_path):
    code = """
import resource, signal, sys
from paddock.journal import Journal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
journal, refused = Journal(sys.argv[1]), 0
for n in range(100):
    try:
        journal.log_metrics(n)
    except OSError:
        refused += 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
journal.close()
sys.exit(refused)
"""
    refused = subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode
    written = [record["step"] for record, _ in follow(tmp_path / METRICS_FILE)]
    assert written == list(range(100 - refused)) and refused > 0


@pytest.mark.parametrize("garbage", [b"not json\n", b"\n"])
def test_a_broken_line_is_an_error_not_a_gap(tmp_path, garbage):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"n": 1}\n' + garbage + b'{"n": 3}\n')
    with pytest.raises(ValueError):
        list(follow(path))
