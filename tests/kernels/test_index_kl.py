import pytest
import torch

from paddock.kernels.index_kl import (
    IndexerInputs,
    IndexerTarget,
    index_kl,
    index_kl_topk,
    reference,
)
from paddock.kernels.index_scores import index_scores
from paddock.kernels.spans import Span

SPANS = (Span(0, 4, 0, 4), Span(4, 3, 4, 5))


def sides(T=7, S=9, H=2, D=3, C=5):
    index = IndexerInputs(
        torch.randn(T, H, D, dtype=torch.float64),
        torch.randn(S, D, dtype=torch.float64),
        torch.rand(T, H, dtype=torch.float64),
    )
    attention = IndexerTarget(
        torch.randn(T, 4, C, dtype=torch.float64), torch.randn(S, C, dtype=torch.float64), 0.5
    )
    return index, attention


def by_hand(index, attention, kept):
    """Sum over queries of KL(mean attention || softmax of index scores) over `kept` keys."""
    score = index_scores(*index)
    total = 0.0
    for t, keys in enumerate(kept):
        logits = attention.scale * attention.query_THC[t] @ attention.row_SC[keys].T
        target = logits.softmax(-1).mean(0)
        total += (target * (target.log() - score[t, keys].log_softmax(-1))).sum()
    return total


def visible(spans):
    return [list(range(s.key, s.key + s.past + i + 1)) for s in spans for i in range(s.queries)]


@pytest.mark.parametrize("budget", [1, 1 << 20])
def test_the_dense_loss_is_over_every_visible_key(budget, monkeypatch):
    monkeypatch.setattr(reference, "scratch_bytes", lambda device: budget)
    index, attention = sides()
    expected = by_hand(index, attention, visible(SPANS))
    torch.testing.assert_close(index_kl(index, attention, SPANS), expected)


def test_the_sparse_loss_is_over_the_kept_keys():
    index, attention = sides()
    kept = [[0], [0, 1], [1, 2], [0, 3], [4, 6], [5, 7], [4, 8]]
    table = torch.tensor([row + [-1] * (2 - len(row)) for row in kept], dtype=torch.int32)
    found = index_kl_topk(index, attention, table)
    torch.testing.assert_close(found, by_hand(index, attention, kept))


def test_a_perfect_indexer_has_zero_loss():
    index, attention = sides()
    uniform_target = IndexerTarget(attention.query_THC[:, :1] * 0, attention.row_SC, 1.0)
    even = IndexerInputs(index.query_THD, index.key_SD, index.weight_TH * 0)
    assert float(index_kl(even, uniform_target, SPANS)) == pytest.approx(0.0, abs=1e-12)


def test_gradients_reach_the_indexer():
    index, attention = sides()
    leaves = tuple(x.requires_grad_() for x in index)
    table = torch.tensor([[0, -1], [0, 1], [1, 2], [0, 3], [4, 6], [5, 7], [4, 8]]).int()
    assert torch.autograd.gradcheck(
        lambda *x: index_kl(IndexerInputs(*x), attention, SPANS), leaves
    )
    assert torch.autograd.gradcheck(
        lambda *x: index_kl_topk(IndexerInputs(*x), attention, table), leaves
    )


def test_gradients_do_not_reach_the_attention():
    index, attention = sides()
    index = IndexerInputs(*(x.requires_grad_() for x in index))
    teacher = IndexerTarget(
        attention.query_THC.requires_grad_(), attention.row_SC.requires_grad_(), 0.5
    )
    index_kl(index, teacher, SPANS).backward()
    assert index.key_SD.grad is not None
    assert teacher.query_THC.grad is None
    assert teacher.row_SC.grad is None
