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
from paddock.data.chance import key
from paddock.data.corpus import DataError, Document, FileSource, Reading, SourceSettings
from paddock.data.reasoning import ReasoningSource
from paddock.envs.nano.language import KEYS, ORDINALS, VALUES, is_held_out

_WORDS_A_CHUNK = 48
_FEATURES = 1024
CountTokens = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Wording:
    """How needles are said and asked for."""

    needle: str
    question: str
    values: Sequence[object]  # that a key may have
    gap: str  # between parts of a document


WORDINGS = {
    "plain": Wording(
        "The number of {key} is {value}.",
        "What is the number of {keys}?",
        range(100_000, 1_000_000),
        "\n",
    ),
    # As in generated look-ups, so that a model raised on those alone understands it.
    "nano": Wording("{key} {value} .", "{keys}", VALUES, " "),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LongTask:
    text: str
    question: str
    answers: tuple[str, ...]
    gap: str = "\n"

    def document(self) -> str:
        """What a model trains on."""
        return f"{self.text}{self.gap}{self.question}{self.gap}{' , '.join(self.answers)}"

    def score(self, reply: str) -> float:
        """The share of answers that the reply holds.

        >>> LongTask(text="", question="", answers=("12", "90")).score("It is 12, I think.")
        0.5
        """
        return sum(answer in reply for answer in self.answers) / len(self.answers)


class Material:
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
            yield from chunked(self.documents[at].text)
            at = (at + 1) % len(self.documents)

    def gap_tokens(self, gap: str) -> int:
        """What a gap between parts costs: a line break is a token, but a space is often part of
        the word behind it."""
        return max(0, self._count_part(f"a{gap}a") - 2 * self._count_part("a"))

    def first(self, parts: Iterable[str], tokens: int, *, gap: str = "\n") -> list[str]:
        """As many parts as fit into `tokens`, counting what stands between them."""
        found, between = [], self.gap_tokens(gap)
        for part in parts:
            tokens -= self._count_part(part) + between
            if tokens < 0:
                break
            found.append(part)
        return found

    def fitted(self, parts: Sequence[str], tokens: int, *, gap: str, keep: Sequence[str]) -> str:
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

    def alike(self, seed: int) -> list[Document]:
        """The documents by how similar they are to number `seed`, that one first."""
        nearest = np.argsort(-(self._bags @ self._bags[seed]), kind="stable")
        return [self.documents[i] for i in nearest]

    def room(self, tokens: int, *parts: str, gap: str = "\n") -> int:
        """What `parts` leave of `tokens`."""
        between = self.gap_tokens(gap)
        room = tokens - sum(self._count_part(part) + between for part in parts)
        if room < tokens / 4:
            raise DataError(f"{tokens} tokens are too few for a long document of this kind")
        return room


def chunked(text: str) -> list[str]:
    """A text in bits of a few lines, or of a part of a line that is long.

    >>> chunked("one two\\n\\nthree\\n" + "four " * 47 + "five")[0]
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
class Hidden:
    """What `needles` hides: so many keys asked for and not asked for, so many values of each, each
    said so many times. A model learns from every time but the first: that is a look-up, too."""

    keys: int = 1
    others: int = 3
    values: int = 1
    times: int = 1
    held_out: bool = False  # which pairs of key and value are asked for; the others are of training
    depth: float | None = None  # of the first, 0 the beginning and 1 the end; else anywhere


def needles(
    material: Material, chance: Random, *, tokens: int, hidden: Hidden, wording: Wording
) -> LongTask:
    """Sentences that give keys their values, scattered over other text."""
    pairs = _pairs(chance, hidden, wording.values)
    said = [wording.needle.format(key=name, value=value) for name, value in pairs] * hidden.times
    asked = pairs[: hidden.keys * hidden.values]
    names = dict.fromkeys(name for name, _ in asked)
    question = wording.question.format(keys=" , ".join(names))
    answers = tuple(value for _, value in asked)
    room = material.room(tokens, *said, question, *answers, gap=wording.gap)
    parts = material.first(material.chunks(chance), room, gap=wording.gap)
    for i, sentence in enumerate(said):
        depth = hidden.depth if i == 0 and hidden.depth is not None else chance.random()
        parts.insert(round(depth * len(parts)), sentence)
    room = material.room(tokens, question, " , ".join(answers), gap=wording.gap)
    text = material.fitted(parts, room, gap=wording.gap, keep=said)
    return LongTask(text=text, question=question, answers=answers, gap=wording.gap)


def _pairs(chance: Random, hidden: Hidden, values: Sequence[object]) -> list[tuple[str, str]]:
    """Keys and values, those asked for first."""
    pairs: list[tuple[str, str]] = []
    for name in chance.sample(KEYS, len(KEYS)):
        held_out = hidden.held_out and len(pairs) < hidden.keys * hidden.values
        some = chance.sample(values, min(len(values), 64 * hidden.values))
        right = [str(value) for value in some if is_held_out(f"{name} {value}") == held_out]
        if len(right) >= hidden.values:
            pairs += [(name, value) for value in right[: hidden.values]]
        if len(pairs) == (hidden.keys + hidden.others) * hidden.values:
            return pairs
    raise DataError(f"too few of {len(KEYS)} keys have {hidden.values} of {len(values)} values")


def repeats(material: Material, chance: Random, *, tokens: int, same: int = 4) -> LongTask:
    """Requests and texts in turn, where `same` requests are the same; the question names one by
    its place among them (as in MRCR)."""
    topic, *others = chance.sample(KEYS, len(KEYS))
    which = chance.randrange(same)
    question = f"Repeat the {ORDINALS[which]} text about {topic} ."
    request = "Write about {} .\n".format
    alike = (request(topic) + text for text in material.chunks(chance))
    found = material.first(alike, material.room(tokens, question) * 15 // 16)
    if len(found) < same + 1:
        raise DataError(f"{tokens} tokens are too few for {same} texts about the same")
    places = sorted(chance.sample(range(len(found) - 1), same))
    texts = [turn.removeprefix(request(topic)) for turn in found]
    turns = [
        request(topic if place in places else chance.choice(others)) + text
        for place, text in enumerate(texts)
    ]
    answer = texts[places[which]]
    room = material.room(tokens, question, answer)
    text = material.fitted(turns, room, gap="\n", keep=[turns[place] for place in places])
    return LongTask(text=text, question=question, answers=(answer,))


def interleaved(material: Material, chance: Random, *, tokens: int, texts: int = 3) -> LongTask:
    """Parts of texts that resemble each other, in turn; the question names one part."""
    if len(material.documents) < texts:
        raise DataError(f"interleaving needs {texts} documents, not {len(material.documents)}")
    room = tokens
    queues: list[list[str]] = []
    for document in material.alike(chance.randrange(len(material.documents))):
        if len(queues) >= texts and room <= 0:
            break
        queues.append(chunked(document.text))
        room -= material.count_tokens(document.text)
    turns = [t for t, queue in enumerate(queues) for _ in queue]
    chance.shuffle(turns)
    every = list(zip(turns, _ranks(turns), strict=True))
    said = (f"[ text {t + 1} part {i + 1} ]\n{queues[t][i]}" for t, i in every)
    parts = material.first(said, tokens * 15 // 16)
    if not parts:
        raise DataError(f"{tokens} tokens are too few for a part of a text")
    place = chance.randrange(len(parts))
    t, i = every[place]
    question, answer = f"Repeat text {t + 1} part {i + 1} .", queues[t][i]
    room = material.room(tokens, question, answer)
    text = material.fitted(parts, room, gap="\n", keep=[parts[place]])
    return LongTask(text=text, question=question, answers=(answer,))


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


def repository(material: Material, chance: Random, *, tokens: int) -> LongTask:
    """Files under their paths, those nearest to one of them first; the question gives a line that
    only one of them holds."""
    seed = material.documents[chance.randrange(len(material.documents))]
    near = sorted(material.documents, key=lambda d: (-_shared_folders(seed.id, d.id), d.id))
    every = [
        (document.id, line)
        for document in near
        for line in (f"# path: {document.id}", *document.text.split("\n"))
    ]
    texts = material.first((line for _, line in every), tokens * 15 // 16)
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
    room = material.room(tokens, question, path)
    text = material.fitted(texts, room, gap="\n", keep=[line, f"# path: {path}"])
    return LongTask(text=text, question=question, answers=(path,))


def _shared_folders(a: str, b: str) -> int:
    pairs = list(zip(a.split("/")[:-1], b.split("/")[:-1], strict=False))
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))


def _bag(text: str) -> NDArray[np.float64]:
    """Which words a text uses, as a direction."""
    words = re.findall(r"\w+", text[:20_000])
    places = np.array([crc32(word.encode()) % _FEATURES for word in words], np.int64)
    counts = np.sqrt(np.bincount(places, minlength=_FEATURES).astype(np.float64))
    return counts / max(1e-9, float(np.linalg.norm(counts)))


HIDDEN = {"needle": Hidden(), "multi_needle": Hidden(keys=4), "multi_value": Hidden(values=4)}
TASKS: dict[str, Callable[..., LongTask]] = {
    "mrcr": repeats,
    "interleaved": interleaved,
    "repository": repository,
}


class LongContextSource(SourceSettings):
    """Generated long documents of one kind, none above `tokens`.

    Held-out needles give held-out values, by the rule of generated records; what else is held out
    is made of the same material in another way.
    """

    generated: ClassVar[bool] = True

    kind: Literal["longcontext"] = "longcontext"
    task: Literal["needle", "multi_needle", "multi_value", "mrcr", "interleaved", "repository"]
    material: Annotated[FileSource | ReasoningSource, Field(discriminator="kind")]
    material_documents: Annotated[int, Field(gt=0)] = 2000
    tokens: Annotated[int, Field(ge=64)]
    count: Annotated[int, Field(gt=0)]
    wording: Literal["plain", "nano"] = "plain"
    others: Annotated[int, Field(ge=0)] = 3  # needles that are not asked for
    times: Annotated[int, Field(gt=0)] = 1  # each needle is said
    seed: int = 0
    held_out: bool = False

    def data_files(self) -> tuple[RequiredFile, ...]:
        return self.material.data_files()

    def tasks(self, reading: Reading) -> Iterator[LongTask]:
        found = list(islice(self.material.documents(reading), self.material_documents))
        material = Material(found, reading.count_tokens)
        for number in range(self.count):
            yield self._task(material, Random(key(self.seed, self.task, self.held_out, number)))

    def documents(self, reading: Reading) -> Iterator[Document]:
        for number, task in enumerate(self.tasks(reading)):
            yield Document(text=task.document(), id=f"{number}", source=self.name)

    def holding_out(self, share: float) -> "LongContextSource | None":
        if self.held_out:
            return None
        return self.model_copy(update={"held_out": True, "count": max(1, int(self.count * share))})

    def _task(self, material: Material, chance: Random) -> LongTask:
        if self.task in TASKS:
            return TASKS[self.task](material, chance, tokens=self.tokens)
        hidden = replace(
            HIDDEN[self.task], others=self.others, times=self.times, held_out=self.held_out
        )
        wording = WORDINGS[self.wording]
        return needles(material, chance, tokens=self.tokens, hidden=hidden, wording=wording)
