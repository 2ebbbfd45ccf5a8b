import json
from dataclasses import asdict
from pathlib import Path
from random import Random

import pytest

from paddock.envs import make
from paddock.envs.terminal import sandboxed_checks
from paddock.envs.terminal.generate import FAMILIES, available_families, generate_task
from paddock.sandbox import ResourceLimits
from tests.sandbox.sandboxes import BWRAP, MIB, in_sandbox

BATCH = Path(__file__).with_name("batch_inside.py")
LIMITS = ResourceLimits(
    memory_bytes=512 * MIB, disk_bytes=256 * MIB, cpu_seconds=600, max_output_bytes=1 << 20
)
bwrap = pytest.mark.parametrize("backend", BWRAP)


def tried(tasks, tries):
    """The outcome of each try at each task; a try is a list of commands."""
    rows = [
        {
            "files": [asdict(file) for file in each.files],
            "setup": each.setup,
            "checks": [asdict(check) for check in each.checks],
            "tries": tries(each),
        }
        for each in tasks
    ]

    async def work(box):
        await box.put(Path(sandboxed_checks.__file__), "sandboxed_checks.py")
        await box.put(BATCH, "batch_inside.py")
        await box.put(json.dumps(rows).encode(), "tasks.json")
        return await box.exec([*box.python, "batch_inside.py", "tasks.json"], timeout_s=300)

    done = in_sandbox(work, limits=LIMITS)
    assert done.code == 0, done.stderr
    return json.loads(done.stdout)


def every_way(each):
    return [list(each.solution), [], *map(list, each.wrong_solutions)]


@bwrap
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_sound_on_every_level(backend, family):
    if family not in available_families():
        pytest.skip(f"needs the program {family}")
    tasks = [generate_task(Random(f"{family}/{i}"), 1 + i, (family,)) for i in range(3)]
    for each, (solved, *others) in zip(tasks, tried(tasks, every_way), strict=True):
        assert solved, each
        assert not any(others), (each, others)


@pytest.mark.slow
@bwrap
def test_two_hundred_tasks_are_sound(backend):
    tasks = [
        generate_task(Random(f"sound/{i}"), 1 + i % 2, available_families()) for i in range(200)
    ]
    for each, (solved, *others) in zip(tasks, tried(tasks, every_way), strict=True):
        assert solved, each
        assert not any(others), (each, others)


@bwrap
def test_a_higher_level_is_harder_for_a_policy_that_stops_early(backend):
    """The policy stops after two commands."""
    rates = []
    quick = ("files", "permissions", "search")
    for level in (1, 2, 3, 4):
        tasks = [generate_task(Random(f"hasty/{level}/{i}"), level, quick) for i in range(4)]
        outcomes = tried(tasks, lambda each: [list(each.solution[:2])])
        rates.append(sum(held for (held,) in outcomes) / len(outcomes))
    assert rates == [1.0, 1.0, 0.0, 0.0]


def test_the_same_seed_makes_the_same_tasks_and_another_seed_others():
    tasksets = [make("terminal", {"seed": seed}) for seed in (0, 0, 1)]
    tasks = [[taskset.task(i) for i in range(12)] for taskset in tasksets]
    assert tasks[0] == tasks[1]
    assert len({task.messages for task in tasks[0]}) == 12
    assert not {t.messages for t in tasks[0]} & {t.messages for t in tasks[2]}


def test_no_task_of_one_split_is_a_task_of_the_other():
    taskset = make("terminal", {"levels": [1]})
    train, test = ({taskset.task(i, s).messages for i in range(40)} for s in ("train", "test"))
    assert not train & test


def test_every_family_occurs():
    taskset = make("terminal", {"levels": [2]})
    seen = {
        subtask.family for i in range(60) for subtask in taskset.generated_task(i, "train").subtasks
    }
    assert seen == set(available_families())


def test_levels_and_families_are_checked():
    with pytest.raises(ValueError, match=r"families must be of files, .* got 'fils'"):
        make("terminal", {"families": ["fils"]})
    with pytest.raises(ValueError, match="numbers from 1"):
        make("terminal", {"levels": [0]})
