"""The sparse MLA kernels on a GPU against float64, query by query.

T queries, S rows, H heads, V value columns, R the columns after them, K slots.
"""

from dataclasses import replace

import pytest
import torch

from paddock.kernels.sparse_mla import fused, reference, sparse_mla
from paddock.kernels.sparse_mla.problem import Problem
from tests.kernels.sparse_mla_cases import LENGTHS, Case, exact

pytestmark = pytest.mark.gpu

GLM5 = Case(T=24, S=4096, H=64, V=512, R=64, K=2048, shared=0.5)
SMALL = Case(T=40, S=4096, H=16, V=256, R=64, K=1024, shared=0.5)
FORWARD, BACKWARD = 5e-3, 1e-2  # relative to the norm; bfloat16 rounds to 2e-3


def kernels_of(name: str):
    """(forward, backward) of a backend."""
    from paddock.kernels.sparse_mla import triton

    if name == "triton":
        return triton.forward, triton.backward
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels are for Hopper chips")
    from paddock.kernels.sparse_mla import gluon, gluon_backward

    united = "united" in name

    def backward(*given, deterministic):
        return gluon_backward.backward(*given, deterministic=deterministic, united=united)

    return lambda p: gluon.forward(p, united=united), backward


def poison() -> None:
    """Leave NaN in the memory that the next outputs will be allocated from."""
    blocks = [torch.full((n,), float("nan"), device="cuda") for n in (1 << 22, 1 << 20, 1 << 16)]
    small = [torch.full((1 << 12,), float("nan"), device="cuda") for _ in range(64)]
    del blocks, small


def worst(found: torch.Tensor, right: torch.Tensor) -> float:
    """The largest error of a query, relative to its norm or to a tenth of the median norm."""
    found, right = found.double().flatten(1), right.flatten(1)
    norm = right.norm(dim=1)
    error = (found - right).norm(dim=1) / norm.clamp(min=0.1 * norm.median().item())
    return float(error.nan_to_num(nan=9e9).max())


def relative(found: torch.Tensor, right: torch.Tensor) -> float:
    error = (found.double() - right).norm() / right.norm()
    return float(error.nan_to_num(nan=9e9))


