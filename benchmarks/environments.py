"""Environments: all generators and levels, the public files, the search index and the verifiers.

python -m benchmarks.environments [generators|gym|files|index|algebra]
"""

import argparse
import asyncio
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from benchmarks.table import Claim, print_claims, speedup
from paddock.envs import Policy, Taskset, make, run_rollout
from paddock.envs.qa import QATaskset
from paddock.envs.reasoning_gym import ReasoningGymSettings
from paddock.envs.search.bm25 import BM25Index, WebPage
from paddock.envs.search.knowledge_graph import generate_graph
from paddock.envs.search.pages import write_pages
from paddock.envs.worker_pool import WorkerPool
from paddock.records import Message, Task, Verdict

DATA = Path(__file__).parents[2] / "shared" / "data"
TASKS = 200


def rewards(
    taskset: Taskset, tasks: Sequence[Task], policy_of: Callable[[Task], Policy]
) -> list[float]:
    """Reward of each task under a policy; a failed rollout raises."""

    async def run_all() -> list[float]:
        limit = asyncio.Semaphore(2)

        async def rollout(task: Task) -> float:
            async with limit:
                outcome = (await run_rollout(taskset.make_env(task), policy_of(task))).outcome
            assert isinstance(outcome, Verdict), outcome
            return outcome.reward

        return await asyncio.gather(*map(rollout, tasks))

    return asyncio.run(run_all())


def silent(_task: Task) -> Policy:
    async def reply(messages: Sequence[Message], tools: Any) -> Message:  # noqa: ARG001
        return Message(role="assistant", content="")

    return reply


def count_sound(taskset: Any, tasks: Sequence[Task]) -> int:
    """Tasks whose solution passes and whose empty and near-miss answers fail."""
    solved, empty = (rewards(taskset, tasks, policy) for policy in (taskset.solver, silent))
    wrong = [0.0] * len(tasks)
    if isinstance(taskset, QATaskset) and all(taskset.example_of(task).near for task in tasks):
        wrong = rewards(
            taskset,
            tasks,
            lambda task: taskset.scripted_answer(taskset.example_of(task).near[-1]),
        )
    return sum(s == 1 and e < 1 and w < 1 for s, e, w in zip(solved, empty, wrong, strict=True))


def generators() -> list[Claim]:
    claims = []
    settings = [("level", range(1, 6), name) for name in ("math", "logic", "code", "service")]
    settings.append(("hops", range(2, 6), "search"))
    for key, values, name in settings:
        for value in values:
            more = {"num_entities": 2000, "num_questions": 1500} if name == "search" else {}
            taskset: Any = make(name, {key: value, **more})
            count = min(TASKS, taskset.size("train") or TASKS)
            passed = count_sound(taskset, [taskset.task(index) for index in range(count)])
            claims.append(
                Claim(
                    name=f"{name}, {key} {value}: sound tasks",
                    target=f"{count} of {count}",
                    measured=str(passed),
                    holds=passed == count,
                )
            )
    return claims


def gym() -> list[Claim]:
    """Every generator that needs no config: identical in two workers, solved by its own answer, not
    by an empty one. Not all generators give a solution."""
    import reasoning_gym.factory

    names = sorted(reasoning_gym.factory.DATASETS)
    workers = [
        WorkerPool("paddock.envs.reasoning_gym:run_reasoning_gym", preload=("reasoning_gym",))
        for _ in range(2)
    ]
    nondeterministic, unsound, unsolved, broken = [], [], [], []
    for name in names:
        calls = [("make", name, {}, seed) for seed in range(5)]
        try:
            made = [[w.call_blocking(*call, seconds=120) for call in calls] for w in workers]
            taskset = ReasoningGymSettings(dataset=name, scorer_timeout_s=120).make_taskset()
        except Exception as error:
            broken.append(f"{name} ({str(error)[-60:]})")
            continue
        if made[0] != made[1]:
            nondeterministic.append(name)
        tasks = [taskset.task(index) for index in range(5)]
        if not all(taskset.example_of(task).answer for task in tasks):
            unsolved.append(name)
        elif count_sound(taskset, tasks) < len(tasks):
            unsound.append(name)
    return [
        Claim(name="reasoning-gym: generators", measured=str(len(names))),
        Claim(name="... that need a config", measured=_listed(broken)),
        Claim(
            name="... that differ between two processes",
            target="none",
            measured=_listed(nondeterministic),
            holds=not nondeterministic,
        ),
        Claim(name="... whose own answer scores below 1", measured=_listed(unsound)),
        Claim(name="... without a known solution", measured=_listed(unsolved)),
    ]


