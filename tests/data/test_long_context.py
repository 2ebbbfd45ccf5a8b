import re
from random import Random

import pytest

from paddock.data import FolderSource, LongContextSource, SourceContext
from paddock.data.long_context import (
    LONG_CONTEXT_TASKS,
    NEEDLE_TASKS,
    NEEDLE_TEMPLATES,
    Haystack,
    Needle,
    make_needle_example,
    make_repository_example,
)
from paddock.data.reasoning import ReasoningSource
from paddock.data.sources import DataError, Document
from paddock.envs.nano.language import KEYS, is_held_out

PLAIN = NEEDLE_TEMPLATES["plain"]
NEEDLE = {
    "plain": re.compile(r"The number of (\w+) is (\d{6})\."),
    "nano": re.compile(rf"\b({'|'.join(KEYS)}) (\w+) \."),
}


def words(text):
    return len(text.split())


def documents(count=60):
    rng = Random(0)
    themes = [[f"w{theme}x{i}" for i in range(40)] for theme in range(5)]
    return [
        Document(
            text="\n".join(
                f"line {n} of {i}: " + " ".join(rng.choices(themes[i % 5], k=9)) for n in range(12)
            ),
            id=f"pack{i % 5}/part{i % 2}/file{i}.txt",
            source="s",
        )
        for i in range(count)
    ]


def made_by(task, material, seed, tokens):
    if task in LONG_CONTEXT_TASKS:
        return LONG_CONTEXT_TASKS[task](material, Random(seed), tokens=tokens)
    return make_needle_example(
        material, Random(seed), tokens=tokens, needle=NEEDLE_TASKS[task], template=PLAIN
    )


@pytest.fixture(scope="module")
def material():
    return Haystack(documents(), words)


@pytest.mark.parametrize("task", [*NEEDLE_TASKS, *LONG_CONTEXT_TASKS])
@pytest.mark.parametrize("tokens", [600, 2400])
def test_documents_are_nearly_as_long_as_requested_and_never_longer(material, task, tokens):
    for seed in range(5):
        made = made_by(task, material, seed, tokens)
        assert 0.85 * tokens < words(made.to_text()) <= tokens
        assert made.score(" ".join(made.answers)) == 1.0
        assert made.score("") == 0.0


def words_and_newlines(text):
    """Counts like a tokenizer whose words include the preceding space: a newline is a token."""
    return len(re.findall(r"\n| ?[^\s]+", text))


@pytest.mark.parametrize("count", [words, words_and_newlines])
@pytest.mark.parametrize("wording", ["plain", "nano"])
@pytest.mark.parametrize("times", [1, 8])
def test_separators_are_counted(count, wording, times):
    """Many short parts: counting a separator that is not there would cost a fifth of the length."""
    facts = ReasoningSource(name="facts", family="facts", count=200)
    source = LongContextSource(
        name="n",
        task="needle",
        haystack=facts,
        max_tokens=500,
        count=20,
        needle_repeats=times,
        needle_template=wording,
    )
    for made in source.tasks(SourceContext(count_tokens=count)):
        assert 475 < count(made.to_text()) <= 500


@pytest.mark.parametrize("task", [*NEEDLE_TASKS, *LONG_CONTEXT_TASKS])
def test_tasks_are_determined_by_the_rng_and_differ(material, task):
    same, again, other = (made_by(task, material, seed, 900) for seed in (1, 1, 2))
    assert same == again != other


@pytest.mark.parametrize(
    ("hidden", "answers"),
    [
        (Needle(), 1),
        (Needle(num_keys=4), 4),
        (Needle(num_values=4), 4),
        (Needle(num_keys=2, num_values=2), 4),
    ],
)
def test_needles_answer_the_question_and_distractors_do_not(material, hidden, answers):
    made = make_needle_example(material, Random(3), tokens=1500, needle=hidden, template=PLAIN)
    stated = re.findall(r"The number of (\w+) is (\d{6})\.", made.text)
    requested = set(re.findall(r"\w+", made.question)) & set(KEYS)
    assert sorted(v for name, v in stated if name in requested) == sorted(made.answers)
    assert len(made.answers) == answers and len(requested) == hidden.num_keys
    assert len(stated) == (hidden.num_keys + hidden.distractors) * hidden.num_values


