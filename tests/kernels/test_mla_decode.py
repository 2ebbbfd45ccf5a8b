import pytest
import torch

from paddock.kernels import workspace
from paddock.kernels.block_table import BlockTable
from paddock.kernels.mla_decode import fused, mla_decode, mla_paged_decode, reference
from paddock.kernels.spans import Span
from paddock.kernels.sparse_mla import sparse_mla


def test_dense_decode_equals_sparse_decode_of_every_key():
    query, row = torch.randn(5, 3, 6), torch.randn(14, 6)
    spans = (Span(0, 2, 0, 9), Span(2, 3, 9, 5))
    dense = mla_decode(query, row, spans, scale=0.4, value=4)
    index = torch.full((5, 9), -1, dtype=torch.int32)
    for t, (first, last) in enumerate([(0, 8), (0, 9), (9, 12), (9, 13), (9, 14)]):
        index[t, : last - first] = torch.arange(first, last)
    torch.testing.assert_close(dense, sparse_mla(query, row, index, scale=0.4, value=4))


def test_every_key_can_be_listed_unless_there_are_too_many(monkeypatch):
    query, row = torch.randn(7, 3, 6), torch.randn(20, 6)
    spans = (Span(4, 3, 2, 9), Span(0, 1, 11, 1), Span(1, 2, 12, 5))  # in any order
    expected = reference.mla_decode(query, row, spans, scale=0.4, value=4)
    found = fused.mla_decode(query, row, spans, scale=0.4, value=4)
    torch.testing.assert_close(found, expected)
    assert fused.lists(spans)
    monkeypatch.setattr(fused, "MAX_LISTED_KEYS", 6 * 9 - 1)
    assert not fused.lists(spans)
    assert not fused.lists(())


@pytest.mark.parametrize("scratch_bytes", [1, 8 << 20])
def test_paged_decode_matches_spans(monkeypatch, scratch_bytes):
    monkeypatch.setattr(workspace, "SCRATCH_BYTES", scratch_bytes)
    past = torch.tensor([0, 7, 3])
    query, stored = torch.randn(3, 2, 4, 6), torch.randn(40, 6)
    table = torch.stack([torch.randperm(40)[:9] for _ in range(3)])
    visible = past.unsqueeze(1) + torch.tensor([1, 2])
    got = mla_paged_decode(query, stored, BlockTable(table, 1), visible, scale=0.4, value=4)
    for b in range(3):
        span = Span(0, 2, 0, int(past[b]) + 2)
        alone = mla_decode(query[b], stored[table[b]], [span], scale=0.4, value=4)
        torch.testing.assert_close(got[b], alone)


def test_gradients():
    query = torch.randn(4, 2, 5, dtype=torch.float64, requires_grad=True)
    row = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    spans = (Span(0, 1, 0, 3), Span(1, 3, 3, 3))
    assert torch.autograd.gradcheck(
        lambda q, r: mla_decode(q, r, spans, scale=0.5, value=3), (query, row)
    )
