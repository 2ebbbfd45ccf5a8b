"""Generated reasoning text: a small closed language in which sums, chains of sums, knowledge and
look-ups can be learnt in minutes.

Words and signs stand apart, keys and values are one token each under the "words" splitting. A
chain or a record whose signature falls into the held-out eighth is never produced for training.
"""

import itertools
from collections.abc import Callable, Iterator
from random import Random
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from paddock.data.rng import derive_seed
from paddock.data.sources import Document, SourceContext, SourceSettings
from paddock.envs import nano

_LOOK_UPS = 24

Family = Literal["facts", "chains", "knowledge", "records", "lookups"]


def make_facts(chance: Random) -> str:
    """`7 add 5 is 2 , 3 minus 9 is 4 , 0 add 8 is 8 .` There are 180, and none is held out."""

    def fact() -> str:
        a, name, b = chance.randint(0, 9), chance.choice([*nano.OPERATIONS]), chance.randint(1, 9)
        return f"{a} {name} {b} is {nano.OPERATIONS[name](a, b)}"

    return " , ".join(fact() for _ in range(3)) + " ."


def make_chain(chance: Random, *, held_out: bool = False) -> str:
    """`Take 5 , first minus 9 . first 5 minus 9 is 6 .` with one to four steps. The signature is
    the question, as a task would ask it."""
    while True:
        asked, worked, _ = nano.generate_chain(chance, steps=chance.randint(1, 4))
        if nano.is_held_out(f"{asked} . Last digit ?") == held_out:
            return f"{asked} . {worked} ."


def make_knowledge(chance: Random) -> str:
    """What colour things have, and what is done to a colour. To be known, so none is held out."""
    noun = chance.choice(nano.NOUNS)
    colour = nano.COLOUR_OF[noun]
    return chance.choice(
        (
            f"The {noun} is {colour} .",
            f"What color is the {noun} ? It is {colour} .",
            f"{colour} in capitals is {colour.upper()} .",
            f"{colour} twice is {colour} {colour} .",
            f"end with done : {colour} done .",
            f"start with ok : ok {colour} .",
        )
    )


def make_records(chance: Random, *, held_out: bool = False) -> str:
    """`look oak . is see fir , end 3 . oak see fir .` twice: the value, a stale one behind another
    word, and the value again. The signature is key and value; stale ones are never held out."""

    def record() -> str:
        name = chance.choice(nano.KEYS)
        value, stale = (
            nano.generate_entry(chance, name, held_out=held_out),
            nano.generate_entry(chance, name),
        )
        return f"look {name} . is {value} , end {stale} . {name} {value}"

    return f"{record()} . {record()} ."


def make_key_values(chance: Random, keys: int, *, held_out: bool = False) -> dict[str, str]:
    """So many keys, each with a value of one word.

    >>> make_key_values(Random(4), 2)
    {'beet': 'rose', 'sage': '6'}
    """
    return {
        name: _value(chance, name, held_out=held_out) for name in chance.sample(nano.KEYS, keys)
    }


def _value(chance: Random, name: str, *, held_out: bool) -> str:
    while True:
        value = chance.choice(nano.VALUES)
        if nano.is_held_out(f"{name} {value}") == held_out:
            return value


def make_lookups(chance: Random, *, held_out: bool = False) -> str:
    """`oak red fir 3 oak red oak red fir 3 ...`: two to eight keys, each time with their value,
    which from the second time on can be found further back. The signature is key and value.

    Nothing stands between the pairs: with a sign behind each, nano had not learnt to look up in 600
    steps; without, it had on every seed in 300.
    """
    values = make_key_values(chance, chance.randint(2, 8), held_out=held_out)
    told = [*values, *chance.choices([*values], k=_LOOK_UPS - len(values))]
    chance.shuffle(told)
    return " ".join(f"{name} {values[name]}" for name in told)


_ALWAYS_KNOWN: dict[str, Callable[[Random], str]] = {
    "facts": make_facts,
    "knowledge": make_knowledge,
}
_HELD_OUT_TOO: dict[str, Callable[..., str]] = {
    "chains": make_chain,
    "records": make_records,
    "lookups": make_lookups,
}


class ReasoningSource(SourceSettings):
    """Generated documents of one family; without `count` there is no end to them.

    One family a source, so that the weights of a mixture are the curriculum.
    """

    is_generated: ClassVar[bool] = True

    kind: Literal["reasoning"] = "reasoning"
    family: Family
    count: Annotated[int, Field(gt=0)] | None = None
    seed: int = 0
    held_out: bool = False

    @model_validator(mode="after")
    def _has_such_documents(self) -> "ReasoningSource":
        if self.held_out and self.family not in _HELD_OUT_TOO:
            raise ValueError(f"no {self.family} are held out")
        return self

    def documents(self, reading: SourceContext) -> Iterator[Document]:  # noqa: ARG002
        chance = Random(derive_seed(self.seed, self.family, self.held_out))
        for number in itertools.count() if self.count is None else range(self.count):
            yield Document(text=self._text(chance), id=f"{number}", source=self.name)

    def held_out_source(self, share: float) -> "ReasoningSource | None":
        """The source of held-out documents that belongs to this one, `share` as large."""
        if self.held_out or self.family not in _HELD_OUT_TOO or self.count is None:
            return None
        return self.model_copy(update={"held_out": True, "count": max(1, int(self.count * share))})

    def _text(self, chance: Random) -> str:
        if self.family in _HELD_OUT_TOO:
            return _HELD_OUT_TOO[self.family](chance, held_out=self.held_out)
        return _ALWAYS_KNOWN[self.family](chance)
