import pytest
import torch

from paddock.kernels import workspace
from paddock.kernels.dense_attention import dense_attention, topk_masked_attention
from paddock.kernels.spans import Span

SPANS = {
    "one document": (Span(0, 9, 0, 9),),
    "documents of many lengths": (
        Span(0, 9, 0, 9),
        Span(9, 2, 9, 2),
        Span(11, 8, 11, 8),
        Span(19, 1, 19, 1),
    ),
    "a decode step": (Span(0, 1, 0, 6), Span(1, 1, 6, 4)),
    "a prefill chunk with decodes": (
        Span(0, 1, 0, 6),
        Span(1, 4, 6, 11),
        Span(5, 5, 17, 5),
    ),
}


def by_hand(query, key, value, spans, scale, window=None):
    out = []
    groups = query.shape[1] // key.shape[1]
    for span in spans:
        for i in range(span.queries):
            last = span.key + span.past + i + 1
            first = span.key if window is None else max(span.key, last - window)
            k = key[first:last].repeat_interleave(groups, 1)
            v = value[first:last].repeat_interleave(groups, 1)
            prob = torch.einsum("hd,shd->hs", query[span.query + i] * scale, k).softmax(-1)
            out.append(torch.einsum("hs,shv->hv", prob, v))
    return torch.stack(out)


def inputs(spans, heads=4, key_heads=4, dim=6, value=6):
    T = max(s.query + s.queries for s in spans)
    S = max(s.key + s.keys for s in spans)
    return (
        torch.randn(T, heads, dim, dtype=torch.float64),
        torch.randn(S, key_heads, dim, dtype=torch.float64),
        torch.randn(S, key_heads, value, dtype=torch.float64),
    )


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_each_query_attends_to_its_own_past(spans, window):
    q, k, v = inputs(spans)
    found = dense_attention(q, k, v, spans, scale=0.3, window=window)
    torch.testing.assert_close(found, by_hand(q, k, v, spans, 0.3, window))


@pytest.mark.parametrize(("dim", "value"), [(4, 6), (6, 4)])
def test_values_may_be_wider_or_narrower_than_keys(dim, value):
    spans = SPANS["a prefill chunk with decodes"]
    q, k, v = inputs(spans, key_heads=2, dim=dim, value=value)
    found = dense_attention(q, k, v, spans, scale=0.3)
    torch.testing.assert_close(found, by_hand(q, k, v, spans, 0.3))


def test_chunked_masks_give_the_same_result(monkeypatch):
    spans = (Span(0, 9, 0, 30),)
    q, k, v = inputs(spans)
    monkeypatch.setattr(workspace.chunks, "__defaults__", (250,))
    found = dense_attention(q, k, v, spans, scale=0.3)
    torch.testing.assert_close(found, by_hand(q, k, v, spans, 0.3))


@pytest.mark.parametrize("window", [None, 2])
def test_gradients(window):
    spans = (Span(0, 3, 0, 3), Span(3, 2, 3, 2), Span(5, 2, 5, 4))
    leaves = tuple(x.requires_grad_() for x in inputs(spans, 2, 1, 3, 3))
    assert torch.autograd.gradcheck(
        lambda q, k, v: dense_attention(q, k, v, spans, scale=0.5, window=window), leaves
    )


def test_topk_masked_attention_sees_only_the_selected_keys():
    spans = (Span(0, 9, 0, 9), Span(9, 2, 9, 2), Span(11, 8, 11, 8))
    q, k, v = inputs(spans)
    index = torch.full((19, 3), -1, dtype=torch.int32)
    expected = by_hand(q, k, v, spans, 0.3)
    for t, kept in {5: [0, 2, 5], 8: [1, 4], 18: [11, 12, 18]}.items():
        index[t, : len(kept)] = torch.tensor(kept)
        prob = torch.einsum("hd,shd->hs", q[t] * 0.3, k[kept]).softmax(-1)
        expected[t] = torch.einsum("hs,shv->hv", prob, v[kept])
    torch.testing.assert_close(topk_masked_attention(q, k, v, spans, index, scale=0.3), expected)


def test_gradients_of_topk_masked_attention():
    spans = (Span(0, 4, 0, 4), Span(4, 3, 4, 3))
    leaves = tuple(x.requires_grad_() for x in inputs(spans, 2, 2, 3, 2))
    index = torch.tensor([[-1, -1], [-1, -1], [0, 2], [1, 3], [-1, -1], [-1, -1], [4, 6]]).int()
    assert torch.autograd.gradcheck(
        lambda q, k, v: topk_masked_attention(q, k, v, spans, index, scale=0.5), leaves
    )