def files() -> list[Claim]:
    """Every row of the public files: the solution passes, an empty answer fails."""
    layouts = [
        ("math-file", "gsm8k/test.jsonl.gz", {"answer_format": "number"}),
        ("math-file", "math/train.jsonl.gz", {}),
        ("code-file", "humaneval/HumanEval.jsonl.gz", {"test_timeout_s": 60.0}),
        ("code-file", "mbpp/sanitized-mbpp.json.gz", {"test_timeout_s": 60.0}),
    ]
    claims = []
    for kind, path, changes in layouts:
        if not (DATA / path).exists():
            claims.append(Claim(name=path, measured="not on this machine"))
            continue
        taskset: Any = make(kind, {"test_file": str(DATA / path), **changes})
        count = taskset.size("test")
        passed = count_sound(taskset, [taskset.task(index, "test") for index in range(count)])
        target = f"{count} of {count}"
        claims.append(Claim(name=path, target=target, measured=str(passed), holds=passed == count))
    return claims


def index() -> list[Claim]:
    """Our BM25 index against SQLite's full-text search on the same pages and queries."""
    rng = Random(0)
    graph = generate_graph(rng, 20_000)
    pages = write_pages(rng, graph)
    queries = [f"Who was born in {rng.choice(pages).title}?" for _ in range(200)]
    ours, theirs = BM25Index(), sqlite3.connect(":memory:")
    theirs.execute("create virtual table pages using fts5(id unindexed, title, text)")
    built = [_seconds(lambda: ours.add(pages)), _seconds(lambda: _fill(theirs, pages))]
    searched = [
        median(_seconds(lambda q=q: ours.search(q, 5)) for q in queries),
        median(_seconds(lambda q=q: _fts(theirs, q)) for q in queries),
    ]
    return [
        speedup(
            f"index {len(pages)} pages, against FTS5", built[0], built[1], min_ratio=None, unit="s"
        ),
        speedup(
            "search, against FTS5", 1e3 * searched[0], 1e3 * searched[1], min_ratio=None, unit="ms"
        ),
    ]


def _fill(base: sqlite3.Connection, pages: Sequence[WebPage]) -> None:
    rows = [(page.id, page.title, page.text) for page in pages]
    base.executemany("insert into pages values (?, ?, ?)", rows)


def _fts(base: sqlite3.Connection, query: str) -> list[Any]:
    words = " OR ".join(f'"{word}"' for word in query.strip("?").split())
    statement = "select id from pages where pages match ? order by bm25(pages) limit 5"
    return base.execute(statement, (words,)).fetchall()


def algebra() -> list[Claim]:
    """Overhead of the worker process: math-verify in it against math-verify in this process."""
    from paddock.envs.math.verifier import answers_equal, warm_up

    pairs = [(f"x^2+{2 * n}x+{n * n}", f"(x+{n})^2") for n in range(40)]
    workers = WorkerPool(
        "paddock.envs.math.verifier:answers_equal", preload=("paddock.envs.math.verifier:warm_up",)
    )
    warm_up()
    workers.call_blocking(*pairs[0], seconds=60)
    in_worker = median(_seconds(lambda p=p: workers.call_blocking(*p, seconds=60)) for p in pairs)
    in_process = median(_seconds(lambda p=p: answers_equal(*p)) for p in pairs)
    return [
        speedup(
            "one comparison, in a worker against in-process",
            1e3 * in_worker,
            1e3 * in_process,
            min_ratio=None,
            unit="ms",
        )
    ]


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)}: {', '.join(names)}" if names else "none"


SECTIONS = {
    "generators": generators,
    "gym": gym,
    "files": files,
    "index": index,
    "algebra": algebra,
}


def claims() -> list[Claim]:
    return [claim for section in SECTIONS.values() for claim in section()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("section", nargs="?", choices=[*SECTIONS], help="default: all")
    section = parser.parse_args().section
    print_claims(SECTIONS[section]() if section else claims())


if __name__ == "__main__":
    main()
