"""Subtask families: scripts to repair, archives, git repositories."""

from random import Random

from paddock.envs.terminal.subtasks_files import words
from paddock.envs.terminal.task import StateCheck, Subtask, TaskFile

# Correct scripts; each comes with replacements that introduce a bug.
_SUM = """#!/bin/bash
total=0
while read -r number; do
  total=$((total + number))
done
echo "$total"
"""
_LONGEST = """#!/bin/bash
longest=""
while read -r word; do
  if [ ${#word} -gt ${#longest} ]; then
    longest=$word
  fi
done
echo "$longest"
"""
_COUNT = """#!/usr/bin/env python3
import sys

counts = {}
for word in sys.stdin.read().split():
    counts[word] = counts.get(word, 0) + 1
for word in sorted(counts):
    print(word, counts[word])
"""
_EVEN = """#!/usr/bin/env python3
import sys

for line in sys.stdin:
    number = int(line)
    if number % 2 == 0:
        print(number * 10)
"""
_SCRIPTS = {
    "sum": (_SUM, (("total + number", "total + 1"), ("total=0", "total=1"), ("-r number", "-r n"))),
    "longest": (_LONGEST, (("-gt", "-lt"), ('echo "$longest"', 'echo "$word"'))),
    "count": (_COUNT, (("+ 1", "+ 2"), ("sorted(counts)", "sorted(counts)[1:]"))),
    "even": (_EVEN, (("== 0", "== 1"), ("* 10", "* 11"), ("int(line)", "int(line[0])"))),
}
_DESCRIPTIONS = {
    "sum": "print the sum of the numbers it reads, one a line",
    "longest": "print the longest of the words it reads, one a line; of equal ones the first",
    "count": "print every word it reads with how often it came, sorted by word",
    "even": "print ten times each even number of those it reads, one a line",
}


def _case(rng: Random, kind: str) -> tuple[str, str]:
    """An input and the output of the correct script."""
    if kind in ("sum", "even"):
        numbers = [rng.randrange(1, 500) for _ in range(rng.randrange(4, 9))] + [12, 24]
        stdin = "".join(f"{n}\n" for n in numbers)
        even = "".join(f"{n * 10}\n" for n in numbers if n % 2 == 0)
        return stdin, f"{sum(numbers)}\n" if kind == "sum" else even
    chosen = [*words(rng, rng.randrange(4, 9)), "gnu"]
    if kind == "longest":
        return "".join(f"{w}\n" for w in chosen), f"{max(chosen, key=len)}\n"
    chosen += chosen[:3]
    counts = {w: chosen.count(w) for w in sorted(chosen)}
    return " ".join(chosen) + "\n", "".join(f"{w} {c}\n" for w, c in counts.items())


def repair(rng: Random, level: int, at: str) -> Subtask:
    """Repair a script with up to `level` bugs, tested on hidden inputs."""
    kind = rng.choice(sorted(_SCRIPTS))
    correct, bugs = _SCRIPTS[kind]
    chosen = rng.sample(bugs, min(level, len(bugs)))
    broken = correct
    for good, bad in chosen:
        broken = broken.replace(good, bad, 1)
    name = f"{kind}.{'py' if 'python' in correct else 'sh'}"
    shown, hidden = _case(rng, kind), [_case(rng, kind) for _ in range(3)]
    cases = [[[], stdin, stdout] for stdin, stdout in hidden]
    half = broken.replace(chosen[0][1], chosen[0][0], 1) if len(chosen) > 1 else broken
    write = f"cat > {at}/{name} <<'END'\n{{}}END\n"
    return Subtask(
        family="script",
        instruction=(
            f"{at}/{name} should {_DESCRIPTIONS[kind]}, but it does not. Repair it. For the input "
            f"{at}/input.txt the right output is {at}/output.txt; it must hold for any such input."
        ),
        files=(
            TaskFile(path=f"{at}/{name}", text=broken, mode=0o755),
            TaskFile(path=f"{at}/input.txt", text=shown[0]),
            TaskFile(path=f"{at}/output.txt", text=shown[1]),
        ),
        checks=(
            StateCheck(how="runs", path=f"{at}/{name}", value=cases),
            StateCheck(how="mode", path=f"{at}/{name}", value=0o755),
        ),
        solution=write.replace("{}", correct),
        wrong=(
            write.replace("{}", half),
            write.replace("{}", f"#!/bin/bash\ncat {at}/output.txt\n"),
        ),
    )


