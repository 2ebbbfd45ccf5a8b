"""Slow proofs of the worlds: every generator at every level, public files whole, the index and the
checkers against their floors.

    python -m benchmarks.worlds [generators|gym|files|index|algebra]
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

from benchmarks.table import Claim, print_claims, times_better
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
    world: Taskset, tasks: Sequence[Task], player_of: Callable[[Task], Policy]
) -> list[float]:
    """What players get for tasks; a failure ends the proof."""

    async def all_of_them() -> list[float]:
        gate = asyncio.Semaphore(2)

        async def attempt(task: Task) -> float:
            async with gate:
                outcome = (await run_rollout(world.make_env(task), player_of(task))).outcome
            assert isinstance(outcome, Verdict), outcome
            return outcome.reward

        return await asyncio.gather(*map(attempt, tasks))

    return asyncio.run(all_of_them())


def silent(_task: Task) -> Policy:
    async def say(messages: Sequence[Message], tools: Any) -> Message:  # noqa: ARG001
        return Message(role="assistant", content="")

    return say


def sound(world: Any, tasks: Sequence[Task]) -> int:
    """Of how many tasks the solution passes and silence and a near answer fail."""
    solved, empty = (rewards(world, tasks, player) for player in (world.solver, silent))
    wrong = [0.0] * len(tasks)
    if isinstance(world, QATaskset) and all(world.example_of(task).near for task in tasks):
        wrong = rewards(
            world, tasks, lambda task: world.scripted_answer(world.example_of(task).near[-1])
        )
    return sum(s == 1 and e < 1 and w < 1 for s, e, w in zip(solved, empty, wrong, strict=True))


def generators() -> list[Claim]:
    claims = []
    settings = [("level", range(1, 6), name) for name in ("math", "logic", "code", "service")]
    settings.append(("hops", range(2, 6), "search"))
    for knob, values, name in settings:
        for value in values:
            more = {"entities": 2000, "questions": 1500} if name == "search" else {}
            world: Any = make(name, {knob: value, **more})
            count = min(TASKS, world.size("train") or TASKS)
            held = sound(world, [world.task(index) for index in range(count)])
            claims.append(
                Claim(
                    name=f"{name}, {knob} {value}: sound tasks",
                    target=f"{count} of {count}",
                    measured=str(held),
                    holds=held == count,
                )
            )
    return claims


def gym() -> list[Claim]:
    """Every generator that needs no settings: made alike by two workers, solved by its own answer,
    not by silence; a solution is not known of all."""
    import reasoning_gym.factory

    names = sorted(reasoning_gym.factory.DATASETS)
    workers = [
        WorkerPool("paddock.envs.reasoning_gym:work", preload="reasoning_gym") for _ in range(2)
    ]
    unlike, unsound, unsolved, broken = [], [], [], []
    for name in names:
        calls = [("make", name, {}, seed) for seed in range(5)]
        try:
            made = [[w.call_blocking(*call, seconds=120) for call in calls] for w in workers]
            world = ReasoningGymSettings(dataset=name, scorer_timeout_s=120).make_taskset()
        except Exception as error:
            broken.append(f"{name} ({str(error)[-60:]})")
            continue
        if made[0] != made[1]:
            unlike.append(name)
        tasks = [world.task(index) for index in range(5)]
        if not all(world.example_of(task).answer for task in tasks):
            unsolved.append(name)
        elif sound(world, tasks) < len(tasks):
            unsound.append(name)
    return [
        Claim(name="reasoning-gym: generators", measured=str(len(names))),
        Claim(name="... that need settings of their own", measured=_listed(broken)),
        Claim(
            name="... not made alike by two processes",
            target="none",
            measured=_listed(unlike),
            holds=not unlike,
        ),
        Claim(name="... whose own answer scores below 1", measured=_listed(unsound)),
        Claim(name="... without a known solution", measured=_listed(unsolved)),
    ]


def files() -> list[Claim]:
    """Every row of the public files: the solution passes, silence fails."""
    layouts = [
        ("math-file", "gsm8k/test.jsonl.gz", {"form": "number"}),
        ("math-file", "math/train.jsonl.gz", {}),
        ("code-file", "humaneval/HumanEval.jsonl.gz", {"test_seconds": 60.0}),
        ("code-file", "mbpp/sanitized-mbpp.json.gz", {"test_seconds": 60.0}),
    ]
    claims = []
    for kind, path, changes in layouts:
        if not (DATA / path).exists():
            claims.append(Claim(name=path, measured="not on this machine"))
            continue
        world: Any = make(kind, {"test": str(DATA / path), **changes})
        count = world.size("test")
        held = sound(world, [world.task(index, "test") for index in range(count)])
        target = f"{count} of {count}"
        claims.append(Claim(name=path, target=target, measured=str(held), holds=held == count))
    return claims


def index() -> list[Claim]:
    """Our index against SQLite's full-text search: the same pages, the same questions."""
    rng = Random(0)
    graph = generate_graph(rng, 20_000)
    pages = write_pages(rng, graph)
    queries = [f"Who was born in {rng.choice(pages).title}?" for _ in range(200)]
    ours, theirs = BM25Index(), sqlite3.connect(":memory:")
    theirs.execute("create virtual table pages using fts5(id unindexed, title, text)")
    built = [_seconds(lambda: ours.add(pages)), _seconds(lambda: _fill(theirs, pages))]
    asked = [
        median(_seconds(lambda q=q: ours.search(q, 5)) for q in queries),
        median(_seconds(lambda q=q: _fts(theirs, q)) for q in queries),
    ]
    return [
        times_better(
            f"index {len(pages)} pages, against FTS5", built[0], built[1], least=None, unit="s"
        ),
        times_better(
            "search them, against FTS5", 1e3 * asked[0], 1e3 * asked[1], least=None, unit="ms"
        ),
    ]


