"""Families of goals: files, text, permissions, search, settings. More in `families_programs`.

Each takes chance, a level from 1 on and a folder of its own, and makes one goal. A higher level
means more of everything, never another kind of task.
"""

import json
from collections import Counter
from random import Random

from paddock.envs.terminal.task import StateCheck, Subtask, TaskFile

NAMES = (
    "amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven", "iris", "jade", "krill",
    "lotus", "maple", "nickel", "onyx", "pearl", "quartz", "raven", "slate", "tulip", "umber",
    "viola", "willow", "xenon", "yarrow", "zephyr",
)  # fmt: skip
SERVICES = ("auth", "billing", "cache", "mail", "proxy", "queue", "search", "store")
KINDS = ("csv", "log", "md", "tmp", "txt", "yml")


def words(chance: Random, count: int) -> list[str]:
    """Different words, as many as are asked for."""
    plain = chance.sample(NAMES, min(count, len(NAMES)))
    return plain + [f"{plain[i % len(plain)]}{i}" for i in range(count - len(plain))]


def sort_files(chance: Random, level: int, at: str) -> Subtask:
    """Files into folders by their endings; one ending is thrown away."""
    kinds = chance.sample(KINDS, min(2 + level // 2, len(KINDS)))
    thrown, kept = kinds[0], kinds[1:]
    made = [(name, chance.choice(kinds)) for name in words(chance, 3 + 2 * level)]
    made += [(f"last{i}", kind) for i, kind in enumerate(kinds)]  # each ending occurs
    files = [
        TaskFile(path=f"{at}/{n}.{k}", text=f"{n} {chance.randrange(1000)}\n") for n, k in made
    ]
    texts = {file.path: file.text for file in files}
    expects = [StateCheck(how="absent", path=f"{at}/{n}.{k}") for n, k in made]
    expects += [
        StateCheck(how="text", path=f"{at}/{k}/{n}.{k}", value=texts[f"{at}/{n}.{k}"])
        for n, k in made
        if k != thrown
    ]
    expects.append(
        StateCheck(how="tree", path=at, value=[f"{k}/{n}.{k}" for n, k in made if k != thrown])
    )
    moves = " && ".join(f"mkdir -p {k} && mv *.{k} {k}/" for k in kept)
    return Subtask(
        family="files",
        instruction=(
            f"In {at}/, move every file into a subfolder named like its ending (notes.md goes to "
            f"md/notes.md), and delete all files that end in .{thrown}."
        ),
        files=tuple(files),
        expects=tuple(expects),
        solution=f"(cd {at} && rm *.{thrown} && {moves})",
        wrong=(
            f"(cd {at} && {moves})",
            f"(cd {at} && rm *.{thrown} && {moves.replace('mv', 'cp')})",
        ),
    )


def table(chance: Random, level: int, at: str) -> Subtask:
    """A table: rows chosen by a limit, summed by name, sorted."""
    people = words(chance, 3 + level)
    rows = [(chance.choice(people), chance.randrange(1, 100)) for _ in range(8 + 8 * level)]
    least = chance.randrange(20, 60)
    rows += [(people[0], 1), (people[1], least)]  # the limit itself counts
    sums: Counter[str] = Counter()
    for name, amount in rows:
        sums[name] += amount if amount >= least else 0
    totals = "".join(f"{name},{total}\n" for name, total in sorted(sums.items()) if total)
    body = "name,amount\n" + "".join(f"{name},{amount}\n" for name, amount in rows)

    def summing(chosen: str) -> str:
        program = f'NR > 1 && {chosen} {{ s[$1] += $2 }} END {{ for (n in s) print n "," s[n] }}'
        return f"awk -F, '{program}' {at}/sales.csv | LC_ALL=C sort > {at}/totals.csv"

    return Subtask(
        family="text",
        instruction=(
            f"{at}/sales.csv has a header and rows name,amount. Write {at}/totals.csv without a "
            f"header: for each name the sum of its amounts that are at least {least}, as "
            "name,sum, sorted by name; names without such an amount are left out."
        ),
        files=(TaskFile(path=f"{at}/sales.csv", text=body),),
        expects=(
            StateCheck(how="text", path=f"{at}/totals.csv", value=totals),
            StateCheck(how="text", path=f"{at}/sales.csv", value=body),
        ),
        solution=summing(f"$2 >= {least}"),
        wrong=(summing(f"$2 > {least}"), f"cp {at}/sales.csv {at}/totals.csv"),
    )


def permissions(chance: Random, level: int, at: str) -> Subtask:
    """Modes: scripts can be run by their owner, secrets are read by nobody else."""
    names = words(chance, 4 + 2 * level)
    scripts, secrets = names[: 1 + level], names[1 + level : 2 + 2 * level]
    others = names[2 + 2 * level :]
    modes = (0o600, 0o640, 0o644, 0o664, 0o666, 0o755)
    files = [
        TaskFile(path=f"{at}/{n}.sh", text="#!/bin/sh\necho ok\n", mode=0o644) for n in scripts
    ]
    files += [
        TaskFile(path=f"{at}/{n}.key", text=f"{n}\n", mode=chance.choice(modes[2:]))
        for n in secrets
    ]
    files += [
        TaskFile(path=f"{at}/{n}.txt", text=f"{n}\n", mode=chance.choice(modes)) for n in others
    ]
    wanted = {".sh": 0o750, ".key": 0o400}
    expects = [
        StateCheck(
            how="mode",
            path=file.path,
            value=wanted.get(file.path[file.path.rindex(".") :], file.mode),
        )
        for file in files
    ]
    return Subtask(
        family="permissions",
        instruction=(
            f"In {at}/, let the owner read, write and run all .sh files, the group read and run "
            "them, others nothing. Let the owner read all .key files and nobody do anything else "
            "with them. Leave all other files as they are."
        ),
        files=tuple(files),
        expects=tuple(expects),
        solution=f"chmod 750 {at}/*.sh && chmod 400 {at}/*.key",
        wrong=(
            f"chmod 755 {at}/*.sh && chmod 400 {at}/*.key",
            f"chmod 750 {at}/* && chmod 400 {at}/*.key",
        ),
    )


def logs(chance: Random, level: int, at: str) -> Subtask:
    """Which service failed most, and how often each did."""
    services = chance.sample(SERVICES, min(2 + level, len(SERVICES)))
    rows, errors = [], Counter(dict.fromkeys(services, 0))
    for i in range(20 + 30 * level):
        service = chance.choice(services)
        grade = chance.choice(("INFO", "INFO", "WARN", "ERROR"))
        errors[service] += grade == "ERROR"
        text = chance.choice(("done", "retry after ERROR page", "took 30 ms", "user gone"))
        rows.append(f"2026-01-{1 + i % 28:02} 10:{i % 60:02} {grade} {service} {text}")
    counted = sorted(((n, c) for n, c in errors.items() if c), key=lambda r: (-r[1], r[0]))
    files = [
        TaskFile(path=f"{at}/part{k}.log", text="".join(f"{r}\n" for r in rows[k::3]))
        for k in range(3)
    ]
    count = "{ print $4 }' " + f"{at}/part*.log | sort | uniq -c | sort -k1,1nr -k2,2"
    shape = "awk '{ print $2, $1 }'"
    return Subtask(
        family="logs",
        instruction=(
            f"The files {at}/part*.log have lines: date, time, grade, service, text. Write "
            f"{at}/errors.txt with a line 'service count' for each service that has lines of grade "
            "ERROR, the most first, equal counts by name."
        ),
        files=tuple(files),
        expects=(
            StateCheck(
                how="text", path=f"{at}/errors.txt", value="".join(f"{n} {c}\n" for n, c in counted)
            ),
        ),
        solution=f'awk \'$3 == "ERROR" {count} | {shape} > {at}/errors.txt',
        wrong=(
            f"awk '/ERROR/ {count} | {shape} > {at}/errors.txt; echo >> {at}/errors.txt; "
            f"echo none 0 >> {at}/errors.txt",
            f'awk \'$3 == "WARN" {count} | {shape} > {at}/errors.txt; echo x 0 >> {at}/errors.txt',
        ),
    )


def find_word(chance: Random, level: int, at: str) -> Subtask:
    """The one file below a folder that has a word of its own, and a link to it."""
    names = words(chance, 6 + 4 * level)
    word = f"token-{chance.randrange(10**6, 10**7)}"
    files = []
    for i, name in enumerate(names):
        deep = "/".join(chance.choice(NAMES) for _ in range(1 + i % (1 + level)))
        near = word[:-1] + chance.choice([d for d in "0123456789" if d != word[-1]])
        files.append(TaskFile(path=f"{at}/tree/{deep}/{name}{i}.txt", text=f"{name}\n{near}\n"))
    place = chance.randrange(len(files))
    hit = TaskFile(path=files[place].path, text=f"{names[place]}\nthis is {word}.\n")
    files[place] = hit
    inner = hit.path.removeprefix(f"{at}/")
    search = f"grep -rlF {word} {at}/tree"
    return Subtask(
        family="search",
        instruction=(
            f"One file below {at}/tree holds the word {word}. Write its path, as seen from {at}/, "
            f"into {at}/found.txt, and make {at}/shortcut a symbolic link to it."
        ),
        files=tuple(files),
        expects=(
            StateCheck(how="text", path=f"{at}/found.txt", value=f"{inner}\n"),
            StateCheck(how="link", path=f"{at}/shortcut", value=hit.path),
        ),
        solution=(
            f'(cd {at} && grep -rlF {word} tree > found.txt && ln -s "$(cat found.txt)" shortcut)'
        ),
        wrong=(
            f"{search} > {at}/found.txt; cp $({search}) {at}/shortcut",
            f"(cd {at} && grep -rlF {word[:-1]} tree > found.txt; ln -s tree shortcut)",
        ),
    )


def settings(chance: Random, level: int, at: str) -> Subtask:
    """Values of a JSON file changed, the rest kept."""
    sections = words(chance, 2 + level)
    whole = {
        name: {"port": chance.randrange(1000, 9000), "on": chance.random() < 0.5, "tags": [name]}
        for name in sections
    }
    first = chance.randrange(10_000, 20_000)
    ports = {name: first + i for i, name in enumerate(chance.sample(sections, 1 + level // 2))}
    after = {
        name: {**value, "port": ports[name], "on": True} if name in ports else value
        for name, value in whole.items()
    }
    load = "json.load(open('app.json'))"
    show = f"#!/usr/bin/env python3\nimport json\nprint(json.dumps({load}, sort_keys=True))\n"

    def editing(on: str) -> str:
        read = f"import json; p='{at}/app.json'; w=json.load(open(p))"
        edits = "; ".join(f"w['{n}'].update(port={port}, on={on})" for n, port in ports.items())
        return f"python3 -c \"{read}; {edits}; json.dump(w, open(p, 'w'), indent=2)\""

    return Subtask(
        family="settings",
        instruction=(
            f'In {at}/app.json, set these ports and turn these sections on ("on": true): '
            f"{', '.join(f'{name} {port}' for name, port in ports.items())}. Change nothing else; "
            f"{at}/show prints the file in one line."
        ),
        files=(
            TaskFile(path=f"{at}/app.json", text=json.dumps(whole, indent=2) + "\n"),
            TaskFile(path=f"{at}/show", text=show, mode=0o755),
        ),
        expects=(
            StateCheck(how="text", path=f"{at}/show", value=show),
            # In one spelling, so that the order of keys does not count.
            StateCheck(
                how="runs", path=f"{at}/show", value=[[[], "", json.dumps(after, sort_keys=True)]]
            ),
        ),
        solution=editing("True"),
        wrong=(editing("None"), f"echo '{{}}' > {at}/app.json"),
    )
