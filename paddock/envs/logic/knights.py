"""Knights, who tell the truth, and knaves, who lie: who is a knight?"""

from collections.abc import Callable
from itertools import product
from random import Random

from paddock.envs.datasets import QAExample
from paddock.envs.logic.clues import Clue, consistent_solutions

Kinds = tuple[bool, ...]  # per person, whether a knight

_NAMES = ("Anna", "Bert", "Cora", "Dina", "Egon", "Fern", "Gwen", "Hugo")


def generate_knights(rng: Random, level: int) -> QAExample:
    """`level` + 1 people, one statement each."""
    names = sorted(rng.sample(_NAMES, level + 1))
    everyone = list(product((True, False), repeat=len(names)))
    while True:
        clues = [_statement(rng, speaker, names) for speaker in range(len(names))]
        found = consistent_solutions(clues, everyone)
        if len(found) == 1:
            break
    statements = " ".join(clue.text for clue in clues)
    question = (
        f"On an island knights always tell the truth and knaves always lie. {statements} "
        "Who are the knights? Give their names with commas between them, or none."
    )
    near = [kinds for kinds in everyone if kinds != found[0]]
    return QAExample(
        question=question,
        answer=_join(names, found[0]),
        any_order=True,
        near=tuple(_join(names, kinds) for kinds in rng.sample(near, min(3, len(near)))),
    )


def _statement(rng: Random, speaker: int, names: list[str]) -> Clue[Kinds]:
    """Holds if and only if the speaker is a knight and the claim true, or neither."""
    text, claim = _claim(rng, speaker, names)

    def holds(kinds: Kinds) -> bool:
        return kinds[speaker] == claim(kinds)

    return Clue(f'{names[speaker]} says: "{text}"', holds)


def _claim(rng: Random, speaker: int, names: list[str]) -> tuple[str, Callable[[Kinds], bool]]:
    others = [at for at in range(len(names)) if at != speaker]
    a = rng.choice(others)
    b = rng.choice([at for at in others if at != a] or [speaker])
    second = "I" if b == speaker else names[b]
    verb = "am" if b == speaker else "is"
    wants = rng.random() < 0.5
    kind = "knight" if wants else "knave"
    match rng.choice(("one", "same", "count", "or", "if")):
        case "one":
            return f"{names[a]} is a {kind}.", lambda kinds: kinds[a] == wants
        case "same":
            word = "the same" if wants else "different"
            says = f"{names[a]} and {second} are of {word} kind{'' if wants else 's'}."
            return says, lambda kinds: (kinds[a] == kinds[b]) == wants
        case "count":
            number = rng.randint(1, len(names) - 1)
            are = "is a knight" if number == 1 else "are knights"
            return f"Exactly {number} of us {are}.", lambda kinds: sum(kinds) == number
        case "or":
            says = f"{names[a]} is a knight or {second} {verb} a {kind}."
            return says, lambda kinds: kinds[a] or kinds[b] == wants
        case _:
            says = f"If {names[a]} is a knight, then {second} {verb} a {kind}."
            return says, lambda kinds: not kinds[a] or kinds[b] == wants


def _join(names: list[str], kinds: Kinds) -> str:
    return ", ".join(n for n, knight in zip(names, kinds, strict=True) if knight) or "none"
