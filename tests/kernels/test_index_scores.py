import pytest
import torch

from paddock.kernels.index_scores import index_scores, reference


def inputs(T: int, S: int, H: int, D: int) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(T, H, D, dtype=torch.float64),
        torch.randn(S, D, dtype=torch.float64),
        torch.randn(T, H, dtype=torch.float64),
    )


def test_a_score_is_a_weighted_sum_of_relu_matches():
    query, key, weight = inputs(5, 7, 3, 4)
    score = index_scores(query, key, weight)
    for t in range(5):
        for s in range(7):
            expected = sum(weight[t, h] * max(float(query[t, h] @ key[s]), 0.0) for h in range(3))
            torch.testing.assert_close(score[t, s], expected)


@pytest.mark.parametrize("budget", [1, 300, 1 << 20])
def test_chunks_do_not_change_the_scores(budget, monkeypatch):
    query, key, weight = inputs(9, 11, 3, 4)
    whole = index_scores(query, key, weight)
    monkeypatch.setattr(reference, "scratch_bytes", lambda device: budget)
    torch.testing.assert_close(index_scores(query, key, weight), whole)


def test_half_precision_inputs_are_scored_in_float32():
    query, key, weight = (x.bfloat16() for x in inputs(4, 6, 2, 8))
    score = index_scores(query, key, weight)
    assert score.dtype == torch.float32
    torch.testing.assert_close(score, index_scores(query.float(), key.float(), weight.float()))


def test_gradients():
    leaves = tuple(x.requires_grad_() for x in inputs(4, 5, 2, 3))
    assert torch.autograd.gradcheck(index_scores, leaves)
