"""Families of goals: scripts to repair, archives, repositories."""

from random import Random

from paddock.envs.terminal.subtasks_files import words
from paddock.envs.terminal.task import StateCheck, Subtask, TaskFile

# A script, the same with a fault, and what it should say: (right, faulty, (input -> output)).
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
_ABOUT = {
    "sum": "print the sum of the numbers it reads, one a line",
    "longest": "print the longest of the words it reads, one a line; of equal ones the first",
    "count": "print every word it reads with how often it came, sorted by word",
    "even": "print ten times each even number of those it reads, one a line",
}


def _case(chance: Random, kind: str) -> tuple[str, str]:
    """An input and what the right script says to it."""
    if kind in ("sum", "even"):
        numbers = [chance.randrange(1, 500) for _ in range(chance.randrange(4, 9))] + [12, 24]
        given = "".join(f"{n}\n" for n in numbers)
        even = "".join(f"{n * 10}\n" for n in numbers if n % 2 == 0)
        return given, f"{sum(numbers)}\n" if kind == "sum" else even
    found = [*words(chance, chance.randrange(4, 9)), "gnu"]
    if kind == "longest":
        return "".join(f"{w}\n" for w in found), f"{max(found, key=len)}\n"
    found += found[:3]
    counts = {w: found.count(w) for w in sorted(found)}
    return " ".join(found) + "\n", "".join(f"{w} {c}\n" for w, c in counts.items())


def repair(chance: Random, level: int, at: str) -> Subtask:
    """A script with as many faults as the level allows, graded on inputs that nobody was shown."""
    kind = chance.choice(sorted(_SCRIPTS))
    right, faults = _SCRIPTS[kind]
    chosen = chance.sample(faults, min(level, len(faults)))
    broken = right
    for good, bad in chosen:
        broken = broken.replace(good, bad, 1)
    name = f"{kind}.{'py' if 'python' in right else 'sh'}"
    shown, hidden = _case(chance, kind), [_case(chance, kind) for _ in range(3)]
    cases = [[[], given, said] for given, said in hidden]
    half = broken.replace(chosen[0][1], chosen[0][0], 1) if len(chosen) > 1 else broken
    write = f"cat > {at}/{name} <<'END'\n{{}}END\n"
    return Subtask(
        family="script",
        instruction=(
            f"{at}/{name} should {_ABOUT[kind]}, but it does not. Repair it. For the input "
            f"{at}/input.txt the right output is {at}/output.txt; it must hold for any such input."
        ),
        files=(
            TaskFile(path=f"{at}/{name}", text=broken, mode=0o755),
            TaskFile(path=f"{at}/input.txt", text=shown[0]),
            TaskFile(path=f"{at}/output.txt", text=shown[1]),
        ),
        expects=(
            StateCheck(how="runs", path=f"{at}/{name}", value=cases),
            StateCheck(how="mode", path=f"{at}/{name}", value=0o755),
        ),
        solution=write.replace("{}", right),
        wrong=(
            write.replace("{}", half),
            write.replace("{}", f"#!/bin/bash\ncat {at}/output.txt\n"),
        ),
    )


def archive(chance: Random, level: int, at: str) -> Subtask:
    """Archives opened, some files taken, one archive made."""
    names = words(chance, 4 + 2 * level)
    kept, others = names[: 1 + level], names[1 + level :]
    texts = {f"{n}.txt": f"{n} {chance.randrange(10**6)}\n" for n in kept}
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
        expects=(
            StateCheck(how="archive", path=f"{at}/new.tar.gz", value=texts),
            StateCheck(how="tree", path=at, value=["new.tar.gz"]),
        ),
        solution=f"{open_it} && {make} && rm {at}/old.tar.gz",
        wrong=(
            f"mv {at}/old.tar.gz {at}/new.tar.gz",
            f"{open_it} && {make}",
        ),
    )


def repository(chance: Random, level: int, at: str) -> Subtask:
    """A file that a commit deleted is brought back by another commit."""
    names = words(chance, 3 + level)
    lost = chance.choice(names)
    text = f"{lost} {chance.randrange(10**6)}\n"
    files = [
        TaskFile(
            path=f"{at}/{n}.txt", text=text if n == lost else f"{n} {chance.randrange(1000)}\n"
        )
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
        expects=(
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
