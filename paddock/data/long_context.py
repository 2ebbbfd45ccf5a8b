"""Long documents that cannot be read without looking back, each with a question and its answers, so
that the same generators serve training and evaluation.

needles      sentences hidden in other text: one, several keys, or several values of one key
repeats      a conversation that asks for the same things again and again; say one of the answers
interleaved  similar texts in alternating parts; say one of the parts
repository   related files one after another; say which of them holds a line
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice
from random import Random
from typing import Annotated, ClassVar, Literal
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from paddock.config import RequiredFile
from paddock.data.reasoning import ReasoningSource
from paddock.data.rng import derive_seed
from paddock.data.sources import DataError, Document, FileSource, SourceContext, SourceSettings
from paddock.envs import nano

_WORDS_A_CHUNK = 48
_FEATURES = 1024
CountTokens = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class NeedleTemplate:
    """How needles are said and asked for."""

    needle: str
    question: str
    values: Sequence[object]  # that a key may have
    separator: str  # between parts of a document


NEEDLE_TEMPLATES = {
    "plain": NeedleTemplate(
        "The number of {key} is {value}.",
        "What is the number of {keys}?",
        range(100_000, 1_000_000),
        "\n",
    ),
    # As in generated look-ups, so that a model raised on those alone understands it.
    "nano": NeedleTemplate("{key} {value} .", "{keys}", nano.VALUES, " "),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LongContextExample:
    text: str
    question: str
    answers: tuple[str, ...]
    separator: str = "\n"

    def to_text(self) -> str:
        """What a model trains on."""
        return (
            f"{self.text}{self.separator}{self.question}{self.separator}{' , '.join(self.answers)}"
        )

    def score(self, reply: str) -> float:
        """The share of answers that the reply holds.

        >>> LongContextExample(text="", question="", answers=("12", "90")).metrics("It is 12, I think.")
        0.5
        """
        return sum(answer in reply for answer in self.answers) / len(self.answers)


class Haystack:
    """Texts to make long documents of."""

    def __init__(self, documents: Sequence[Document], count_tokens: CountTokens) -> None:
        if not documents:
            raise DataError("there is no material for long documents")
        self.documents = documents
        self.count_tokens = count_tokens
        self._count_part = lru_cache(maxsize=100_000)(count_tokens)

    def chunks(self, chance: Random) -> Iterator[str]:
        """Bits of text without end, consecutive from some document on."""
        at = chance.randrange(len(self.documents))
        while True:
            yield from split_into_chunks(self.documents[at].text)
            at = (at + 1) % len(self.documents)

    def separator_tokens(self, gap: str) -> int:
        """What a gap between parts costs: a line break is a token, but a space is often part of
        the word behind it."""
        return max(0, self._count_part(f"a{gap}a") - 2 * self._count_part("a"))

    def take_fitting(self, parts: Iterable[str], tokens: int, *, gap: str = "\n") -> list[str]:
        """As many parts as fit into `tokens`, counting what stands between them."""
        found, between = [], self.separator_tokens(gap)
        for part in parts:
            tokens -= self._count_part(part) + between
            if tokens < 0:
                break
            found.append(part)
        return found

    def join_to_fit(
        self, parts: Sequence[str], tokens: int, *, gap: str, keep: Sequence[str]
    ) -> str:
        """The parts joined. Parts can be more tokens together than alone: if they are too many, as
        many of the last as must, but for those in `keep`, are left out."""
        parts, kept = list(parts), set(keep)
        while (surplus := self.count_tokens(gap.join(parts)) - tokens) > 0:
            before = len(parts)
            for i in range(len(parts) - 1, -1, -1):
                if surplus > 0 and parts[i] not in kept:
                    surplus -= self._count_part(parts.pop(i))
            if len(parts) == before:
                raise DataError(f"{tokens} tokens are too few for a long document of this kind")
        return gap.join(parts)

    @cached_property
    def _bags(self) -> NDArray[np.float64]:
        return np.stack([_bag(document.text) for document in self.documents])

    def most_similar(self, seed: int) -> list[Document]:
        """The documents by how similar they are to number `seed`, that one first."""
        nearest = np.argsort(-(self._bags @ self._bags[seed]), kind="stable")
        return [self.documents[i] for i in nearest]

    def tokens_left(self, tokens: int, *parts: str, gap: str = "\n") -> int:
        """What `parts` leave of `tokens`."""
        between = self.separator_tokens(gap)
        room = tokens - sum(self._count_part(part) + between for part in parts)
        if room < tokens / 4:
            raise DataError(f"{tokens} tokens are too few for a long document of this kind")
        return room


def split_into_chunks(text: str) -> list[str]:
    """A text in bits of a few lines, or of a part of a line that is long.

    >>> split_into_chunks("one two\\n\\nthree\\n" + "four " * 47 + "five")[0]
    'one two\\nthree'
    """
    chunks: list[str] = []
    room = 0
    for line in text.split("\n"):
        words = re.findall(r"\s*\S+", line)
        for start in range(0, len(words), _WORDS_A_CHUNK):
            bit = words[start : start + _WORDS_A_CHUNK]
            if len(bit) > room:
                chunks.append("".join(bit))
                room = _WORDS_A_CHUNK
            else:
                chunks[-1] += "\n" + "".join(bit)
            room -= len(bit)
    return chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class Needle:
    """What `needles` hides: so many keys asked for and not asked for, so many values of each, each
    said so many times. A model learns from every time but the first: that is a look-up, too."""

    num_keys: int = 1
    distractors: int = 3
    num_values: int = 1
    repeats: int = 1
    held_out: bool = False  # which pairs of key and value are asked for; the others are of training
    depth: float | None = None  # of the first, 0 the beginning and 1 the end; else anywhere


def make_needle_example(
    material: Haystack, chance: Random, *, tokens: int, hidden: Needle, wording: NeedleTemplate
) -> LongContextExample:
    """Sentences that give keys their values, scattered over other text."""
    pairs = _pairs(chance, hidden, wording.values)
    said = [wording.needle.format(key=name, value=value) for name, value in pairs] * hidden.repeats
    asked = pairs[: hidden.num_keys * hidden.num_values]
    names = dict.fromkeys(name for name, _ in asked)
    question = wording.question.format(keys=" , ".join(names))
    answers = tuple(value for _, value in asked)
    room = material.tokens_left(tokens, *said, question, *answers, gap=wording.separator)
    parts = material.take_fitting(material.chunks(chance), room, gap=wording.separator)
    for i, sentence in enumerate(said):
        depth = hidden.depth if i == 0 and hidden.depth is not None else chance.random()
        parts.insert(round(depth * len(parts)), sentence)
    room = material.tokens_left(tokens, question, " , ".join(answers), gap=wording.separator)
    text = material.join_to_fit(parts, room, gap=wording.separator, keep=said)
    return LongContextExample(
        text=text, question=question, answers=answers, separator=wording.separator
    )


def _pairs(chance: Random, hidden: Needle, values: Sequence[object]) -> list[tuple[str, str]]:
    """Keys and values, those asked for first."""
    pairs: list[tuple[str, str]] = []
    for name in chance.sample(nano.KEYS, len(nano.KEYS)):
        held_out = hidden.held_out and len(pairs) < hidden.num_keys * hidden.num_values
        some = chance.sample(values, min(len(values), 64 * hidden.num_values))
        right = [str(value) for value in some if nano.is_held_out(f"{name} {value}") == held_out]
        if len(right) >= hidden.num_values:
            pairs += [(name, value) for value in right[: hidden.num_values]]
        if len(pairs) == (hidden.num_keys + hidden.distractors) * hidden.num_values:
            return pairs
    raise DataError(
        f"too few of {len(nano.KEYS)} keys have {hidden.num_values} of {len(values)} values"
    )


def make_mrcr_example(
    material: Haystack, chance: Random, *, tokens: int, same: int = 4
) -> LongContextExample:
    """Requests and texts in turn, where `same` requests are the same; the question names one by
    its place among them (as in MRCR)."""
    topic, *others = chance.sample(nano.KEYS, len(nano.KEYS))
    which = chance.randrange(same)
    question = f"Repeat the {nano.ORDINALS[which]} text about {topic} ."
    request = "Write about {} .\n".format
    alike = (request(topic) + text for text in material.chunks(chance))
    found = material.take_fitting(alike, material.tokens_left(tokens, question) * 15 // 16)
    if len(found) < same + 1:
        raise DataError(f"{tokens} tokens are too few for {same} texts about the same")
    places = sorted(chance.sample(range(len(found) - 1), same))
    texts = [turn.removeprefix(request(topic)) for turn in found]
    turns = [
        request(topic if place in places else chance.choice(others)) + text
        for place, text in enumerate(texts)
    ]
    answer = texts[places[which]]
    room = material.tokens_left(tokens, question, answer)
    text = material.join_to_fit(turns, room, gap="\n", keep=[turns[place] for place in places])
    return LongContextExample(text=text, question=question, answers=(answer,))


def make_interleaved_example(
    material: Haystack, chance: Random, *, tokens: int, texts: int = 3
) -> LongContextExample:
    """Parts of texts that resemble each other, in turn; the question names one part."""
    if len(material.documents) < texts:
        raise DataError(f"interleaving needs {texts} documents, not {len(material.documents)}")
    room = tokens
    queues: list[list[str]] = []
    for document in material.most_similar(chance.randrange(len(material.documents))):
        if len(queues) >= texts and room <= 0:
            break
        queues.append(split_into_chunks(document.text))
        room -= material.count_tokens(document.text)
    turns = [t for t, queue in enumerate(queues) for _ in queue]
    chance.shuffle(turns)
    every = list(zip(turns, _ranks(turns), strict=True))
    said = (f"[ text {t + 1} part {i + 1} ]\n{queues[t][i]}" for t, i in every)
    parts = material.take_fitting(said, tokens * 15 // 16)
    if not parts:
        raise DataError(f"{tokens} tokens are too few for a part of a text")
    place = chance.randrange(len(parts))
    t, i = every[place]
    question, answer = f"Repeat text {t + 1} part {i + 1} .", queues[t][i]
    room = material.tokens_left(tokens, question, answer)
    text = material.join_to_fit(parts, room, gap="\n", keep=[parts[place]])
    return LongContextExample(text=text, question=question, answers=(answer,))


def _ranks(turns: Sequence[int]) -> list[int]:
    """How often each had its turn before.

    >>> _ranks([0, 1, 0, 0, 1])
    [0, 0, 1, 2, 1]
    """
    seen: Counter[int] = Counter()
    ranks = []
    for turn in turns:
        ranks.append(seen[turn])
        seen[turn] += 1
    return ranks


def make_repository_example(
    material: Haystack, chance: Random, *, tokens: int
) -> LongContextExample:
    """Files under their paths, those nearest to one of them first; the question gives a line that
    only one of them holds."""
    seed = material.documents[chance.randrange(len(material.documents))]
    near = sorted(material.documents, key=lambda d: (-_shared_folders(seed.id, d.id), d.id))
    every = [
        (document.id, line)
        for document in near
        for line in (f"# path: {document.id}", *document.text.split("\n"))
    ]
    texts = material.take_fitting((line for _, line in every), tokens * 15 // 16)
    lines = every[: len(texts)]
    counts = Counter(line for _, line in lines)
    telling = [
        (path, line)
        for path, line in lines
        if counts[line] == 1 and len(line.strip()) >= 16 and not line.startswith("# path: ")
    ]
    if not telling:
        raise DataError(f"no line of the files near {seed.id} tells them apart")
    path, line = chance.choice(telling)
    question = f"Which file holds this line: {line.strip()}"
    room = material.tokens_left(tokens, question, path)
    text = material.join_to_fit(texts, room, gap="\n", keep=[line, f"# path: {path}"])
    return LongContextExample(text=text, question=question, answers=(path,))


def _shared_folders(a: str, b: str) -> int:
    pairs = list(zip(a.split("/")[:-1], b.split("/")[:-1], strict=False))
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))


def _bag(text: str) -> NDArray[np.float64]:
    """Which words a text uses, as a direction."""
    words = re.findall(r"\w+", text[:20_000])
    places = np.array([crc32(word.encode()) % _FEATURES for word in words], np.int64)
    counts = np.sqrt(np.bincount(places, minlength=_FEATURES).astype(np.float64))
    return counts / max(1e-9, float(np.linalg.norm(counts)))


NEEDLE_TASKS = {
    "needle": Needle(),
    "multi_needle": Needle(num_keys=4),
    "multi_value": Needle(num_values=4),
}
LONG_CONTEXT_TASKS: dict[str, Callable[..., LongContextExample]] = {
    "mrcr": make_mrcr_example,
    "interleaved": make_interleaved_example,
    "repository": make_repository_example,
}


class LongContextSource(SourceSettings):
    """Generated long documents of one kind, none above `tokens`.

    Held-out needles give held-out values, by the rule of generated records; what else is held out
    is made of the same material in another way.
    """

    is_generated: ClassVar[bool] = True

    kind: Literal["longcontext"] = "longcontext"
    task: Literal[
        "needle",
        "multi_needle",
        "multi_value",
        "mrcr",
        "interleaved",
        "repository",
    ]
    haystack: Annotated[FileSource | ReasoningSource, Field(discriminator="kind")]
    haystack_documents: Annotated[int, Field(gt=0)] = 2000
    max_tokens: Annotated[int, Field(ge=64)]
    count: Annotated[int, Field(gt=0)]
    needle_template: Literal["plain", "nano"] = "plain"
    distractors: Annotated[int, Field(ge=0)] = 3  # needles that are not asked for
    needle_repeats: Annotated[int, Field(gt=0)] = 1  # each needle is said
    seed: int = 0
    held_out: bool = False

    def data_files(self) -> tuple[RequiredFile, ...]:
        return self.haystack.data_files()

    def tasks(self, reading: SourceContext) -> Iterator[LongContextExample]:
        found = list(islice(self.haystack.documents(reading), self.haystack_documents))
        material = Haystack(found, reading.count_tokens)
        for number in range(self.count):
            yield self._task(
                material, Random(derive_seed(self.seed, self.task, self.held_out, number))
            )

    def documents(self, reading: SourceContext) -> Iterator[Document]:
        for number, task in enumerate(self.tasks(reading)):
            yield Document(text=task.to_text(), id=f"{number}", source=self.name)

    def held_out_source(self, share: float) -> "LongContextSource | None":
        if self.held_out:
            return None
        return self.model_copy(update={"held_out": True, "count": max(1, int(self.count * share))})

    def _task(self, material: Haystack, chance: Random) -> LongContextExample:
        if self.task in LONG_CONTEXT_TASKS:
            return LONG_CONTEXT_TASKS[self.task](material, chance, tokens=self.max_tokens)
        hidden = replace(
            NEEDLE_TASKS[self.task],
            distractors=self.distractors,
            repeats=self.needle_repeats,
            held_out=self.held_out,
        )
        wording = NEEDLE_TEMPLATES[self.needle_template]
        return make_needle_example(
            material, chance, tokens=self.max_tokens, hidden=hidden, wording=wording
        )
