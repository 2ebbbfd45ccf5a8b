"""The small closed language of the laptop story: its words, its sums, its keys, and the rule that
holds an eighth of all problems out of training.

Words and signs stand apart. Pre-training text (data/reasoning.py) and the worlds here speak it, so
that what one teaches the other can ask.
"""

from collections.abc import Callable
from random import Random
from zlib import crc32


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ORDINALS = ("first", "second", "third", "fourth")
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: (a + b) % 10,
    "minus": lambda a, b: (a - b) % 10,
}
KEYS = _words(
    "oak elm ash fig yew ivy fir bay hop rye oat nut pea yam leek beet kale mint dill sage corn "
    "bean plum lime palm pine moss fern reed lily iris weed root seed stem bud pod husk cone "
    "vine"
)
COLOURS = _words("red blue green black white brown pink gray")
NOUNS = _words(
    "fox sky leaf crow snow bear rose wolf brick sea frog coal milk bark lips fog cat hat bus cup "
    "door lamp boat coin desk kite shoe bell drum pear sock tent"
)
VALUES = (*NOUNS, *COLOURS, *map(str, range(10)))
COLOUR_OF = {noun: COLOURS[(i * 5 + i // 8) % 8] for i, noun in enumerate(NOUNS)}


def is_held_out(signature: str) -> bool:
    """Whether a problem belongs to the eighth of all problems that training never sees.

    >>> sum(is_held_out(f"oak {digit}") for digit in range(10))
    1
    """
    return crc32(signature.encode()) % 8 == 0


def generate_chain(chance: Random, *, steps: int) -> tuple[str, str, int]:
    """What to take, how it is worked out, and the last digit.

    >>> generate_chain(Random(1), steps=2)
    ('Take 2 , first add 5 , second add 8', 'first 2 add 5 is 7 , second 7 add 8 is 5', 5)
    """
    value = chance.randint(0, 9)
    asked, worked = [f"Take {value}"], []
    for ordinal in ORDINALS[:steps]:
        name, operand = chance.choice([*OPERATIONS]), chance.randint(1, 9)
        after = OPERATIONS[name](value, operand)
        asked.append(f"{ordinal} {name} {operand}")
        worked.append(f"{ordinal} {value} {name} {operand} is {after}")
        value = after
    return " , ".join(asked), " , ".join(worked), value


def generate_entry(chance: Random, name: str, *, held_out: bool = False) -> str:
    """A value that a key may have: another key to see, or a digit."""
    while True:
        value = f"see {chance.choice(KEYS)}" if chance.random() < 0.5 else f"{chance.randint(0, 9)}"
        if is_held_out(f"{name} {value}") == held_out:
            return value
