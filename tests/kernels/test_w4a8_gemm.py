"""Integer products: the reference against float64, the twin against the reference."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paddock.kernels.w4a8_gemm import (
    Rows,
    integer_grouped,
    integer_linear,
    pack_halves,
    quantize_rows,
    reference,
    unpack_halves,
)
from tests.kernels.compiled import compiled
from tests.kernels.w4a8_cases import CASES, ROWS, Product

ROOT = Path(__file__).parents[2]


@settings(deadline=None)  # the first call loads things
@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 2**16))
def test_packing_two_to_a_byte_loses_nothing(rows, half, seed):
    chance = torch.Generator().manual_seed(seed)
    integer = torch.randint(-8, 8, (rows, 2 * half), generator=chance).to(torch.int8)
    packed = pack_halves(integer)
    assert packed.shape == (rows, half)
    assert torch.equal(unpack_halves(packed), integer)


@pytest.mark.parametrize("name", CASES)
def test_the_reference_computes_the_product(name):
    case = CASES[name]
    rows, weight = case.inputs_of()
    found = integer_grouped(rows, weight, case.counts, torch.float32)
    torch.testing.assert_close(found.double(), case.exact(), rtol=1e-5, atol=1e-3)


def test_one_matrix_is_a_stack_of_one():
    rows, weight = Product((7,), 32, 12).inputs_of()
    alone = reference.Weight(weight.integer[0], weight.scale_XFG[0], packed=True)
    found = integer_linear(rows, alone, torch.float32)
    assert torch.equal(found, integer_grouped(rows, weight, (7,), torch.float32))


def test_a_row_does_not_notice_its_neighbours():
    rows, weight = Product((40,), 64, 24).inputs_of()
    whole = integer_grouped(rows, weight, (40,), torch.float32)
    for n in (1, 3, 33):
        few = Rows(rows.integer_RD[:n], rows.scale_R[:n])
        assert torch.equal(integer_grouped(few, weight, (n,), torch.float32), whole[:n])


def test_sums_are_exact_where_float32_would_round_them():
    """More columns than float32 can add up, on the path of CPUs without int8 products too."""
    a = torch.full((3, 6144), 127, dtype=torch.int8)
    b = torch.full((2, 6144), 127, dtype=torch.int8)
    b[1, 5000] = 126
    exact = a.long() @ b.long().T
    assert torch.equal(reference.integer_mm(a, b).long(), exact)
    reference.cpu_multiplies_exactly.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "cpu_multiplies_exactly", lambda: False)
        assert torch.equal(reference.integer_mm(a, b).long(), exact)
    assert reference.integer_mm(a, b).dtype == torch.int32


def test_rows_are_rounded_by_their_own_largest():
    x = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0], [1e-6, 0.0, -1e-6]])
    rows = quantize_rows(x)
    assert rows.integer_RD.tolist() == [[64, -127, 32], [0, 0, 0], [127, 0, -127]]
    back = rows.integer_RD.float() * rows.scale_R.unsqueeze(-1)
    assert ((back - x).abs() <= rows.scale_R.unsqueeze(-1) / 2 * (1 + 1e-6)).all()


def test_counts_that_do_not_cover_the_rows_are_refused():
    rows, weight = Product((4,), 32, 8).inputs_of()
    with pytest.raises(ValueError, match="do not cover 4 rows"):
        integer_grouped(rows, weight, (3,), torch.float32)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    file = tmp_path_factory.mktemp("w4a8") / "found.pt"
    command = [sys.executable, "-m", "tests.kernels.w4a8_cases", str(file)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)
    return torch.load(file)


@pytest.mark.parametrize("name", CASES)
def test_the_twin_multiplies_as_the_reference_does(name, interpreted):
    case = CASES[name]
    expected = integer_grouped(*case.inputs_of(), case.counts, torch.float32)
    if case.group is None:  # integers until the last multiplication: the same bits
        assert torch.equal(interpreted[name], expected)
    torch.testing.assert_close(interpreted[name], expected, rtol=1e-5, atol=1e-3)


def test_the_twin_rounds_as_the_reference_does(interpreted):
    rows = quantize_rows(ROWS)
    assert torch.equal(interpreted["rounded"], rows.integer_RD)
    assert torch.equal(interpreted["scales"], rows.scale_R)


@pytest.mark.parametrize("rows", [64, 1024])
def test_a_hopper_chip_multiplies_by_warpgroups_and_spills_nothing(rows, tmp_path):
    """At the shape of a GLM-5 expert's gate and up."""
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    from paddock.kernels.w4a8_gemm import triton as twin
    from paddock.kernels.w4a8_gemm.fused import Tile

    tile = Tile.of(rows, 1, 4096, 3072 // 128)
    held = {"rows": "*i8", "row_scale": "*fp32", "weight": "*i8", "scale": "*fp32"}
    held |= {"counts": "*i32", "out": "*i32" if tile.split > 1 else "*bf16", "R": "i32", "F": "i32"}
    constants = {"D": 6144, "E": 1, "BE": 1, "G": 1, "PACKED": True, "SPLIT": tile.split}
    constants |= {"BF": tile.outputs, "BN": tile.rows, "BK": 128}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    made = compiled(twin.multiply, held, constants, tmp_path, **options)
    assert made.spilled == 0
    assert made.products > 0


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("group", [None, 128])
def test_a_hopper_chip_adds_up_what_programs_shared(rows, group, tmp_path):
    """Few rows split the columns. One row is a case of its own: Triton makes a constant of it."""
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    from paddock.kernels.w4a8_gemm import triton as twin
    from paddock.kernels.w4a8_gemm.fused import Tile

    tile = Tile.of(rows, 1, 4096, 3072 // 128)
    assert tile.split > 1
    groups = 1 if group is None else 6144 // group
    held = {"row_scale": "*fp32", "scale": "*fp32", "counts": "*i32", "F": "i32"}
    constants = {"E": 1, "BE": 1, "G": groups, "SPLIT": tile.split}
    if rows == 1:
        constants["R"] = 1
    else:
        held["R"] = "i32"
    parts = "*i32" if group is None else "*fp32"
    factors = {"rows": "*i8", "weight": "*i8", "out": parts}
    blocks = {"D": 6144, "PACKED": True, "BF": tile.outputs, "BN": tile.rows, "BK": 128}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    made = compiled(twin.multiply, held | factors, constants | blocks, tmp_path, **options)
    assert made.spilled == 0
    assert made.products > 0
    ends = {"parts": parts, "out": "*bf16"}
    assert compiled(twin.add_up, held | ends, constants | {"BF": 1024}, tmp_path).spilled == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_multiplies_as_the_reference_does(name):
    case = CASES[name]
    found = integer_grouped(*case.inputs_of("cuda"), case.counts, torch.float32).cpu()
    expected = integer_grouped(*case.inputs_of(), case.counts, torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gpu_rounds_as_the_reference_does(dtype):
    x = torch.randn(33, 6144, generator=torch.Generator().manual_seed(0)).to(dtype)
    found, expected = quantize_rows(x.cuda()), reference.quantize_rows(x)
    assert torch.equal(found.integer_RD.cpu(), expected.integer_RD)
    assert torch.equal(found.scale_R.cpu(), expected.scale_R)
