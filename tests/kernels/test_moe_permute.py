import torch

from paddock.kernels.moe_permute import count_tokens_per_expert, permute, sort_by_expert, unpermute
from paddock.kernels.topk import topk_indices


def routed(tokens=50, experts=6, k=3):
    torch.manual_seed(0)
    return topk_indices(torch.randn(tokens, experts), k)


def test_rows_are_sorted_by_expert_then_token():
    expert_TK = routed()
    order = sort_by_expert(expert_TK, 6)
    expert_R = expert_TK.flatten()[order.slot_TK.flatten().argsort()]
    assert expert_R.tolist() == sorted(expert_R.tolist())
    for expert in range(6):
        tokens = order.token_R[expert_R == expert]
        assert tokens.tolist() == (expert_TK == expert).any(1).nonzero().flatten().tolist()
    assert order.counts_E.tolist() == [(expert_R == e).sum() for e in range(6)]


def test_an_unselected_expert_has_no_rows():
    expert_TK = torch.tensor([[0, 3], [3, 4]])
    assert count_tokens_per_expert(expert_TK, 6).tolist() == [1, 0, 0, 2, 1, 0]
    assert sort_by_expert(expert_TK, 6).counts_E.tolist() == [1, 0, 0, 2, 1, 0]


def test_unpermute_inverts_permute():
    order = sort_by_expert(routed(), 6)
    x, weight = torch.randn(50, 4), torch.rand(50, 3)
    torch.testing.assert_close(
        unpermute(permute(x, order), weight, order), x * weight.sum(1, keepdim=True)
    )


def test_gradients():
    order = sort_by_expert(routed(7, 4, 2), 4)
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    answer = torch.randn(14, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(7, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: permute(x, order), x)
    assert torch.autograd.gradcheck(lambda a, w: unpermute(a, w, order), (answer, weight))
