import asyncio
import contextlib
import gc
import os
import signal
import time
from pathlib import Path

import pytest

from paddock.envs.worker_pool import WorkerError, WorkerPool, can_isolate

HERE = "tests.envs.test_worker_pool"
seen = []


def echo(*values):
    return list(values)


def remember(value):
    seen.append(value)
    return seen


def hash_of(text):
    return hash(text)


def noisy(value):
    os.write(1, b"not an answer\n")
    return value


def hang():
    time.sleep(1000)


def die():
    os._exit(3)


def eat():
    return len(bytearray(64 << 30))


def leave():
    raise SystemExit(0)


def refuse(why):
    raise KeyError(why)


def write_outside():
    with open(__file__, "a"):
        return "written"


def spin():
    while True:
        pass


def wait_or_echo(what, path):
    """Waits until another call has written its file."""
    while what == "wait" and not os.path.exists(path):
        time.sleep(0.01)
    return what


def call_worker(workers, *values, seconds=20):
    return asyncio.run(workers.call(*values, seconds=seconds))


@pytest.fixture
def workers():
    made = []

    def make(name, **options):
        made.append(WorkerPool(f"{HERE}:{name}", **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_call_works_in_any_event_loop_and_without_one(workers):
    echoes = workers("echo")
    assert call_worker(echoes, 1, "é\n", None) == [1, "é\n", None]
    assert call_worker(echoes, [2]) == [[2]]
    assert echoes.call_blocking("x" * 300_000, seconds=20) == ["x" * 300_000]


def test_printed_text_is_not_a_result(workers):
    assert call_worker(workers("noisy"), 5) == 5


def test_a_call_does_not_affect_the_next(workers):
    remembering = workers("remember")
    assert call_worker(remembering, 1) == [1]
    assert call_worker(remembering, 2) == [2]


def test_strings_hash_the_same_in_every_worker(workers):
    assert call_worker(workers("hash_of"), "oak") == call_worker(workers("hash_of"), "oak")


@pytest.mark.parametrize(
    ("name", "message", "seconds"),
    [
        ("spin", "over 0.2 s, or out of memory", 0.2),
        ("hang", "over 0.1 s, or out of memory", 0.1),
        ("die", "its process died", 20),
        ("eat", "MemoryError", 20),
        ("refuse", "KeyError: 'no'", 20),
        ("leave", "SystemExit", 20),
    ],
)
def test_an_error_is_reported_and_the_next_call_works(workers, name, message, seconds):
    broken = workers(name)
    arguments = ("no",) if name == "refuse" else ()
    for _ in range(2):
        with pytest.raises(WorkerError, match=message):
            call_worker(broken, *arguments, seconds=seconds)


def test_calls_do_not_queue_behind_hanging_ones(workers, tmp_path):
    """More hanging calls than slots: the last call is still answered."""
    mark = tmp_path / "mark"

    async def call_all():
        one = workers("wait_or_echo", count=1)
        hanging = [asyncio.ensure_future(one.call("wait", str(mark), seconds=60)) for _ in range(2)]
        assert await one.call("echo", str(mark), seconds=60) == "echo"
        assert not any(each.done() for each in hanging)
        mark.touch()
        return await asyncio.gather(*hanging)

    assert asyncio.run(call_all()) == ["wait", "wait"]


def test_a_lost_worker_is_replaced_and_the_call_retried(workers):
    echoes = workers("echo")
    assert call_worker(echoes, 1) == [1]
    (lost,) = echoes._running
    os.killpg(lost._child.pid, signal.SIGKILL)
    lost._child.wait()
    assert call_worker(echoes, 2) == [2]


def judge(answer):
    if answer == "explodes":
        raise OverflowError(answer)
    return answer


@pytest.mark.parametrize(
    ("answer", "control", "found"), [("right", "fine", "right"), ("explodes", "fine", None)]
)
def test_an_answer_that_crashes_the_grader_is_distinguished_from_a_broken_grader(
    workers, answer, control, found
):
    judging = workers("judge")
    assert asyncio.run(judging.call_with_control(answer, control=(control,), seconds=20)) == found
    with pytest.raises(WorkerError, match="OverflowError"):
        asyncio.run(judging.call_with_control("explodes", control=("explodes",), seconds=20))


def test_a_missing_function_is_reported(workers):
    with pytest.raises(WorkerError, match="has no attribute 'nothing'"):
        call_worker(workers("nothing"))


def test_calls_run_concurrently_up_to_the_number_of_workers(workers):
    async def both():
        two = workers("echo", count=2)
        return await asyncio.gather(*(two.call(n, seconds=20) for n in range(6)))

    assert asyncio.run(both()) == [[n] for n in range(6)]


def children():
    lists = [thread.read_text() for thread in Path("/proc/self/task").glob("*/children")]
    return {child for each in lists for child in each.split()}


def test_a_process_that_times_out_is_killed(workers):
    spinning = workers("spin")
    with pytest.raises(WorkerError):
        call_worker(spinning, seconds=0.2)
    (worker,) = spinning._running
    for _ in range(6000):  # the pipe closes a moment before the process ends
        if len(family(worker._child.pid)) <= 3:
            break
        time.sleep(0.01)
    assert len(family(worker._child.pid)) <= 3, "the worker, and what jails it"


def family(pid):
    pids = {pid}
    for path in sorted(Path("/proc").glob("[0-9]*/stat"), key=lambda path: int(path.parts[2])):
        with contextlib.suppress(OSError):
            parent = path.read_text().rpartition(")")[2].split()[1]
            pids |= {int(path.parts[2])} if int(parent) in pids else set()
    return pids


def test_processes_end_with_their_pool():
    before = children()
    workers = WorkerPool(f"{HERE}:echo")
    workers.call_blocking(1, seconds=20)
    assert len(children() - before) == 1
    del workers
    gc.collect()
    assert children() <= before


@pytest.mark.skipif(not can_isolate(), reason="bubblewrap does not work here: apt-get install it")
def test_an_isolated_worker_cannot_write(workers):
    with pytest.raises(WorkerError, match="Read-only file system"):
        call_worker(workers("write_outside"))
