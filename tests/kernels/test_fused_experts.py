import pytest
import torch

from paddock.kernels import fused_experts, grouped_gemm, moe_permute, workspace
from paddock.kernels.swiglu import silu_and_mul
from paddock.kernels.topk import topk_indices


@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 8, 2), (5, 8, 3), (30, 3, 2)])
def test_fused_experts_match_the_grouped_gemms(tokens, experts, k):
    wide = {"dtype": torch.float64}  # so that the order of summation does not matter
    x, weight = torch.randn(tokens, 10, **wide), torch.rand(tokens, k, **wide)
    stacks = torch.randn(experts, 12, 10, **wide), torch.randn(experts, 10, 6, **wide)
    expert = topk_indices(torch.randn(tokens, experts), k)
    order = moe_permute.sort_by_expert(expert, experts)
    both = grouped_gemm.grouped_gemm(moe_permute.permute(x, order), stacks[0], order.counts_E)
    answer = grouped_gemm.grouped_gemm(silu_and_mul(both), stacks[1], order.counts_E)
    expected = moe_permute.unpermute(answer, weight, order)
    found = fused_experts.fused_experts(x, expert, weight, *stacks)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_many_rows_large_experts_and_gradients_are_unsupported(monkeypatch):
    stacks = torch.randn(4, 12, 10), torch.randn(4, 10, 6)
    few, many = (torch.zeros(tokens, 2, dtype=torch.int64) for tokens in (8, 9))
    with torch.no_grad():
        assert fused_experts.is_supported(torch.randn(8, 10), few, *stacks)
        assert not fused_experts.is_supported(torch.randn(9, 10), many, *stacks)
        monkeypatch.setattr(workspace, "SCRATCH_BYTES", 4 * 16 * 180 - 1)
        assert not fused_experts.is_supported(torch.randn(8, 10), few, *stacks)
        monkeypatch.undo()
    assert not fused_experts.is_supported(torch.randn(8, 10), few, *stacks)


@torch.no_grad()
def test_too_many_rows_for_one_program_are_unsupported():
    stacks = torch.randn(128, 4, 2), torch.randn(128, 2, 2)  # few rows per expert, small experts
    for tokens, few in ((128, True), (129, False)):
        expert = torch.zeros(tokens, 2, dtype=torch.int64)
        assert fused_experts.is_supported(torch.randn(tokens, 2), expert, *stacks) == few
