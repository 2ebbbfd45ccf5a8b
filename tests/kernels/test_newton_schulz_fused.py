"""The Gram form of Newton-Schulz: against float64, and against what the definition rounds."""

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


def test_the_gram_matrix_is_computed_afresh_after_two_steps_and_then_three():
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


def test_entries_far_below_the_norm_keep_more_digits_than_bfloat16_has():
    update = matrix("one loud entry", 100, 300).unsqueeze(0)
    quiet = update[0, 1:].double()
    found = fused.normalized(update, 1e-7, torch.float16)[0, 1:].double() / SCALE
    assert error(found * update.double().norm(), quiet) < 0.3 * error(quiet.bfloat16(), quiet)


def test_the_square_of_the_first_gram_matrix_stays_within_float16():
    """Its partial sums too: of a matrix of rank one all lie in one entry."""
    alone = torch.zeros(1, 20, 30).index_put_((*torch.zeros(3, 1).long(),), torch.tensor(7.0))
    gram = fused.whole(*[fused.normalized(alone, 1e-7, torch.float16)] * 2, None)
    assert gram.max() ** 2 < torch.finfo(torch.float16).max


def test_the_definition_is_taken_where_it_was_measured_to_be_faster():
    faster = [(1, 6144, 16384), (1, 6144, 6144), (16, 2048, 6144), (1, 2048, 6144)]
    faster += [(64, 256, 6144), (1, 128, 2048)]
    assert all(pays(*stack) for stack in faster)
    slower = [(64, 256, 2048), (64, 192, 512), (1, 576, 6144), (16, 2048, 2048)]
    assert not any(pays(*stack) for stack in [*slower, (4, 100, 9000), (0, 128, 2048)])


def test_a_cpu_has_the_definition():
    assert not fused.suits(torch.zeros(128, 2048), torch.bfloat16, 5)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """What the Gram form makes of all cases by halves."""
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
def test_the_library_computes_the_same_polynomial_whole(name):
    case = PRODUCTS[name]
    found = fused.product(*case.factors(), case.triple)
    torch.testing.assert_close(found.tril().double(), case.exact().tril(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", STACKS)
def test_in_float32_the_twin_computes_the_definition(name, interpreted):
    case = STACKS[name]
    whole = fused.newton_schulz(case.update(), **case.how, dtype=torch.float32)
    for found in (interpreted["stack", name], whole):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), case.exact(), rtol=0, atol=2e-5)


def test_nothing_stays_nothing(interpreted):
    assert interpreted["nothing",].count_nonzero() == 0
    whole = fused.newton_schulz(torch.zeros(2, 20, 30), **STACKS["wide"].how)
    assert whole.count_nonzero() == 0


def assert_no_worse(found, by_definition, exact):
    """Nearer to the exact result than the definition's bfloat16, no singular value elsewhere."""
    assert error(found, exact) <= error(by_definition, exact)
    values, theirs, right = map(singular_values, (found, by_definition, exact))
    assert values.max() <= theirs.max() + 0.02
    # Roundings lift small singular values; a closer result may leave them where they belong.
    assert values.min() >= min(theirs.min(), right.min()) - 0.02


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_in_float16_the_twin_is_nearer_than_the_definition_in_bfloat16(
    kind, coefficients, interpreted
):
    update, how = matrix(kind, *ROUNDED), {"coefficients": COEFFICIENTS[coefficients]}
    # Without oneDNN: a virtual CPU may announce bfloat16 tiles that it then does not execute.
    with torch.backends.mkldnn.flags(enabled=False):
        by_definition = reference.newton_schulz(update, **how, **HALF)
        whole = fused.newton_schulz(update, **how, steps=5, eps=1e-7)
    exact = reference.newton_schulz(update.double(), **how)
    for found in (interpreted["rounded", kind, coefficients], whole):
        assert_no_worse(found, by_definition, exact)


@pytest.mark.parametrize("case", ["wide", "tall", "polynomial"])
def test_a_hopper_chip_multiplies_by_warpgroups_that_overlap(case, tmp_path):
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    from paddock.kernels.newton_schulz import triton as twin

    held = dict.fromkeys(("A", "B", "OUT"), "*fp16") | dict.fromkeys("abc", "fp32")
    held |= dict.fromkeys(("M", "K", "matrix", "column" if case == "tall" else "row"), "i32")
    constants = {"POLYNOMIAL": case == "polynomial", "EVEN": True, "BM": TILE, "BK": DEPTH}
    constants["row" if case == "tall" else "column"] = 1
    made = compiled(twin.symmetric_kernel, held, constants, tmp_path, num_warps=4, num_stages=3)
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
def test_on_a_gpu_the_twin_is_nearer_than_the_definition(kind, shape, half_from, monkeypatch):
    monkeypatch.setattr(fused, "HALF_FROM", half_from)
    B, *sides = shape
    stack = torch.stack([matrix(kind, *sides, seed) for seed in range(B)]).cuda()
    for coefficients in COEFFICIENTS.values():
        how = {"coefficients": coefficients, "steps": 5, "eps": 1e-7}
        found = fused.newton_schulz(stack, **how)
        assert found.dtype == torch.float32 and found.is_contiguous()
        assert torch.equal(found, fused.newton_schulz(stack, **how))
        by_definition = reference.newton_schulz(stack, **how, dtype=torch.bfloat16)
        exact = reference.newton_schulz(stack.double(), **how)
        for one in zip(found, by_definition, exact, strict=True):
            assert_no_worse(*one)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 6144, 16384), (2, 5120, 2048), (2, 128, 2048)])
def test_on_a_gpu_stacks_that_pay_have_the_twin(shape):
    torch.manual_seed(0)
    update = torch.randn(shape, device="cuda")
    assert fused.suits(update, torch.bfloat16, 5)
    found = newton_schulz(update, dtype=torch.bfloat16)
    by_definition = reference.newton_schulz(update, dtype=torch.bfloat16)
    exact = newton_schulz(update.double())
    assert error(found, exact) < 0.5 * error(by_definition, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e6])
def test_on_a_gpu_neither_the_size_nor_the_layout_of_the_input_matters(size):
    kv = torch.randn(6, 128 + 160, 16 * 160, device="cuda")
    part = kv[:, 128:]
    assert fused.suits(part, torch.bfloat16, 5)
    expected = newton_schulz(part.contiguous(), dtype=torch.bfloat16)
    scaled = newton_schulz((size * kv)[:, 128:], dtype=torch.bfloat16)
    torch.testing.assert_close(scaled, expected, rtol=0, atol=2e-3)
    turned = newton_schulz(part.mT, dtype=torch.bfloat16)
    torch.testing.assert_close(turned, expected.mT, rtol=0, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 128, 2048), (1, HALF_FROM, HALF_FROM)])
def test_on_a_gpu_nothing_stays_nothing_and_halves_stay_halves(shape):
    nothing = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
    assert fused.suits(nothing, torch.bfloat16, 5)
    found = newton_schulz(nothing, dtype=torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert found.count_nonzero() == 0


@pytest.mark.gpu
def test_on_a_gpu_small_matrices_and_gradients_have_the_definition():
    assert not fused.suits(torch.zeros(4, 100, 9000, device="cuda"), torch.bfloat16, 5)
    leaf = torch.zeros(128, 2048, device="cuda", requires_grad=True)
    assert not fused.suits(leaf, torch.bfloat16, 5)
    assert not fused.suits(leaf.detach(), torch.float32, 5)
    with torch.no_grad():
        assert fused.suits(leaf, torch.bfloat16, 5)
