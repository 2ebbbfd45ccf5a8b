"""Subtask families: files, text, permissions, logs, search, settings.

Each function takes a random generator, a level from 1 and a directory, and generates one subtask. A
higher level means more of everything, never another kind of subtask.
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


def words(rng: Random, count: int) -> list[str]:
    """`count` different words."""
    plain = rng.sample(NAMES, min(count, len(NAMES)))
    return plain + [f"{plain[i % len(plain)]}{i}" for i in range(count - len(plain))]


def sort_files(rng: Random, level: int, at: str) -> Subtask:
    """Sort files into directories by extension and delete one extension."""
    kinds = rng.sample(KINDS, min(2 + level // 2, len(KINDS)))
    deleted, kept = kinds[0], kinds[1:]
    made = [(name, rng.choice(kinds)) for name in words(rng, 3 + 2 * level)]
    made += [(f"last{i}", kind) for i, kind in enumerate(kinds)]  # every extension occurs
    files = [TaskFile(path=f"{at}/{n}.{k}", text=f"{n} {rng.randrange(1000)}\n") for n, k in made]
    texts = {file.path: file.text for file in files}
    checks = [StateCheck(how="absent", path=f"{at}/{n}.{k}") for n, k in made]
    checks += [
        StateCheck(how="text", path=f"{at}/{k}/{n}.{k}", value=texts[f"{at}/{n}.{k}"])
        for n, k in made
        if k != deleted
    ]
    checks.append(
        StateCheck(how="tree", path=at, value=[f"{k}/{n}.{k}" for n, k in made if k != deleted])
    )
    moves = " && ".join(f"mkdir -p {k} && mv *.{k} {k}/" for k in kept)
    return Subtask(
        family="files",
        instruction=(
            f"In {at}/, move every file into a subfolder named like its ending (notes.md goes to "
            f"md/notes.md), and delete all files that end in .{deleted}."
        ),
        files=tuple(files),
        checks=tuple(checks),
        solution=f"(cd {at} && rm *.{deleted} && {moves})",
        wrong=(
            f"(cd {at} && {moves})",
            f"(cd {at} && rm *.{deleted} && {moves.replace('mv', 'cp')})",
        ),
    )


def table(rng: Random, level: int, at: str) -> Subtask:
    """Aggregate a CSV file: filter rows by a limit, sum by name, sort."""
    people = words(rng, 3 + level)
    rows = [(rng.choice(people), rng.randrange(1, 100)) for _ in range(8 + 8 * level)]
    limit = rng.randrange(20, 60)
    rows += [(people[0], 1), (people[1], limit)]  # the limit is inclusive
    sums: Counter[str] = Counter()
    for name, amount in rows:
        sums[name] += amount if amount >= limit else 0
    totals = "".join(f"{name},{total}\n" for name, total in sorted(sums.items()) if total)
    body = "name,amount\n" + "".join(f"{name},{amount}\n" for name, amount in rows)

    def sum_command(condition: str) -> str:
        program = f'NR > 1 && {condition} {{ s[$1] += $2 }} END {{ for (n in s) print n "," s[n] }}'
        return f"awk -F, '{program}' {at}/sales.csv | LC_ALL=C sort > {at}/totals.csv"

    return Subtask(
        family="text",
        instruction=(
            f"{at}/sales.csv has a header and rows name,amount. Write {at}/totals.csv without a "
            f"header: for each name the sum of its amounts that are at least {limit}, as "
            "name,sum, sorted by name; names without such an amount are left out."
        ),
        files=(TaskFile(path=f"{at}/sales.csv", text=body),),
        checks=(
            StateCheck(how="text", path=f"{at}/totals.csv", value=totals),
            StateCheck(how="text", path=f"{at}/sales.csv", value=body),
        ),
        solution=sum_command(f"$2 >= {limit}"),
        wrong=(sum_command(f"$2 > {limit}"), f"cp {at}/sales.csv {at}/totals.csv"),
    )


def permissions(rng: Random, level: int, at: str) -> Subtask:
    """Set file modes: scripts executable by owner and group, keys readable by the owner only."""
    names = words(rng, 4 + 2 * level)
    scripts, secrets = names[: 1 + level], names[1 + level : 2 + 2 * level]
    others = names[2 + 2 * level :]
    modes = (0o600, 0o640, 0o644, 0o664, 0o666, 0o755)
    files = [
        TaskFile(path=f"{at}/{n}.sh", text="#!/bin/sh\necho ok\n", mode=0o644) for n in scripts
    ]
    files += [
        TaskFile(path=f"{at}/{n}.key", text=f"{n}\n", mode=rng.choice(modes[2:])) for n in secrets
    ]
    files += [TaskFile(path=f"{at}/{n}.txt", text=f"{n}\n", mode=rng.choice(modes)) for n in others]
    modes_by_suffix = {".sh": 0o750, ".key": 0o400}
    checks = [
        StateCheck(
            how="mode",
            path=file.path,
            value=modes_by_suffix.get(file.path[file.path.rindex(".") :], file.mode),
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
        checks=tuple(checks),
        solution=f"chmod 750 {at}/*.sh && chmod 400 {at}/*.key",
        wrong=(
            f"chmod 755 {at}/*.sh && chmod 400 {at}/*.key",
            f"chmod 750 {at}/* && chmod 400 {at}/*.key",
        ),
    )


def logs(rng: Random, level: int, at: str) -> Subtask:
    """Count errors per service in log files."""
    services = rng.sample(SERVICES, min(2 + level, len(SERVICES)))
    rows, errors = [], Counter(dict.fromkeys(services, 0))
    for i in range(20 + 30 * level):
        service = rng.choice(services)
        grade = rng.choice(("INFO", "INFO", "WARN", "ERROR"))
        errors[service] += grade == "ERROR"
        text = rng.choice(("done", "retry after ERROR page", "took 30 ms", "user gone"))
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
        checks=(
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


def find_word(rng: Random, level: int, at: str) -> Subtask:
    """Find the only file that contains a word and make a link to it."""
    names = words(rng, 6 + 4 * level)
    word = f"token-{rng.randrange(10**6, 10**7)}"
    files = []
    for i, name in enumerate(names):
        deep = "/".join(rng.choice(NAMES) for _ in range(1 + i % (1 + level)))
        near = word[:-1] + rng.choice([d for d in "0123456789" if d != word[-1]])
        files.append(TaskFile(path=f"{at}/tree/{deep}/{name}{i}.txt", text=f"{name}\n{near}\n"))
    position = rng.randrange(len(files))
    hit = TaskFile(path=files[position].path, text=f"{names[position]}\nthis is {word}.\n")
    files[position] = hit
    inner = hit.path.removeprefix(f"{at}/")
    search = f"grep -rlF {word} {at}/tree"
    return Subtask(
        family="search",
        instruction=(
            f"One file below {at}/tree holds the word {word}. Write its path, as seen from {at}/, "
            f"into {at}/found.txt, and make {at}/shortcut a symbolic link to it."
        ),
        files=tuple(files),
        checks=(
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


def settings(rng: Random, level: int, at: str) -> Subtask:
    """Change values of a JSON file and keep the rest."""
    sections = words(rng, 2 + level)
    config = {
        name: {"port": rng.randrange(1000, 9000), "on": rng.random() < 0.5, "tags": [name]}
        for name in sections
    }
    first = rng.randrange(10_000, 20_000)
    ports = {name: first + i for i, name in enumerate(rng.sample(sections, 1 + level // 2))}
    after = {
        name: {**value, "port": ports[name], "on": True} if name in ports else value
        for name, value in config.items()
    }
    load = "json.load(open('app.json'))"
    show = f"#!/usr/bin/env python3\nimport json\nprint(json.dumps({load}, sort_keys=True))\n"

    def edit_command(on: str) -> str:
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
            TaskFile(path=f"{at}/app.json", text=json.dumps(config, indent=2) + "\n"),
            TaskFile(path=f"{at}/show", text=show, mode=0o755),
        ),
        checks=(
            StateCheck(how="text", path=f"{at}/show", value=show),
            # Normalised, so that the order of keys does not matter.
            StateCheck(
                how="runs", path=f"{at}/show", value=[[[], "", json.dumps(after, sort_keys=True)]]
            ),
        ),
        solution=edit_command("True"),
        wrong=(edit_command("None"), f"echo '{{}}' > {at}/app.json"),
    )
