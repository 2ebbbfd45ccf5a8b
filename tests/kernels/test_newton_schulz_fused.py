"""The Gram form of Newton-Schulz against float64 and against the reference in bfloat16."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paddock.kernels.newton_schulz import XTUNER, fused, newton_schulz, reference
from paddock.kernels.newton_schulz.fused import (
    DEPTH,
    HALF_FROM,
    SCALE,
    TILE,
    pays,
    phases,
    triangle,
)
from tests.kernels.compiled import compiled
from tests.kernels.newton_schulz_cases import (
    COEFFICIENTS,
    KINDS,
    PRODUCTS,
    ROUNDED,
    STACKS,
    error,
    matrix,
    singular_values,
)

ROOT = Path(__file__).parents[2]
HALF = {"steps": 5, "dtype": torch.bfloat16}


def plan(steps):
    return [len(triples) for triples, _ in phases(XTUNER, steps)]


def test_the_gram_matrix_is_recomputed_after_two_steps_and_then_three():
    assert [plan(steps) for steps in (1, 2, 3, 5, 6, 9)] == [
        [1], [2], [2, 1], [2, 3], [2, 3, 1], [2, 3, 3, 1],
    ]  # fmt: skip
    taken = [triple for triples, _ in phases(XTUNER, 7) for triple in triples]
    assert taken[1:] == [*XTUNER[1:], XTUNER[-1], XTUNER[-1]]
    assert taken[0] == tuple(x / SCALE**n for x, n in zip(XTUNER[0], (1, 3, 5), strict=True))
    assert [last for _, last in phases(XTUNER, 6)] == [False, False, True]


def test_tiles_are_those_that_touch_the_lower_triangle():
    for M in (1, 128, 129, 256, 600, 6144):
        starts = range(0, M, TILE)
        touching = [(i, j) for i in starts for j in starts if j <= min(i + TILE, M) - 1]
        assert triangle(M) == len(touching)


def test_entries_far_below_the_norm_are_more_precise_than_bfloat16():
    update = matrix("one loud entry", 100, 300).unsqueeze(0)
    quiet = update[0, 1:].double()
    found = fused.normalized(update, 1e-7, torch.float16)[0, 1:].double() / SCALE
    assert error(found * update.double().norm(), quiet) < 0.3 * error(quiet.bfloat16(), quiet)


def test_the_square_of_the_first_gram_matrix_stays_within_float16():
    """Its partial sums too: those of a rank-one matrix all fall on one entry."""
    alone = torch.zeros(1, 20, 30).index_put_((*torch.zeros(3, 1).long(),), torch.tensor(7.0))
    gram = fused.whole(*[fused.normalized(alone, 1e-7, torch.float16)] * 2, None)
    assert gram.max() ** 2 < torch.finfo(torch.float16).max


def test_the_reference_is_used_where_it_was_measured_to_be_faster():
    faster = [(1, 6144, 16384), (1, 6144, 6144), (16, 2048, 6144), (1, 2048, 6144)]
    faster += [(64, 256, 6144), (1, 128, 2048)]
    assert all(pays(*stack) for stack in faster)
    slower = [(64, 256, 2048), (64, 192, 512), (1, 576, 6144), (16, 2048, 2048)]
    assert not any(pays(*stack) for stack in [*slower, (4, 100, 9000), (0, 128, 2048)])


def test_the_cpu_uses_the_reference():
    assert not fused.suits(torch.zeros(128, 2048), torch.bfloat16, 5)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """Results of the Gram form in float16 for all cases."""
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    file = tmp_path_factory.mktemp("orthogonal") / "found.pt"
    command = [sys.executable, "-m", "tests.kernels.newton_schulz_cases", str(file)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)
    return torch.load(file)


@pytest.mark.parametrize("name", PRODUCTS)
def test_one_triangle_is_computed_and_mirrored(name, interpreted):
    found, case = interpreted["product", name], PRODUCTS[name]
    assert torch.equal(found, found.mT)
    torch.testing.assert_close(found.double(), case.exact(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in PRODUCTS if name.startswith("a polynomial")])
def test_library_products_compute_the_same_polynomial(name):
    case = PRODUCTS[name]
    found = fused.product(*case.factors(), case.triple)
    torch.testing.assert_close(found.tril().double(), case.exact().tril(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", STACKS)
def test_in_float32_the_kernel_matches_the_reference(name, interpreted):
    case = STACKS[name]
    whole = fused.newton_schulz(case.update(), **case.how, dtype=torch.float32)
    for found in (interpreted["stack", name], whole):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), case.exact(), rtol=0, atol=2e-5)


def test_zeros_stay_zeros(interpreted):
    assert interpreted["nothing",].count_nonzero() == 0
    whole = fused.newton_schulz(torch.zeros(2, 20, 30), **STACKS["wide"].how)
    assert whole.count_nonzero() == 0


def assert_no_worse(found, by_reference, exact):
    """Closer to the exact result than the reference in bfloat16, with no singular value outside
    its range."""
    assert error(found, exact) <= error(by_reference, exact)
    values, theirs, right = map(singular_values, (found, by_reference, exact))
    assert values.max() <= theirs.max() + 0.02
    # Rounding lifts small singular values; a closer result may leave them small.
    assert values.min() >= min(theirs.min(), right.min()) - 0.02


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_in_float16_the_kernel_is_closer_than_the_reference_in_bfloat16(
    kind, coefficients, interpreted
):
    update, how = matrix(kind, *ROUNDED), {"coefficients": COEFFICIENTS[coefficients]}
    # Without oneDNN: a virtual CPU may report AMX bfloat16 that it does not execute.
    with torch.backends.mkldnn.flags(enabled=False):
        by_reference = reference.newton_schulz(update, **how, **HALF)
        whole = fused.newton_schulz(update, **how, steps=5, eps=1e-7)
    exact = reference.newton_schulz(update.double(), **how)
    for found in (interpreted["rounded", kind, coefficients], whole):
        assert_no_worse(found, by_reference, exact)


@pytest.mark.parametrize("case", ["wide", "tall", "polynomial"])
def test_compiled_for_hopper_it_overlaps_warpgroup_products(case, tmp_path):
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    from paddock.kernels.newton_schulz import triton as kernels

    held = dict.fromkeys(("A", "B", "OUT"), "*fp16") | dict.fromkeys("abc", "fp32")
    held |= dict.fromkeys(("M", "K", "matrix", "column" if case == "tall" else "row"), "i32")
    constants = {"POLYNOMIAL": case == "polynomial", "EVEN": True, "BM": TILE, "BK": DEPTH}
    constants["row" if case == "tall" else "column"] = 1
    made = compiled(kernels.symmetric_kernel, held, constants, tmp_path, num_warps=4, num_stages=3)
    assert made.products > 0
    assert made.fences < made.products
    assert made.spilled <= 64  # outside the loop


GPU_SHAPES = {
    "heads": (4, 256, 2048),
    "heads of odd height": (4, 192, 512),
    "no multiple of anything": (3, 147, 391),
    "wide": (1, 1024, 3072),
    "tall": (2, 1536, 576),
    "square": (1, 640, 640),
}


@pytest.mark.gpu
@pytest.mark.parametrize("half_from", [1, 1 << 20], ids=["halves", "whole"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", GPU_SHAPES.values(), ids=GPU_SHAPES)
def test_on_a_gpu_the_kernel_is_closer_than_the_reference(kind, shape, half_from, monkeypatch):
    monkeypatch.setattr(fused, "HALF_FROM", half_from)
    B, *sides = shape
    stack = torch.stack([matrix(kind, *sides, seed) for seed in range(B)]).cuda()
    for coefficients in COEFFICIENTS.values():
        how = {"coefficients": coefficients, "steps": 5, "eps": 1e-7}
        found = fused.newton_schulz(stack, **how)
        assert found.dtype == torch.float32 and found.is_contiguous()
        assert torch.equal(found, fused.newton_schulz(stack, **how))
        by_reference = reference.newton_schulz(stack, **how, dtype=torch.bfloat16)
        exact = reference.newton_schulz(stack.double(), **how)
        for one in zip(found, by_reference, exact, strict=True):
            assert_no_worse(*one)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 6144, 16384), (2, 5120, 2048), (2, 128, 2048)])
def test_on_a_gpu_large_stacks_use_the_kernel(shape):
    torch.manual_seed(0)
    update = torch.randn(shape, device="cuda")
    assert fused.suits(update, torch.bfloat16, 5)
    found = newton_schulz(update, dtype=torch.bfloat16)
    by_reference = reference.newton_schulz(update, dtype=torch.bfloat16)
    exact = newton_schulz(update.double())
    assert error(found, exact) < 0.5 * error(by_reference, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e6])
def test_on_a_gpu_scale_and_layout_of_the_input_do_not_matter(size):
    kv = torch.randn(6, 128 + 160, 16 * 160, device="cuda")
    part = kv[:, 128:]
    assert fused.suits(part, torch.bfloat16, 5)
    expected = newton_schulz(part.contiguous(), dtype=torch.bfloat16)
    scaled = newton_schulz((size * kv)[:, 128:], dtype=torch.bfloat16)
    torch.testing.assert_close(scaled, expected, rtol=0, atol=2e-3)
    transposed = newton_schulz(part.mT, dtype=torch.bfloat16)
    torch.testing.assert_close(transposed, expected.mT, rtol=0, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 128, 2048), (1, HALF_FROM, HALF_FROM)])
def test_on_a_gpu_zeros_stay_zeros_and_the_dtype_is_kept(shape):
    zeros = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
    assert fused.suits(zeros, torch.bfloat16, 5)
    found = newton_schulz(zeros, dtype=torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert found.count_nonzero() == 0


@pytest.mark.gpu
def test_on_a_gpu_small_matrices_and_gradients_use_the_reference():
    assert not fused.suits(torch.zeros(4, 100, 9000, device="cuda"), torch.bfloat16, 5)
    leaf = torch.zeros(128, 2048, device="cuda", requires_grad=True)
    assert not fused.suits(leaf, torch.bfloat16, 5)
    assert not fused.suits(leaf.detach(), torch.float32, 5)
    with torch.no_grad():
        assert fused.suits(leaf, torch.bfloat16, 5)
