from itertools import count
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.data.mixture import DocumentSpan
from paddock.data.packing import (
    PACKERS,
    PackingLimits,
    pack_best_fit,
    pack_rows,
    pack_truncating,
    shard_rows,
)

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def endless(lengths):
    """Documents of these lengths, repeated, each with its own number."""
    numbers = count()

    def draw():
        number = next(numbers)
        return DocumentSpan("a", number, 0, lengths[number % len(lengths)])

    return draw


def batches(pack, lengths, shape, number):
    waiting, found = [], []
    draw = endless(lengths)
    for _ in range(number):
        found.append(pack(draw, waiting, shape))
        waiting = found[-1].carried_over
    return found


def covered(pieces):
    """The tokens of these pieces by document, in order."""
    found = {}
    for piece in pieces:
        found.setdefault(piece.document, []).extend(range(piece.start, piece.stop))
    return {document: sorted(tokens) for document, tokens in found.items()}


@pytest.mark.parametrize("pack", [pack_truncating, pack_best_fit])
@given(lengths=LENGTHS)
def test_every_token_comes_exactly_once(pack, lengths):
    found = batches(pack, lengths, PackingLimits(seq_len=16, tokens=64), 5)
    pieces = [piece for batch in found for row in batch.rows for piece in row]
    tokens = covered([*pieces, *found[-1].carried_over])
    assert all(tokens[d] == list(range(lengths[d % len(lengths)])) for d in tokens)
    assert sorted(tokens) == list(range(len(tokens)))


@pytest.mark.parametrize("name", PACKERS)
@given(lengths=LENGTHS)
def test_no_row_and_no_batch_is_too_long(name, lengths):
    for batch in batches(PACKERS[name], lengths, PackingLimits(seq_len=16, tokens=64), 5):
        sizes = [sum(map(len, row)) for row in batch.rows]
        assert max(sizes) <= 16 and sum(sizes) <= 64


@given(LENGTHS)
def test_truncated_rows_are_full(lengths):
    for batch in batches(pack_truncating, lengths, PackingLimits(seq_len=16, tokens=64), 5):
        assert [sum(map(len, row)) for row in batch.rows] == [16] * 4


def test_truncation_takes_one_row_of_a_document_per_batch():
    [batch] = batches(pack_truncating, [1000], PackingLimits(seq_len=16, tokens=64), 1)
    assert [row[0].document for row in batch.rows] == [0, 1, 2, 3]


@given(LENGTHS)
def test_best_fit_splits_nothing_that_fits(lengths):
    found = batches(pack_best_fit, lengths, PackingLimits(seq_len=16, tokens=64), 5)
    for piece in (piece for batch in found for row in batch.rows for piece in row):
        length = lengths[piece.document % len(lengths)]
        assert (piece.start, piece.stop) == (0, length) or length > 16
        assert piece.start % 16 == 0


def test_documents_longer_than_a_row_are_split_and_counted():
    [batch] = batches(
        pack_best_fit, [40, 8, 8], PackingLimits(seq_len=16, tokens=64, lookahead=0), 1
    )
    assert batch.split_documents == 2  # 40 8 8 40
    pieces = sorted((p.document, p.start, p.stop) for row in batch.rows for p in row)
    assert pieces[:3] == [(0, 0, 16), (0, 16, 32), (0, 32, 40)]


def test_best_fit_wastes_little():
    rng = Random(0)
    lengths = [min(4096, int(rng.lognormvariate(6, 1.2)) + 2) for _ in range(5000)]
    found = batches(pack_best_fit, lengths, PackingLimits(seq_len=4096, tokens=65536), 20)
    used = sum(len(piece) for batch in found for row in batch.rows for piece in row)
    assert used / (20 * 65536) > 0.995


def test_best_fit_delays_no_document_indefinitely():
    lengths = [9] * 10 + [5] * 3  # a row of twelve takes one nine and no five with it
    found = batches(pack_best_fit, lengths, PackingLimits(seq_len=12, tokens=48), 60)
    waiting = [piece.document for piece in found[-1].carried_over]
    assert max(waiting) - min(waiting) < 30 < max(waiting)


@given(LENGTHS)
def test_rows_hold_whole_documents_or_their_beginnings(lengths):
    found = batches(pack_rows, lengths, PackingLimits(seq_len=16, tokens=64), 5)
    pieces = [row for batch in found for row in batch.rows]
    assert [piece.document for [piece] in pieces] == list(range(len(pieces)))
    expected = [min(16, lengths[i % len(lengths)]) for i in range(len(pieces))]
    assert [(p.start, p.stop) for [p] in pieces] == [(0, length) for length in expected]
    cut = sum(lengths[i % len(lengths)] for i in range(len(pieces))) - sum(expected)
    assert sum(batch.dropped_tokens for batch in found) == cut


@given(LENGTHS, st.integers(1, 8))
def test_ranks_share_the_rows_and_the_work(lengths, world):
    batch = [[DocumentSpan("a", i, 0, length)] for i, length in enumerate(lengths)]
    shares = [shard_rows(batch, rank=rank, world_size=world) for rank in range(world)]
    assert sorted(row[0].document for rows in shares for row in rows) == list(range(len(batch)))
    loads = [sum(len(row[0]) for row in rows) for rows in shares]
    assert max(loads) - min(loads) <= max(lengths)
