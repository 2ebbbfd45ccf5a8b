"""The closed language of the nano models: vocabulary, sums, keys, and the held-out rule.

Words and signs are separated by spaces. Pre-training text (data/reasoning.py) and the environments
use the same language, so that the environments can ask for what pre-training taught.
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
    """Whether a problem belongs to the eighth that is never trained on.

    >>> sum(is_held_out(f"oak {digit}") for digit in range(10))
    1
    """
    return crc32(signature.encode()) % 8 == 0


def generate_chain(rng: Random, *, steps: int) -> tuple[str, str, int]:
    """The prompt, the worked steps and the last digit.

    >>> generate_chain(Random(1), steps=2)
    ('Take 2 , first add 5 , second add 8', 'first 2 add 5 is 7 , second 7 add 8 is 5', 5)
    """
    value = rng.randint(0, 9)
    prompt, worked = [f"Take {value}"], []
    for ordinal in ORDINALS[:steps]:
        name, operand = rng.choice([*OPERATIONS]), rng.randint(1, 9)
        after = OPERATIONS[name](value, operand)
        prompt.append(f"{ordinal} {name} {operand}")
        worked.append(f"{ordinal} {value} {name} {operand} is {after}")
        value = after
    return " , ".join(prompt), " , ".join(worked), value


def generate_entry(rng: Random, name: str, *, held_out: bool = False) -> str:
    """A random value for a key: a reference to another key, or a digit."""
    while True:
        value = f"see {rng.choice(KEYS)}" if rng.random() < 0.5 else f"{rng.randint(0, 9)}"
        if is_held_out(f"{name} {value}") == held_out:
            return value