def archive(rng: Random, level: int, at: str) -> Subtask:
    """Repack some files of an archive into a new one."""
    names = words(rng, 4 + 2 * level)
    kept, others = names[: 1 + level], names[1 + level :]
    texts = {f"{n}.txt": f"{n} {rng.randrange(10**6)}\n" for n in kept}
    drop = {f"{n}.bak": f"{n}\n" for n in others}
    files = [TaskFile(path=f"{at}/in/{name}", text=text) for name, text in (texts | drop).items()]
    pack = f"(cd {at} && tar -czf old.tar.gz -C in . && rm -r in)"
    open_it = f"mkdir -p {at}/x && tar -xzf {at}/old.tar.gz -C {at}/x"
    make = f"(cd {at}/x && tar -czf ../new.tar.gz *.txt) && rm -r {at}/x"
    return Subtask(
        family="archive",
        instruction=(
            f"{at}/old.tar.gz holds .txt and .bak files. Make {at}/new.tar.gz with the .txt files "
            f"alone, without any folder in it, and delete old.tar.gz. Leave nothing else in {at}/."
        ),
        files=tuple(files),
        setup=pack,
        checks=(
            StateCheck(how="archive", path=f"{at}/new.tar.gz", value=texts),
            StateCheck(how="tree", path=at, value=["new.tar.gz"]),
        ),
        solution=f"{open_it} && {make} && rm {at}/old.tar.gz",
        wrong=(
            f"mv {at}/old.tar.gz {at}/new.tar.gz",
            f"{open_it} && {make}",
        ),
    )


def repository(rng: Random, level: int, at: str) -> Subtask:
    """Restore a file that an earlier commit deleted."""
    names = words(rng, 3 + level)
    lost = rng.choice(names)
    text = f"{lost} {rng.randrange(10**6)}\n"
    files = [
        TaskFile(path=f"{at}/{n}.txt", text=text if n == lost else f"{n} {rng.randrange(1000)}\n")
        for n in names
    ]
    me = "git -c user.name=a -c user.email=a@example.org"
    later = [f"more {i}" for i in range(level)]
    steps = "".join(
        f"echo {i} >> log.txt; git add log.txt; {me} commit -qm '{m}'\n"
        for i, m in enumerate(later)
    )
    setup = (
        f"(cd {at}\ngit init -q -b main .\ngit add -A\n{me} commit -qm first\n"
        f"git rm -q {lost}.txt\n{me} commit -qm cleanup\n{steps})"
    )
    subjects = ["restore", *reversed(later), "cleanup", "first"]
    back = f"cd {at} && git checkout -q main~{len(later) + 1} -- {lost}.txt"
    return Subtask(
        family="git",
        instruction=(
            f"In the git repository {at}/, an earlier commit deleted {lost}.txt. Bring the file "
            "back as it was and commit it on main with the message 'restore', keeping all commits."
        ),
        files=tuple(files),
        setup=setup,
        checks=(
            StateCheck(how="text", path=f"{at}/{lost}.txt", value=text),
            StateCheck(how="commits", path=at, value={"main": subjects}),
        ),
        solution=f"({back} && {me} commit -qm restore)",
        wrong=(
            f"({back})",
            f"(cd {at} && echo {lost} > {lost}.txt && git add -A && {me} commit -qm restore)",
            f"(cd {at} && git reset -q --hard main~{len(later) + 1})",
        ),
    )