def _fill(base: sqlite3.Connection, pages: Sequence[WebPage]) -> None:
    rows = [(page.id, page.title, page.text) for page in pages]
    base.executemany("insert into pages values (?, ?, ?)", rows)


def _fts(base: sqlite3.Connection, query: str) -> list[Any]:
    words = " OR ".join(f'"{word}"' for word in query.strip("?").split())
    asked = "select id from pages where pages match ? order by bm25(pages) limit 5"
    return base.execute(asked, (words,)).fetchall()


def algebra() -> list[Claim]:
    """What the worker costs: math-verify behind it against math-verify in this process."""
    from paddock.envs.math.verifier import answers_equal, warm_up

    pairs = [(f"x^2+{2 * n}x+{n * n}", f"(x+{n})^2") for n in range(40)]
    workers = WorkerPool(
        "paddock.envs.math.verifier:equal", preload="paddock.envs.math.verifier:warm"
    )
    warm_up()
    workers.call_blocking(*pairs[0], seconds=60)
    behind = median(_seconds(lambda p=p: workers.call_blocking(*p, seconds=60)) for p in pairs)
    here = median(_seconds(lambda p=p: answers_equal(*p)) for p in pairs)
    return [
        times_better(
            "a comparison, here against behind a worker",
            1e3 * behind,
            1e3 * here,
            least=None,
            unit="ms",
        )
    ]


def _seconds(act: Callable[[], Any]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)}: {', '.join(names)}" if names else "none"


PROOFS = {
    "generators": generators,
    "gym": gym,
    "files": files,
    "index": index,
    "algebra": algebra,
}


def claims() -> list[Claim]:
    return [claim for proof in PROOFS.values() for claim in proof()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("proof", nargs="?", choices=[*PROOFS], help="default: every proof")
    asked = parser.parse_args().proof
    print_claims(PROOFS[asked]() if asked else claims())


if __name__ == "__main__":
    main()
