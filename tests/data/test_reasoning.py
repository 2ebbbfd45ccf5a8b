import re
from itertools import islice
from random import Random

import pytest
from pydantic import ValidationError

from paddock.data import SourceContext
from paddock.data.reasoning import (
    ReasoningSource,
    make_chain,
    make_facts,
    make_knowledge,
    make_lookups,
    make_records,
)
from paddock.envs.nano.language import (
    COLOUR_OF,
    COLOURS,
    KEYS,
    OPERATIONS,
    VALUES,
    is_held_out,
)

PAIR = re.compile(r"look (\w+) \. is (see \w+|\d) , end (see \w+|\d) \. (\w+) (see \w+|\d)")


def texts(count=2000, **settings):
    source = ReasoningSource(name="r", count=count, **settings)
    return [document.text for document in source.documents(SourceContext(count_tokens=len))]


def question(chain):
    return f"{chain.split(' . ')[0]} . Last digit ?"


def test_all_facts_are_stated_and_true():
    stated = set(re.findall(r"(\d) (\w+) (\d) is (\d)", " ".join(texts(family="facts"))))
    assert len(stated) == 180
    assert all(OPERATIONS[name](int(a), int(b)) == int(c) for a, name, b, c in stated)


def test_a_chain_is_computed_step_by_step():
    for text in texts(family="chains", count=200):
        question_part, worked = text.removesuffix(" .").split(" . ")
        value = question_part.split(" ")[1]
        for step, line in zip(question_part.split(" , ")[1:], worked.split(" , "), strict=True):
            ordinal, name, operand = step.split(" ")
            after = str(OPERATIONS[name](int(value), int(operand)))
            assert line == f"{ordinal} {value} {name} {operand} is {after}"
            value = after


def test_a_record_states_the_value_and_a_stale_one():
    for text in texts(family="records", count=200):
        found = PAIR.findall(text)
        assert len(found) == 2
        assert all(name == again and value == stated for name, value, _, again, stated in found)


def test_a_key_keeps_its_value_through_a_document_and_most_can_be_looked_up():
    for text in texts(family="lookups", count=200):
        stated = text.split(" ")
        pairs = list(zip(stated[::2], stated[1::2], strict=True))
        values = dict(pairs)
        assert len(pairs) == 24 and 2 <= len(values) <= 8
        assert set(values) <= set(KEYS) and set(values.values()) <= set(VALUES)
        assert all(values[name] == value for name, value in pairs)


def test_knowledge_is_consistent():
    assert sorted(set(COLOUR_OF.values())) == sorted(COLOURS)
    stated = re.findall(r"The (\w+) is (\w+)", " ".join(texts(family="knowledge")))
    assert len(set(stated)) == len(COLOUR_OF) == 32
    assert all(COLOUR_OF[noun] == colour for noun, colour in stated)


@pytest.mark.parametrize("held_out", [False, True])
def test_held_out_problems_never_leak_and_training_ones_are_never_tested(held_out):
    for text in texts(family="chains", held_out=held_out):
        assert is_held_out(question(text)) is held_out
    for text in texts(family="records", held_out=held_out):
        for name, value, stale, _, _ in PAIR.findall(text):
            assert is_held_out(f"{name} {value}") is held_out
            assert not is_held_out(f"{name} {stale}")
    for text in texts(family="lookups", held_out=held_out):
        stated = text.split(" ")
        for name, value in zip(stated[::2], stated[1::2], strict=True):
            assert is_held_out(f"{name} {value}") is held_out


def test_every_key_has_values_in_both_splits():
    of_records = [*(f"see {name}" for name in KEYS), *map(str, range(10))]
    for name in KEYS:
        for values in (of_records, VALUES):
            assert {is_held_out(f"{name} {value}") for value in values} == {False, True}


def test_facts_have_no_held_out_documents():
    with pytest.raises(ValidationError, match="'facts' has no held-out documents"):
        ReasoningSource(name="r", family="facts", held_out=True)


def test_documents_are_determined_by_the_seed():
    assert texts(family="chains", seed=1) == texts(family="chains", seed=1)
    assert texts(family="chains", seed=1) != texts(family="chains", seed=2)
    assert texts(family="chains", count=5) == texts(family="chains", count=9)[:5]


def test_without_a_count_there_is_no_end():
    endless = ReasoningSource(name="r", family="facts").documents(SourceContext(count_tokens=len))
    assert len(list(islice(endless, 300))) == 300


@pytest.mark.parametrize(
    "family", [make_facts, make_chain, make_knowledge, make_records, make_lookups]
)
def test_words_and_punctuation_are_separated(family):
    rng = Random(0)
    for _ in range(200):
        assert all(re.fullmatch(r"[A-Za-z]+|\d|[.,:?]", word) for word in family(rng).split(" "))
