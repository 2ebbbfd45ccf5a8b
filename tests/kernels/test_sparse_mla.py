import pytest
import torch

from paddock.kernels.sparse_mla import reference, sparse_mla


def inputs(T: int, S: int, H: int, C: int, K: int) -> tuple[torch.Tensor, ...]:
    index = torch.stack([torch.randperm(S)[:K].sort().values for _ in range(T)]).int()
    index[0, 1:] = -1  # a query with a single key
    query = torch.randn(T, H, C, dtype=torch.float64)
    return query, torch.randn(S, C, dtype=torch.float64), index


def test_it_is_attention_over_the_selected_rows():
    query, row, index = inputs(6, 9, 3, 5, 4)
    out = sparse_mla(query, row, index, scale=0.3, value=3)
    for t in range(6):
        kept = row[index[t][index[t] >= 0].long()]
        prob = (0.3 * query[t] @ kept.T).softmax(-1)
        torch.testing.assert_close(out[t], prob @ kept[:, :3])


@pytest.mark.parametrize("budget", [1, 1000])
def test_gradients_whatever_the_chunks(budget, monkeypatch):
    monkeypatch.setattr(reference, "scratch_bytes", lambda device: budget)
    query, row, index = inputs(4, 6, 2, 4, 3)
    leaves = (query.requires_grad_(), row.requires_grad_())
    assert torch.autograd.gradcheck(
        lambda q, r: sparse_mla(q, r, index, scale=0.5, value=3), leaves
    )


def test_padding_gets_neither_attention_nor_gradient():
    query, row, index = inputs(3, 6, 2, 4, 3)
    index[:, 0] = 2  # no query selects row 0, which padding points at
    index[:, 1:] = -1
    row.requires_grad_()
    sparse_mla(query, row, index, scale=0.5, value=4).sum().backward()
    assert torch.equal(row.grad[torch.arange(6) != 2], torch.zeros(5, 4, dtype=torch.float64))


def test_the_backward_saves_nothing_of_size_queries_times_heads_times_rows():
    T, S, H, C, K = 64, 512, 4, 8, 16
    query = torch.randn(T, H, C, requires_grad=True)
    row = torch.randn(S, C, requires_grad=True)
    index = torch.randint(0, S, (T, K)).int()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(x.numel()) or x, lambda x: x
    ):
        sparse_mla(query, row, index, scale=1.0, value=C)
    assert max(saved) <= max(T * H * C, S * C)


def test_half_precision_sums_are_float32():
    query, row, index = inputs(5, 9, 2, 16, 4)
    exact = sparse_mla(query, row, index, scale=0.25, value=16)
    half = sparse_mla(query.bfloat16(), row.bfloat16(), index, scale=0.25, value=16)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), exact, atol=0.05, rtol=0.05)
