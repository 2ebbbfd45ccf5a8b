import random
import re
from itertools import permutations, product

import pytest

from paddock.envs import make
from paddock.envs.logic.clues import Clue, consistent_solutions, minimal_clues
from paddock.envs.logic.taskset import FAMILIES
from tests.envs.soundness import check_sound, check_tasks, pass_rate, scripted_reply


@pytest.mark.parametrize("family", FAMILIES)
def test_puzzles_are_sound(family):
    for level, count in ((1, 100), (3, 80), (4, 20)):
        taskset = make("logic", {"families": [family], "level": level})
        near = [
            lambda task, n=n, w=taskset: scripted_reply(w.example_of(task).near[n]) for n in (0, 1)
        ]
        check_sound(taskset, count, near)


def test_tasks_are_reproducible_distinct_and_split():
    check_tasks(lambda: make("logic", {"level": 3}), 200)


def knights_by_hand(text):
    """Every set of knights that the statements allow, parsed from the text."""
    names = re.findall(r"(\w+) says:", text)
    statements = re.findall(r'(\w+) says: "(.*?)"', text)
    allowed = []
    for kinds in product((True, False), repeat=len(names)):
        knight = dict(zip(names, kinds, strict=True))
        if all(knight[who] == claim_holds(what, knight, who) for who, what in statements):
            allowed.append({name for name in names if knight[name]})
    return allowed


def claim_holds(what, knight, speaker):
    def kind_of(name, kind):
        return knight[speaker if name == "I" else name] == (kind == "knight")

    if match := re.fullmatch(r"Exactly (\d) of us .*", what):
        return sum(knight.values()) == int(match[1])
    if match := re.fullmatch(r"(\w+) and (\w+) are of (the same|different) kinds?\.", what):
        alike = kind_of(match[1], "knight") == kind_of(match[2], "knight")
        return alike == (match[3] == "the same")
    if match := re.fullmatch(r"If (\w+) is a (\w+), then (\w+) (?:is|am) a (\w+)\.", what):
        return not kind_of(match[1], match[2]) or kind_of(match[3], match[4])
    if match := re.fullmatch(r"(\w+) is a (\w+) or (\w+) (?:is|am) a (\w+)\.", what):
        return kind_of(match[1], match[2]) or kind_of(match[3], match[4])
    match = re.fullmatch(r"(\w+) is a (\w+)\.", what)
    return kind_of(match[1], match[2])


def orders_by_hand(text):
    things = re.search(r"shelf: (.*?)\.", text)[1].split(", ")
    rules = {
        r"The (\w+) one is left of the (\w+) one\.": lambda gap: gap > 0,
        r"Between the (\w+) and the (\w+) one stands one book\.": lambda gap: abs(gap) == 2,
        r"The (\w+) and the (\w+) one are not neighbours\.": lambda gap: abs(gap) > 1,
    }
    constraints = [
        (*pair, rule) for pattern, rule in rules.items() for pair in re.findall(pattern, text)
    ]
    for a, b, between in re.findall(
        r"Between the (\w+) and the (\w+) one stand (\d) books\.", text
    ):
        constraints.append((a, b, lambda gap, n=int(between): abs(gap) == n + 1))
    placed = re.findall(r"Number (\d) is (\w+)\.", text)
    return [
        row
        for row in permutations(things)
        if all(rule(row.index(b) - row.index(a)) for a, b, rule in constraints)
        and all(row[int(place) - 1] == thing for place, thing in placed)
    ]


def streets_by_hand(text):
    kinds = re.search(r"one of these: (.*?)\. ", text)[1].split("; ")
    things = [kind.split(": ")[1].split(", ") for kind in kinds]
    thing = r"(?:[Tt]he )?(\w+)"
    rules = {
        rf"{thing} is directly left of {thing}\.": lambda gap: gap == 1,
        rf"{thing} is somewhere left of {thing}\.": lambda gap: gap > 0,
        rf"{thing} and {thing} belong to the same house\.": lambda gap: gap == 0,
        rf"{thing} and {thing} belong to different houses\.": lambda gap: gap != 0,
    }
    constraints = [
        (*pair, rule) for pattern, rule in rules.items() for pair in re.findall(pattern, text)
    ]
    placed = re.findall(rf"{thing} is in house (\d)\.", text)
    found = []
    for street in product(*(permutations(row) for row in things)):
        at = {thing: house for row in street for house, thing in enumerate(row)}
        if all(rule(at[b] - at[a]) for a, b, rule in constraints) and all(
            at[thing] == int(house) - 1 for thing, house in placed
        ):
            found.append(street)
    return found