def assert_correct(name: str, case: Case) -> None:
    forward, backward = kernels_of(name)
    problem = case.problem(torch.bfloat16, "cuda")
    grad = case.grad(torch.bfloat16, "cuda")
    right, dquery, drow = exact(case, problem)
    poison()
    found = forward(problem)
    assert worst(found.out_THV, right.out_THV) < 2 * FORWARD
    assert relative(found.out_THV, right.out_THV) < FORWARD
    torch.testing.assert_close(found.lse_TH.double(), right.lse_TH, atol=1e-4, rtol=1e-5)
    for deterministic in (False, True):
        poison()
        ours, rows = backward(problem, found, grad, deterministic=deterministic)
        assert relative(ours, dquery) < BACKWARD
        assert worst(ours, dquery) < 3 * BACKWARD
        assert relative(rows, drow) < BACKWARD
    twice = [forward(problem) for _ in range(2)]
    assert torch.equal(twice[0].out_THV, twice[1].out_THV)
    assert torch.equal(twice[0].lse_TH, twice[1].lse_TH)
    grads = [backward(problem, found, grad, deterministic=False)[0] for _ in range(2)]
    assert torch.equal(*grads)
    both = [backward(problem, found, grad, deterministic=True) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


@pytest.mark.parametrize(
    "case",
    [
        GLM5,
        SMALL,
        replace(SMALL, gaps=True, K=900),
        replace(GLM5, H=8, K=512),
        replace(GLM5, H=128, K=512),
        Case(T=20, S=300, H=4, V=48, R=12, K=64),
        Case(T=12, S=300, H=5, V=32, R=0, K=100),
    ],
    ids=["glm5", "small", "gaps", "8 heads", "128 heads", "nano", "no rope"],
)
def test_triton_matches_float64(case):
    assert_correct("triton", case)


@pytest.mark.parametrize(
    "case", [GLM5, replace(GLM5, H=128, K=300)], ids=["glm5", "128 heads and a tile not full"]
)
def test_gluon_matches_float64(case):
    assert_correct("gluon", case)


@pytest.mark.parametrize("heads", [16, 64, 96])
def test_gluon_pads_other_head_counts_and_leaves_gaps_out(heads):
    assert_correct("gluon", replace(GLM5, H=heads, K=512, gaps=True))


@pytest.mark.parametrize(
    "case",
    [SMALL, replace(SMALL, gaps=True, K=900), replace(GLM5, H=8), replace(GLM5, H=32, K=600)],
    ids=["small", "gaps", "8 heads", "32 heads"],
)
def test_gluon_with_shared_lists_matches_float64(case):
    assert_correct("gluon united", case)


@pytest.mark.parametrize("length", [1, 2, 17, 64, 65, 100, 128, 150, 192, 193])
@pytest.mark.parametrize("arm", ["gluon", "triton"])
def test_rows_of_one_length(length, arm):
    """Only short rows: longer neighbours cannot hide a read that comes too early."""
    forward, _ = kernels_of(arm)
    case = Case(T=len(LENGTHS) + 300, S=500, H=64, V=512, R=64, K=256)
    problem = case.problem(torch.bfloat16, "cuda")
    index = problem.index_TK[len(LENGTHS) :].clone()
    index[:, length:] = -1
    problem = replace(problem, query_THC=problem.query_THC[len(LENGTHS) :], index_TK=index)
    right, _, _ = exact(replace(case, T=300), problem)
    poison()
    assert worst(forward(problem).out_THV, right.out_THV) < 2 * FORWARD


@pytest.mark.parametrize("case", [GLM5, SMALL], ids=["glm5", "small"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_sparse_mla_forward_and_backward_match_float64(case, deterministic):
    problem = case.problem(torch.bfloat16, "cuda")
    assert fused.suits(problem)
    grad = case.grad(torch.bfloat16, "cuda").mT.contiguous().mT  # not in the usual order
    leaves = problem.query_THC.requires_grad_(), problem.row_SC.requires_grad_()
    out = sparse_mla(
        *leaves,
        problem.index_TK,
        scale=problem.scale,
        value=problem.value,
        deterministic=deterministic,
    )
    found = torch.autograd.grad(out, leaves, grad)
    right, dquery, drow = exact(case, problem)
    assert relative(out.detach(), right.out_THV) < FORWARD
    assert relative(found[0], dquery) < BACKWARD
    assert relative(found[1], drow) < BACKWARD


def test_other_dtypes_use_the_reference():
    case = Case(T=5, S=50, H=2, V=16, R=16, K=8)
    problem = case.problem(torch.float32, "cuda")
    assert not fused.suits(problem)
    given = (problem.query_THC, problem.row_SC, problem.index_TK)
    out = sparse_mla(*given, scale=problem.scale, value=16)
    assert torch.equal(out, reference.sparse_mla(*given, scale=problem.scale, value=16))


def far(queries: int, rows: int, heads: int) -> Problem:
    """Tensors of more than 2^31 elements, with selected rows at both ends."""
    torch.manual_seed(0)
    query = torch.empty(queries, heads, 576, device="cuda", dtype=torch.bfloat16)
    row = torch.empty(rows, 576, device="cuda", dtype=torch.bfloat16)
    for tensor in (query, row):
        flat = tensor.view(-1)
        flat[: 1 << 24].normal_()
        flat[1 << 24 : -(1 << 24)] = 0
        flat[-(1 << 24) :].normal_()
    ends = torch.cat((torch.arange(40), torch.arange(rows - 40, rows))).int()
    return Problem(query, row, ends.cuda().expand(queries, 80).contiguous(), 0.05, 512)


@pytest.mark.parametrize("arm", ["triton", "gluon"])
@pytest.mark.parametrize(("queries", "rows"), [(60_000, 500), (24, 4_000_000)])
def test_offsets_beyond_32_bits(arm, queries, rows):
    forward, backward = kernels_of(arm)
    problem = far(queries, rows, heads=64)
    last = slice(-8, None)
    found = forward(problem)
    few = replace(problem, query_THC=problem.query_THC[last], index_TK=problem.index_TK[last])
    case = Case(T=8, S=rows, H=64, V=512, R=64, K=80)
    right = reference.sparse_mla(
        few.query_THC.float(), few.row_SC, few.index_TK, scale=few.scale, value=512
    )
    assert worst(found.out_THV[last], right.double()) < 2 * FORWARD
    grad = torch.zeros_like(found.out_THV)
    grad[last] = case.grad(torch.bfloat16, "cuda")
    dquery, drow = backward(problem, found, grad, deterministic=False)
    leaves = few.query_THC.float().requires_grad_(), problem.row_SC.clone().requires_grad_()
    out = reference.sparse_mla(*leaves, few.index_TK, scale=few.scale, value=512)
    expected = torch.autograd.grad(out, leaves, grad[last].float())
    assert relative(dquery[last], expected[0].double()) < BACKWARD
    ends = few.index_TK[0].long()
    assert relative(drow[ends], expected[1][ends].double()) < BACKWARD
    assert not bool(dquery[:-8].any())
