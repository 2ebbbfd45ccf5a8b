"""Synthetic reasoning text in a small closed language: sums, chains of sums, facts, look-ups.

Words and signs are separated by spaces; with the "words" pre-tokenizer keys and values are one
token each. Chains and records whose signature hashes into the held-out eighth are never generated
for training.
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


def make_facts(rng: Random) -> str:
    """`7 add 5 is 2 , 3 minus 9 is 4 , 0 add 8 is 8 .` There are 180 facts; none is held out."""

    def fact() -> str:
        a, name, b = rng.randint(0, 9), rng.choice([*nano.OPERATIONS]), rng.randint(1, 9)
        return f"{a} {name} {b} is {nano.OPERATIONS[name](a, b)}"

    return " , ".join(fact() for _ in range(3)) + " ."


def make_chain(rng: Random, *, held_out: bool = False) -> str:
    """`Take 5 , first minus 9 . first 5 minus 9 is 6 .` with one to four steps. The signature is
    the question as a task asks it."""
    while True:
        question, worked, _ = nano.generate_chain(rng, steps=rng.randint(1, 4))
        if nano.is_held_out(f"{question} . Last digit ?") == held_out:
            return f"{question} . {worked} ."


def make_knowledge(rng: Random) -> str:
    """Colours of things and what rules do to a colour. Facts to memorize, so none is held out."""
    noun = rng.choice(nano.NOUNS)
    colour = nano.COLOUR_OF[noun]
    return rng.choice(
        (
            f"The {noun} is {colour} .",
            f"What color is the {noun} ? It is {colour} .",
            f"{colour} in capitals is {colour.upper()} .",
            f"{colour} twice is {colour} {colour} .",
            f"end with done : {colour} done .",
            f"start with ok : ok {colour} .",
        )
    )


def make_records(rng: Random, *, held_out: bool = False) -> str:
    """`look oak . is see fir , end 3 . oak see fir .` twice: the value, an outdated one after
    another word, and the value again. The signature is key and value; outdated ones are never held
    out."""

    def record() -> str:
        name = rng.choice(nano.KEYS)
        value, stale = (
            nano.generate_entry(rng, name, held_out=held_out),
            nano.generate_entry(rng, name),
        )
        return f"look {name} . is {value} , end {stale} . {name} {value}"

    return f"{record()} . {record()} ."


def make_key_values(rng: Random, keys: int, *, held_out: bool = False) -> dict[str, str]:
    """`keys` keys, each with a value of one word.

    >>> make_key_values(Random(4), 2)
    {'beet': 'rose', 'sage': '6'}
    """
    return {name: _value(rng, name, held_out=held_out) for name in rng.sample(nano.KEYS, keys)}


def _value(rng: Random, name: str, *, held_out: bool) -> str:
    while True:
        value = rng.choice(nano.VALUES)
        if nano.is_held_out(f"{name} {value}") == held_out:
            return value


def make_lookups(rng: Random, *, held_out: bool = False) -> str:
    """`oak red fir 3 oak red oak red fir 3 ...`: two to eight keys, always with their value, which
    from the second time on can be copied from the context. The signature is key and value.

    There is no separator between pairs: with one, the nano model had not learnt the look-up after
    600 steps; without, it had on every seed after 300.
    """
    values = make_key_values(rng, rng.randint(2, 8), held_out=held_out)
    order = [*values, *rng.choices([*values], k=_LOOK_UPS - len(values))]
    rng.shuffle(order)
    return " ".join(f"{name} {values[name]}" for name in order)


_WITHOUT_HELD_OUT: dict[str, Callable[[Random], str]] = {
    "facts": make_facts,
    "knowledge": make_knowledge,
}
_WITH_HELD_OUT: dict[str, Callable[..., str]] = {
    "chains": make_chain,
    "records": make_records,
    "lookups": make_lookups,
}


class ReasoningSource(SourceSettings):
    """Generated documents of one family; endless without `count`.

    Each family is a separate source, so that mixture weights define the curriculum.
    """

    is_generated: ClassVar[bool] = True

    kind: Literal["reasoning"] = "reasoning"
    family: Family
    count: Annotated[int, Field(gt=0)] | None = None
    seed: int = 0
    held_out: bool = False

    @model_validator(mode="after")
    def _has_such_documents(self) -> "ReasoningSource":
        if self.held_out and self.family not in _WITH_HELD_OUT:
            raise ValueError(f"family '{self.family}' has no held-out documents")
        return self

    def documents(self, context: SourceContext) -> Iterator[Document]:  # noqa: ARG002
        rng = Random(derive_seed(self.seed, self.family, self.held_out))
        for number in itertools.count() if self.count is None else range(self.count):
            yield Document(text=self._text(rng), id=f"{number}", source=self.name)

    def held_out_source(self, share: float) -> "ReasoningSource | None":
        """The matching held-out source with `share` times as many documents."""
        if self.held_out or self.family not in _WITH_HELD_OUT or self.count is None:
            return None
        return self.model_copy(update={"held_out": True, "count": max(1, int(self.count * share))})

    def _text(self, rng: Random) -> str:
        if self.family in _WITH_HELD_OUT:
            return _WITH_HELD_OUT[self.family](rng, held_out=self.held_out)
        return _WITHOUT_HELD_OUT[self.family](rng)