@pytest.mark.parametrize("level", [1, 3, 4])
def test_a_puzzle_has_exactly_one_solution(level):
    """Solved from the text by code that is independent of the generator."""
    for family, count in (("knights", 60), ("ordering", 30), ("houses", 20 if level < 4 else 2)):
        taskset = make("logic", {"families": [family], "level": level})
        for index in range(count):
            problem = taskset.example_of(taskset.task(index))
            if family == "knights":
                (knights,) = knights_by_hand(problem.question)
                assert knights == {*problem.answer.split(", ")} - {"none"}
            elif family == "ordering":
                (row,) = orders_by_hand(problem.question)
                assert ", ".join(row) == problem.answer
            else:
                (street,) = streets_by_hand(problem.question)
                assert ", ".join(street[1] + street[0]) == problem.answer


def test_the_answer_of_a_circuit_is_its_output():
    gates = {
        "AND": lambda a, b: a & b,
        "OR": lambda a, b: a | b,
        "XOR": lambda a, b: a ^ b,
        "NAND": lambda a, b: 1 - (a & b),
        "NOR": lambda a, b: 1 - (a | b),
    }
    taskset = make("logic", {"families": ["circuit"], "level": 4})
    for index in range(60):
        problem = taskset.example_of(taskset.task(index))
        values = {n: int(v) for n, v in re.findall(r"(i\d) = (\d)", problem.question)}
        for gate, a, word, b in re.findall(r"(g\d+) = (\w+) ([A-Z]+) (\w+)", problem.question):
            values[gate] = gates[word](values[a], values[b])
        outputs = re.search(r"What are (.*?)\?", problem.question)[1].split(", ")
        assert problem.answer == ", ".join(str(values[gate]) for gate in outputs)


def guess(task):
    """A policy that knows the answer format and nothing else."""
    rng = random.Random(task.id)
    text = task.messages[0].content
    if "knights" in text:
        names = re.findall(r"(\w+) says:", text)
        return scripted_reply(", ".join(name for name in names if rng.random() < 0.5) or "none")
    if "shelf" in text:
        things = re.search(r"shelf: (.*?)\.", text)[1].split(", ")
        return scripted_reply(", ".join(rng.sample(things, len(things))))
    if "houses" in text:
        people, pets = (re.search(rf"{kind}: (.*?)[;.]", text)[1] for kind in ("people", "pets"))
        both = [rng.sample(w, len(w)) for w in (pets.split(", "), people.split(", "))]
        return scripted_reply(", ".join(both[0] + both[1]))
    count = len(re.search(r"What are (.*)\?", text)[1].split(","))
    return scripted_reply(", ".join(rng.choice("01") for _ in range(count)))


@pytest.mark.parametrize(
    ("family", "lowest"), [("knights", 0.15), ("ordering", 0.08), ("circuit", 0.15)]
)
def test_level_changes_the_pass_rate_of_guessing(family, lowest):
    rates = []
    for level in (1, 4):
        taskset = make("logic", {"families": [family], "level": level})
        rates.append(pass_rate(taskset, [taskset.task(n) for n in range(200)], guess))
    assert rates[0] > lowest > rates[1] * 2


def test_more_houses_are_harder_to_guess():
    tasksets = [make("logic", {"families": ["houses"], "level": level}) for level in (1, 3)]
    low, high = (pass_rate(w, [w.task(n) for n in range(300)], guess) for w in tasksets)
    assert low > high


def test_order_matters_for_sequences_and_not_for_sets():
    for family, reward in (("knights", 1.0), ("ordering", 0.0)):
        taskset = make("logic", {"families": [family], "level": 4})
        tasks = [t for t in map(taskset.task, range(40)) if "," in taskset.example_of(t).answer]
        assert tasks

        def backwards(task, taskset=taskset):
            return scripted_reply(" and ".join(taskset.example_of(task).answer.split(", ")[::-1]))

        assert pass_rate(taskset, tasks, backwards) == reward


def test_clues_are_kept_until_one_solution_is_left():
    clues = [Clue(f"not {n}", lambda s, n=n: s != n) for n in (9, 1, 1, 2, 3)]
    kept = minimal_clues(clues, [1, 2, 3])
    assert [clue.text for clue in kept] == ["not 1", "not 2"]
    assert consistent_solutions(kept, [1, 2, 3]) == [3]
    assert minimal_clues(clues[:2], [1, 2, 3]) is None
