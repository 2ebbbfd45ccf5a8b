import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paddock.kernels import fused_experts, grouped_gemm, moe_permute, workspace
from paddock.kernels.fused_experts.fused import MAX_ROWS
from paddock.kernels.swiglu import silu_and_mul
from paddock.kernels.topk import topk_indices
from tests.kernels.compiled import compiled

ROOT = Path(__file__).parents[2]


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
    stacks = torch.randn(2048, 4, 2), torch.randn(2048, 2, 2)  # few rows per expert, small experts
    for tokens, few in ((MAX_ROWS // 2, True), (MAX_ROWS // 2 + 1, False)):
        expert = torch.zeros(tokens, 2, dtype=torch.int64)
        assert fused_experts.is_supported(torch.randn(tokens, 2), expert, *stacks) == few


# --- the Triton kernel, interpreted and compiled --------------------------------------------------

linux = pytest.mark.skipif(sys.platform != "linux", reason="Triton runs on Linux alone")


def interpreted(file, *options):
    command = [sys.executable, "-m", "tests.kernels.fused_experts_cases", str(file), *options]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)
    return json.loads(file.read_text())


def check_interpreted(found):
    wrong = [name for name, equal in found["plans"].items() if not equal]
    assert found["plans"] and not wrong, wrong
    assert max(found["products"]) < 1e-6


@linux
def test_the_plan_is_a_stable_sort_by_expert_for_1_to_4096_rows(tmp_path):
    check_interpreted(interpreted(tmp_path / "found.json"))


@linux
@pytest.mark.slow
def test_the_plan_is_a_stable_sort_by_expert_for_more_sizes(tmp_path):
    check_interpreted(interpreted(tmp_path / "found.json", "--all"))


@linux
@pytest.mark.parametrize("experts", [8, 64, 256, 1024])
@pytest.mark.parametrize("rows", [16, 256, 4096])
def test_compiled_for_hopper_the_plan_does_not_spill(experts, rows, tmp_path):
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    from paddock.kernels.fused_experts import triton as kernels

    types = {"EXPERT": "*i64", "ROW": "*i32", "BLOCK": "*i32", "R": "i32", "N": "i32"}
    sizes = {"BM": kernels.BM, **kernels.plan_sizes(rows, experts)}
    assert compiled(kernels.plan_kernel, types, sizes, tmp_path, num_warps=4).spilled == 0
