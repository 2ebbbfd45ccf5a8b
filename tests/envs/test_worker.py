import asyncio
import gc
import os
import time
from pathlib import Path

import pytest

from paddock.envs.worker import WorkerError, Workers, jail_works

HERE = "tests.envs.test_worker"
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


def refuse(why):
    raise KeyError(why)


def write_outside():
    with open(__file__, "a"):
        return "written"


def ask(workers, *values, seconds=20, apart=False):
    return asyncio.run(workers.call(*values, seconds=seconds, apart=apart))


@pytest.fixture
def workers():
    made = []

    def make(name, **options):
        made.append(Workers(f"{HERE}:{name}", **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_call_returns_from_any_loop_and_without_one(workers):
    echoes = workers("echo")
    assert ask(echoes, 1, "é\n", None) == [1, "é\n", None]
    assert ask(echoes, [2]) == [[2]]
    assert echoes.call_now("x" * 300_000, seconds=20) == ["x" * 300_000]


def test_what_a_library_prints_is_no_answer(workers):
    assert ask(workers("noisy"), 5) == 5


def test_a_call_apart_does_not_reach_the_next(workers):
    remembering = workers("remember")
    assert ask(remembering, 1) == [1]
    assert ask(remembering, 2, apart=True) == [1, 2]
    assert ask(remembering, 3) == [1, 3]


def test_texts_hash_the_same_in_every_worker(workers):
    assert ask(workers("hash_of"), "oak") == ask(workers("hash_of"), "oak")


@pytest.mark.parametrize(
    ("name", "error", "said", "apart"),
    [
        ("hang", TimeoutError, "hang took over 0.3 s", False),
        ("hang", TimeoutError, "hang took over 0.3 s", True),
        ("die", WorkerError, "its process died", False),
        ("die", WorkerError, "its process died", True),
        ("eat", WorkerError, "MemoryError", False),
        ("refuse", WorkerError, "KeyError: 'no'", False),
    ],
)
def test_what_goes_wrong_is_told_and_the_next_call_works(workers, name, error, said, apart):
    broken = workers(name)
    arguments = ("no",) if name == "refuse" else ()
    seconds = 0.3 if name == "hang" else 20
    for _ in range(2):
        with pytest.raises(error, match=said):
            ask(broken, *arguments, seconds=seconds, apart=apart)


def test_a_function_that_is_not_there_is_told(workers):
    with pytest.raises(WorkerError, match="has no attribute 'nothing'"):
        ask(workers("nothing"))


def test_calls_run_side_by_side_up_to_the_count(workers):
    async def both():
        two = workers("echo", count=2)
        return await asyncio.gather(*(two.call(n, seconds=20) for n in range(6)))

    assert asyncio.run(both()) == [[n] for n in range(6)]


def children():
    lists = [thread.read_text() for thread in Path("/proc/self/task").glob("*/children")]
    return {child for each in lists for child in each.split()}


def test_a_process_that_takes_too_long_is_gone(workers):
    before = children()
    with pytest.raises(TimeoutError):
        ask(workers("hang"), seconds=0.2)
    assert children() <= before


def test_processes_end_with_their_workers():
    before = children()
    workers = Workers(f"{HERE}:echo")
    workers.call_now(1, seconds=20)
    assert len(children() - before) == 1
    del workers
    gc.collect()
    assert children() <= before


@pytest.mark.skipif(not jail_works(), reason="bubblewrap does not work here: apt-get install it")
def test_a_jailed_worker_cannot_write(workers):
    with pytest.raises(WorkerError, match="Read-only file system"):
        ask(workers("write_outside"))