def test_repeated_needles_have_the_same_value(material):
    hidden = Needle(distractors=5, repeats=4)
    made = make_needle_example(
        material, Random(1), tokens=900, needle=hidden, template=NEEDLE_TEMPLATES["nano"]
    )
    stated = NEEDLE["nano"].findall(made.text)
    assert len(stated) == 6 * 4 and len(set(stated)) == len({name for name, _ in stated}) == 6
    assert (made.question, *made.answers) in stated
    assert [name for name, _ in stated] != sorted(name for name, _ in stated)
    assert words(made.to_text()) <= 900


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_needle_is_at_the_requested_depth(material, depth):
    hidden = Needle(depth=depth, distractors=0)
    made = make_needle_example(material, Random(0), tokens=2000, needle=hidden, template=PLAIN)
    assert made.text.index("The number of") / len(made.text) == pytest.approx(depth, abs=0.05)


def test_a_repeated_request_has_the_answer_of_its_index(material):
    for seed in range(10):
        made = made_by("mrcr", material, seed, 1500)
        ordinal, topic = re.fullmatch(
            r"Repeat the (\w+) text about (\w+) \.", made.question
        ).groups()
        turns = re.findall(r"Write about (\w+) \.\n(.*?)(?=\nWrite about|$)", made.text, re.DOTALL)
        stated = [text for name, text in turns if name == topic]
        assert len(stated) == 4
        assert stated[("first", "second", "third", "fourth").index(ordinal)] == made.answers[0]


def test_interleaved_texts_resemble_each_other_and_keep_their_order(material):
    made = made_by("interleaved", material, 1, 500)
    marked = r"\[ text (\d+) part (\d+) \]\n(.*?)(?=\n\[ text|$)"
    parts = re.findall(marked, made.text, re.DOTALL)
    assert len({re.search(r"w(\d)x", line)[1] for _, _, line in parts}) == 1  # one theme
    for text in {text for text, _, _ in parts}:
        numbers = [int(part) for other, part, _ in parts if other == text]
        assert numbers == sorted(numbers)
    requested = re.fullmatch(r"Repeat text (\d+) part (\d+) \.", made.question).groups()
    assert [line for text, part, line in parts if (text, part) == requested] == list(made.answers)


def test_a_repository_is_related_files_under_their_paths(material):
    made = make_repository_example(material, Random(4), tokens=500)
    paths = re.findall(r"^# path: (.*)$", made.text, re.MULTILINE)
    assert len({path.rsplit("/", 1)[0] for path in paths}) == 1 < len(paths)
    line = made.question.removeprefix("Which file holds this line: ")
    before = made.text[: made.text.index(line)]
    assert before.rsplit("# path: ", 1)[1].split("\n")[0] == made.answers[0]


def test_the_nano_language_has_needles():
    facts = ReasoningSource(name="facts", family="facts", count=200)
    source = LongContextSource(
        name="n", task="needle", haystack=facts, max_tokens=200, count=5, needle_template="nano"
    )
    for made in source.tasks(SourceContext(count_tokens=words)):
        assert made.text.count(f"{made.question} {made.answers[0]} .") == 1
        assert made.to_text().endswith(f" {made.question} {made.answers[0]}")


@pytest.mark.parametrize(("task", "wording"), [("needle", "nano"), ("multi_value", "plain")])
def test_held_out_values_appear_only_in_held_out_questions(task, wording):
    facts = ReasoningSource(name="facts", family="facts", count=200)
    source = LongContextSource(
        name="n", task=task, haystack=facts, max_tokens=300, count=40, needle_template=wording
    )
    for held_out in (False, True):
        requested = source.held_out_source(1.0) if held_out else source
        for made in requested.tasks(SourceContext(count_tokens=words)):
            [name] = set(re.findall(r"\w+", made.question)) & set(KEYS)
            assert {is_held_out(f"{name} {value}") for value in made.answers} == {held_out}
            stated = NEEDLE[wording].findall(made.text)
            assert len(stated) == 4 * len(made.answers)
            assert not any(is_held_out(f"{a} {b}") for a, b in stated if a != name)


def test_a_long_context_source_reads_its_haystack(tmp_path):
    for document in documents(20):
        file = tmp_path / document.id
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(document.text)
    folder = FolderSource(name="f", path=str(tmp_path))
    source = LongContextSource(
        name="l", task="repository", haystack=folder, max_tokens=400, count=3
    )
    found = list(source.documents(SourceContext(count_tokens=words)))
    assert len(found) == 3
    assert all(200 < words(document.text) <= 400 for document in found)


def test_lengths_too_short_for_the_task_are_rejected(material):
    with pytest.raises(DataError, match="10 tokens are too few"):
        make_needle_example(material, Random(0), tokens=10, needle=Needle(), template=PLAIN)
    with pytest.raises(DataError, match="no documents"):
        Haystack([], words)
