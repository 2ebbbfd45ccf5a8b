"""Synthetic long-context tasks with a question and its answers, for training and evaluation.

needle*      key-value sentences needle in other text (RULER NIAH): single, multi-key, multi-value
mrcr         a conversation with repeated requests; repeat the n-th answer (OpenAI MRCR)
interleaved  chunks of similar texts in alternation; repeat one chunk
repository   related source files; name the file that contains a line
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

_WORDS_PER_CHUNK = 48
_FEATURES = 1024
CountTokens = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class NeedleTemplate:
    """Wording of needles and questions."""

    needle: str
    question: str
    values: Sequence[object]  # possible values of a key
    separator: str  # between chunks of the document


NEEDLE_TEMPLATES = {
    "plain": NeedleTemplate(
        "The number of {key} is {value}.",
        "What is the number of {keys}?",
        range(100_000, 1_000_000),
        "\n",
    ),
    # Same template as the generated look-ups, which a model trained on nothing else understands.
    "nano": NeedleTemplate("{key} {value} .", "{keys}", nano.VALUES, " "),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LongContextExample:
    text: str
    question: str
    answers: tuple[str, ...]
    separator: str = "\n"

    def to_text(self) -> str:
        """The example as one training document."""
        return (
            f"{self.text}{self.separator}{self.question}{self.separator}{' , '.join(self.answers)}"
        )

    def score(self, reply: str) -> float:
        """Fraction of the answers contained in the reply.

        >>> LongContextExample(text="", question="", answers=("12", "90")).score("It is 12.")
        0.5
        """
        return sum(answer in reply for answer in self.answers) / len(self.answers)


class Haystack:
    """Filler documents for long-context examples."""

    def __init__(self, documents: Sequence[Document], count_tokens: CountTokens) -> None:
        if not documents:
            raise DataError("the haystack has no documents")
        self.documents = documents
        self.count_tokens = count_tokens
        self._count_part = lru_cache(maxsize=100_000)(count_tokens)

    def chunks(self, rng: Random) -> Iterator[str]:
        """Chunks of consecutive documents, from a random one on, without end."""
        at = rng.randrange(len(self.documents))
        while True:
            yield from split_into_chunks(self.documents[at].text)
            at = (at + 1) % len(self.documents)

    def separator_tokens(self, separator: str) -> int:
        """Token cost of a separator: a line break is one token, but a space is often part of the
        next word."""
        return max(0, self._count_part(f"a{separator}a") - 2 * self._count_part("a"))

    def take_fitting(
        self, parts: Iterable[str], tokens: int, *, separator: str = "\n"
    ) -> list[str]:
        """The leading parts that fit into `tokens`, separators included."""
        found, between = [], self.separator_tokens(separator)
        for part in parts:
            tokens -= self._count_part(part) + between
            if tokens < 0:
                break
            found.append(part)
        return found

    def join_to_fit(
        self, parts: Sequence[str], tokens: int, *, separator: str, keep: Sequence[str]
    ) -> str:
        """The parts joined. Joined parts can have more tokens than the sum of their counts: as many
        as necessary are dropped from the end, except those in `keep`."""
        parts, kept = list(parts), set(keep)
        while (surplus := self.count_tokens(separator.join(parts)) - tokens) > 0:
            before = len(parts)
            for i in range(len(parts) - 1, -1, -1):
                if surplus > 0 and parts[i] not in kept:
                    surplus -= self._count_part(parts.pop(i))
            if len(parts) == before:
                raise DataError(f"{tokens} tokens are too few for this long-context task")
        return separator.join(parts)

    @cached_property
    def _bags(self) -> NDArray[np.float64]:
        return np.stack([_bag(document.text) for document in self.documents])

    def most_similar(self, seed: int) -> list[Document]:
        """Documents by similarity to document `seed`, which comes first."""
        nearest = np.argsort(-(self._bags @ self._bags[seed]), kind="stable")
        return [self.documents[i] for i in nearest]

    def tokens_left(self, tokens: int, *parts: str, separator: str = "\n") -> int:
        """Tokens left of `tokens` after `parts`."""
        between = self.separator_tokens(separator)
        left = tokens - sum(self._count_part(part) + between for part in parts)
        if left < tokens / 4:
            raise DataError(f"{tokens} tokens are too few for this long-context task")
        return left


def split_into_chunks(text: str) -> list[str]:
    """Split a text into chunks of a few lines, and long lines into several chunks.

    >>> split_into_chunks("one two\\n\\nthree\\n" + "four " * 47 + "five")[0]
    'one two\\nthree'
    """
    chunks: list[str] = []
    left = 0
    for line in text.split("\n"):
        words = re.findall(r"\s*\S+", line)
        for start in range(0, len(words), _WORDS_PER_CHUNK):
            bit = words[start : start + _WORDS_PER_CHUNK]
            if len(bit) > left:
                chunks.append("".join(bit))
                left = _WORDS_PER_CHUNK
            else:
                chunks[-1] += "\n" + "".join(bit)
            left -= len(bit)
    return chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class Needle:
    """How many keys are asked for and how many are distractors, the values per key, and how often
    each needle is repeated. Every repetition after the first also trains a look-up."""

    num_keys: int = 1
    distractors: int = 3
    num_values: int = 1
    repeats: int = 1
    held_out: bool = False  # asks for held-out pairs; all others are training pairs
    depth: float | None = None  # of the first needle, 0 start to 1 end; None: random


def make_needle_example(
    haystack: Haystack, rng: Random, *, tokens: int, needle: Needle, template: NeedleTemplate
) -> LongContextExample:
    """Needle in a haystack: sentences that assign values to keys, scattered over other text."""
    pairs = _pairs(rng, needle, template.values)
    needles = [template.needle.format(key=name, value=value) for name, value in pairs]
    needles *= needle.repeats
    targets = pairs[: needle.num_keys * needle.num_values]
    names = dict.fromkeys(name for name, _ in targets)
    question = template.question.format(keys=" , ".join(names))
    answers = tuple(value for _, value in targets)
    left = haystack.tokens_left(tokens, *needles, question, *answers, separator=template.separator)
    parts = haystack.take_fitting(haystack.chunks(rng), left, separator=template.separator)
    for i, sentence in enumerate(needles):
        depth = needle.depth if i == 0 and needle.depth is not None else rng.random()
        parts.insert(round(depth * len(parts)), sentence)
    left = haystack.tokens_left(tokens, question, " , ".join(answers), separator=template.separator)
    text = haystack.join_to_fit(parts, left, separator=template.separator, keep=needles)
    return LongContextExample(
        text=text, question=question, answers=answers, separator=template.separator
    )


def _pairs(rng: Random, needle: Needle, values: Sequence[object]) -> list[tuple[str, str]]:
    """Key-value pairs, those asked for first."""
    pairs: list[tuple[str, str]] = []
    for name in rng.sample(nano.KEYS, len(nano.KEYS)):
        held_out = needle.held_out and len(pairs) < needle.num_keys * needle.num_values
        some = rng.sample(values, min(len(values), 64 * needle.num_values))
        right = [str(value) for value in some if nano.is_held_out(f"{name} {value}") == held_out]
        if len(right) >= needle.num_values:
            pairs += [(name, value) for value in right[: needle.num_values]]
        if len(pairs) == (needle.num_keys + needle.distractors) * needle.num_values:
            return pairs
    raise DataError(
        f"too few of {len(nano.KEYS)} keys have {needle.num_values} of {len(values)} values"
    )


def make_mrcr_example(
    haystack: Haystack, rng: Random, *, tokens: int, same: int = 4
) -> LongContextExample:
    """MRCR: alternating requests and texts with `same` identical requests; the question asks for
    the text of one of them by its ordinal."""
    topic, *others = rng.sample(nano.KEYS, len(nano.KEYS))
    which = rng.randrange(same)
    question = f"Repeat the {nano.ORDINALS[which]} text about {topic} ."
    request = "Write about {} .\n".format
    alike = (request(topic) + text for text in haystack.chunks(rng))
    found = haystack.take_fitting(alike, haystack.tokens_left(tokens, question) * 15 // 16)
    if len(found) < same + 1:
        raise DataError(f"{tokens} tokens are too few for {same} texts about one topic")
    positions = sorted(rng.sample(range(len(found) - 1), same))
    texts = [turn.removeprefix(request(topic)) for turn in found]
    turns = [
        request(topic if position in positions else rng.choice(others)) + text
        for position, text in enumerate(texts)
    ]
    answer = texts[positions[which]]
    left = haystack.tokens_left(tokens, question, answer)
    text = haystack.join_to_fit(
        turns, left, separator="\n", keep=[turns[position] for position in positions]
    )
    return LongContextExample(text=text, question=question, answers=(answer,))


def make_interleaved_example(
    haystack: Haystack, rng: Random, *, tokens: int, texts: int = 3
) -> LongContextExample:
    """Interleaved chunks of similar texts; the question asks for one chunk."""
    if len(haystack.documents) < texts:
        raise DataError(
            f"interleaving needs {texts} documents, the haystack has {len(haystack.documents)}"
        )
    left = tokens
    queues: list[list[str]] = []
    for document in haystack.most_similar(rng.randrange(len(haystack.documents))):
        if len(queues) >= texts and left <= 0:
            break
        queues.append(split_into_chunks(document.text))
        left -= haystack.count_tokens(document.text)
    turns = [t for t, queue in enumerate(queues) for _ in queue]
    rng.shuffle(turns)
    every = list(zip(turns, _ranks(turns), strict=True))
    labelled = (f"[ text {t + 1} part {i + 1} ]\n{queues[t][i]}" for t, i in every)
    parts = haystack.take_fitting(labelled, tokens * 15 // 16)
    if not parts:
        raise DataError(f"{tokens} tokens are too few for one chunk of a text")
    position = rng.randrange(len(parts))
    t, i = every[position]
    question, answer = f"Repeat text {t + 1} part {i + 1} .", queues[t][i]
    left = haystack.tokens_left(tokens, question, answer)
    text = haystack.join_to_fit(parts, left, separator="\n", keep=[parts[position]])
    return LongContextExample(text=text, question=question, answers=(answer,))


def _ranks(turns: Sequence[int]) -> list[int]:
    """For each element, how often it occurred before.

    >>> _ranks([0, 1, 0, 0, 1])
    [0, 0, 1, 2, 1]
    """
    seen: Counter[int] = Counter()
    ranks = []
    for turn in turns:
        ranks.append(seen[turn])
        seen[turn] += 1
    return ranks


def make_repository_example(haystack: Haystack, rng: Random, *, tokens: int) -> LongContextExample:
    """Files with their paths, nearest to a random one first; the question quotes a line that occurs
    in only one of them."""
    seed = haystack.documents[rng.randrange(len(haystack.documents))]
    near = sorted(haystack.documents, key=lambda d: (-_shared_folders(seed.id, d.id), d.id))
    every = [
        (document.id, line)
        for document in near
        for line in (f"# path: {document.id}", *document.text.split("\n"))
    ]
    texts = haystack.take_fitting((line for _, line in every), tokens * 15 // 16)
    lines = every[: len(texts)]
    counts = Counter(line for _, line in lines)
    unique = [
        (path, line)
        for path, line in lines
        if counts[line] == 1 and len(line.strip()) >= 16 and not line.startswith("# path: ")
    ]
    if not unique:
        raise DataError(f"the files near {seed.id} have no line that occurs only once")
    path, line = rng.choice(unique)
    question = f"Which file holds this line: {line.strip()}"
    left = haystack.tokens_left(tokens, question, path)
    text = haystack.join_to_fit(texts, left, separator="\n", keep=[line, f"# path: {path}"])
    return LongContextExample(text=text, question=question, answers=(path,))


def _shared_folders(a: str, b: str) -> int:
    pairs = list(zip(a.split("/")[:-1], b.split("/")[:-1], strict=False))
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))


def _bag(text: str) -> NDArray[np.float64]:
    """Bag of words as a unit vector."""
    words = re.findall(r"\w+", text[:20_000])
    positions = np.array([crc32(word.encode()) % _FEATURES for word in words], np.int64)
    counts = np.sqrt(np.bincount(positions, minlength=_FEATURES).astype(np.float64))
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
    """Generated long documents of one task, each of at most `max_tokens`.

    Held-out needles use held-out key-value pairs, by the rule of the generated records. The other
    held-out tasks use the same haystack with a different seed.
    """

    is_generated: ClassVar[bool] = True

    kind: Literal["longcontext"] = "longcontext"
    task: Literal["needle", "multi_needle", "multi_value", "mrcr", "interleaved", "repository"]
    haystack: Annotated[FileSource | ReasoningSource, Field(discriminator="kind")]
    haystack_documents: Annotated[int, Field(gt=0)] = 2000
    max_tokens: Annotated[int, Field(ge=64)]
    count: Annotated[int, Field(gt=0)]
    needle_template: Literal["plain", "nano"] = "plain"
    distractors: Annotated[int, Field(ge=0)] = 3  # needles that are not asked for
    needle_repeats: Annotated[int, Field(gt=0)] = 1  # occurrences of each needle
    seed: int = 0
    held_out: bool = False

    def data_files(self) -> tuple[RequiredFile, ...]:
        return self.haystack.data_files()

    def tasks(self, context: SourceContext) -> Iterator[LongContextExample]:
        found = list(islice(self.haystack.documents(context), self.haystack_documents))
        haystack = Haystack(found, context.count_tokens)
        for number in range(self.count):
            yield self._task(
                haystack, Random(derive_seed(self.seed, self.task, self.held_out, number))
            )

    def documents(self, context: SourceContext) -> Iterator[Document]:
        for number, task in enumerate(self.tasks(context)):
            yield Document(text=task.to_text(), id=f"{number}", source=self.name)

    def held_out_source(self, share: float) -> "LongContextSource | None":
        if self.held_out:
            return None
        return self.model_copy(update={"held_out": True, "count": max(1, int(self.count * share))})

    def _task(self, haystack: Haystack, rng: Random) -> LongContextExample:
        if self.task in LONG_CONTEXT_TASKS:
            return LONG_CONTEXT_TASKS[self.task](haystack, rng, tokens=self.max_tokens)
        needle = replace(
            NEEDLE_TASKS[self.task],
            distractors=self.distractors,
            repeats=self.needle_repeats,
            held_out=self.held_out,
        )
        template = NEEDLE_TEMPLATES[self.needle_template]
        return make_needle_example(
            haystack, rng, tokens=self.max_tokens, needle=needle, template=template
        )
