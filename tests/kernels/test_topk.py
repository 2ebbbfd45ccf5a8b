from math import isnan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paddock.kernels.index_scores import index_scores
from paddock.kernels.topk import index_topk, reference, topk, topk_indices


def by_hand(scores: list[float], visible: int, k: int) -> list[int]:
    worth = [float("-inf") if isnan(score) else score for score in scores]
    order = sorted(range(visible), key=lambda s: (-worth[s], s))
    kept = sorted(order[:k])
    return kept + [-1] * (k - len(kept))


# Few distinct values, so that ties are everywhere; -0.0 must tie with 0.0.
tied = st.sampled_from([-1.5, -0.0, 0.0, 0.25, 3.0])


@given(st.lists(st.lists(tied, min_size=7, max_size=7), min_size=1, max_size=4), st.data())
def test_ties_go_to_the_lowest_index(rows, data):
    visible = [data.draw(st.integers(1, 7)) for _ in rows]
    k = data.draw(st.integers(1, 9))
    found = topk(torch.tensor(rows), torch.tensor(visible), k)
    assert found.dtype == torch.int32
    assert found.tolist() == [by_hand(row, n, k) for row, n in zip(rows, visible, strict=True)]


@given(st.lists(st.lists(tied, min_size=7, max_size=7), min_size=1, max_size=4), st.integers(1, 6))
def test_both_algorithms_find_the_same_indices(rows, k):
    scores = torch.tensor(rows)
    assert torch.equal(reference._by_topk(scores, k), reference._by_partition(scores, k))


def test_one_tie_in_one_row_does_not_disturb_the_others():
    scores = torch.tensor([[3.0, 1.0, 2.0, 1.0], [0.1, 0.2, 0.3, 0.4]])
    assert topk_indices(scores, 3).tolist() == [[0, 1, 2], [1, 2, 3]]


@pytest.mark.parametrize("find", [reference._by_topk, reference._by_partition])
def test_a_row_of_nan_still_gets_indices(find):
    nan = float("nan")
    scores = torch.tensor([[nan] * 3, [1.0, nan, 2.0], [1.0, 3.0, 2.0]])
    assert find(scores, 2).tolist() == [[0, 1], [0, 2], [1, 2]]


@pytest.mark.parametrize("find", [reference._by_topk, reference._by_partition])
def test_a_row_of_nan_does_not_hide_a_tie_in_another(find):
    """One row keeps too few and the other too many; the total is as expected."""
    scores = torch.tensor([[5.0, 3.0, 3.0, 1.0], [float("nan"), 5.0, 3.0, 1.0]])
    assert find(scores, 2).tolist() == [[0, 1], [1, 2]]


strange = st.sampled_from([float("nan"), float("inf"), float("-inf"), 0.0, 1.0])


@given(st.lists(st.lists(strange, min_size=7, max_size=7), min_size=1, max_size=12), st.data())
def test_the_tie_rule_holds_with_nan_scores(rows, data):
    visible = [data.draw(st.integers(1, 7)) for _ in rows]
    k = data.draw(st.integers(1, 6))
    scores = torch.tensor(rows)
    found = topk(scores, torch.tensor(visible), k).tolist()
    assert found == [by_hand(row, n, k) for row, n in zip(rows, visible, strict=True)]
    for find in (reference._by_topk, reference._by_partition):
        assert find(scores, k).tolist() == [by_hand(row, 7, k) for row in rows]


def test_scoring_and_selecting_in_chunks_is_selecting_from_all_scores():
    query, key = torch.randn(40, 2, 4), torch.randn(47, 4)
    weight = torch.randn(40, 2)
    score = index_scores(query, key, weight)
    expected = topk(score, torch.arange(8, 48), 5)
    assert torch.equal(index_topk(query, key, weight, past=7, k=5), expected)


def test_a_later_key_never_changes_an_earlier_selection():
    query, key, weight = torch.randn(20, 2, 4), torch.randn(20, 4), torch.randn(20, 2)
    before = index_topk(query, key, weight, past=0, k=4)
    key[12:] = 100.0
    assert torch.equal(index_topk(query, key, weight, past=0, k=4)[:12], before[:12])
