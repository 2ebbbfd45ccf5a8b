"""W4A8 products: the reference against float64, the kernel against the reference."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paddock.kernels.swiglu import silu_and_mul
from paddock.kernels.w4a8_gemm import (
    PackedWeight,
    QuantizedActivations,
    fused,
    int_grouped_gemm,
    int_linear,
    pack_halves,
    quantize_per_token,
    reference,
    silu_and_mul_quantize,
    unpack_halves,
)
from paddock.kernels.w4a8_gemm.fused import ONE, ONE_NARROW, STACK, GemmTile
from tests.kernels.compiled import compiled
from tests.kernels.w4a8_cases import CASES, CUTS, GATED, ROWS, SCATTERED, Product, scattered_rows

ROOT = Path(__file__).parents[2]
SHARED_BYTES = 227 << 10  # of a program on Hopper
CUT_CASES = {
    f"{name}, {cut}": (case, tile) for name, case in CASES.items() for cut, tile in CUTS.items()
}


@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 2**16))
def test_packing_two_to_a_byte_loses_nothing(rows, half, seed):
    rng = torch.Generator().manual_seed(seed)
    integer = torch.randint(-8, 8, (rows, 2 * half), generator=rng).to(torch.int8)
    packed = pack_halves(integer)
    assert packed.shape == (rows, half)
    assert torch.equal(unpack_halves(packed), integer)


@pytest.mark.parametrize("name", CASES)
def test_the_reference_computes_the_product(name):
    case = CASES[name]
    rows, weight = case.inputs_of()
    found = int_grouped_gemm(rows, weight, case.counts, torch.float32)
    torch.testing.assert_close(found.double(), case.exact(), rtol=1e-5, atol=1e-3)


def test_one_matrix_is_a_stack_of_one():
    rows, weight = Product((7,), 32, 12).inputs_of()
    alone = reference.PackedWeight(weight.integer[0], weight.scale_XFG[0], packed=True)
    found = int_linear(rows, alone, torch.float32)
    assert torch.equal(found, int_grouped_gemm(rows, weight, (7,), torch.float32))


def test_a_row_does_not_depend_on_its_neighbours():
    rows, weight = Product((40,), 64, 24).inputs_of()
    whole = int_grouped_gemm(rows, weight, (40,), torch.float32)
    for n in (1, 3, 33):
        few = QuantizedActivations(rows.integer_RD[:n], rows.scale_R[:n])
        assert torch.equal(int_grouped_gemm(few, weight, (n,), torch.float32), whole[:n])


def test_sums_are_exact_where_float32_would_round():
    """More columns than float32 can sum exactly, on the path of CPUs without int8 products too."""
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


def test_rows_are_scaled_by_their_own_maximum():
    x = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0], [1e-6, 0.0, -1e-6]])
    rows = quantize_per_token(x)
    assert rows.integer_RD.tolist() == [[64, -127, 32], [0, 0, 0], [127, 0, -127]]
    back = rows.integer_RD.float() * rows.scale_R.unsqueeze(-1)
    assert ((back - x).abs() <= rows.scale_R.unsqueeze(-1) / 2 * (1 + 1e-6)).all()


def test_counts_that_do_not_cover_the_rows_are_rejected():
    rows, weight = Product((4,), 32, 8).inputs_of()
    with pytest.raises(ValueError, match="do not cover 4 rows"):
        int_grouped_gemm(rows, weight, (3,), torch.float32)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    file = tmp_path_factory.mktemp("w4a8") / "found.pt"
    command = [sys.executable, "-m", "tests.kernels.w4a8_cases", str(file)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)
    return torch.load(file)


@pytest.mark.parametrize("name", [*CASES, *CUT_CASES])
def test_the_kernel_multiplies_as_the_reference_does(name, interpreted):
    case = CASES[name] if name in CASES else CUT_CASES[name][0]
    expected = int_grouped_gemm(*case.inputs_of(), case.counts, torch.float32)
    if case.group is None:  # integers until the last multiplication: the same bits
        assert torch.equal(interpreted[name], expected)
    torch.testing.assert_close(interpreted[name], expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("name", ROWS)
def test_the_kernel_quantizes_as_the_reference_does(name, interpreted):
    rows = quantize_per_token(ROWS[name])
    assert torch.equal(interpreted[f"{name}, rounded"], rows.integer_RD)
    assert torch.equal(interpreted[f"{name}, scales"], rows.scale_R)


@pytest.mark.parametrize("name", GATED)
def test_the_kernel_quantizes_gated_activations(name, interpreted):
    rows = quantize_per_token(silu_and_mul(GATED[name]))
    difference = interpreted[f"{name}, rounded"].int() - rows.integer_RD.int()
    assert difference.abs().max() <= 1  # an exponential may differ in its last bit
    assert difference.ne(0).float().mean() < 1e-3
    torch.testing.assert_close(interpreted[f"{name}, scales"], rows.scale_R, rtol=1e-6, atol=0)
    assert torch.equal(silu_and_mul_quantize(GATED[name]).integer_RD, rows.integer_RD)


@pytest.mark.parametrize("name", SCATTERED)
def test_rows_may_be_gathered_by_index(name, interpreted):
    case = SCATTERED[name]
    rows, weight = case.inputs_of()
    source = scattered_rows(rows.count)
    expected = int_grouped_gemm(rows, weight, case.counts, torch.float32)
    inputs = (rows[source.argsort()], weight, case.counts, torch.float32, source)
    assert torch.equal(int_grouped_gemm(*inputs), expected)
    torch.testing.assert_close(interpreted[f"{name}, scattered"], expected, rtol=1e-5, atol=1e-3)


def test_a_tile_is_fitted_to_the_weight():
    wide = GemmTile(32, 16, 128, slices=8, warps=8, stages=4)
    one = Product((1,), 6144, 8).inputs_of()[1]  # 3072 bytes a row: 24 blocks of 128
    assert wide.fitted(one) == wide
    few_blocks = Product((1,), 768, 8).inputs_of()[1]  # 384 bytes: three blocks of 128
    assert wide.fitted(few_blocks) == GemmTile(32, 16, 128, 1, 8, 4)
    grouped = Product((1,), 768, 8, group=64).inputs_of()[1]
    assert wide.fitted(grouped) == GemmTile(32, 16, 64, 2, 8, 4)


@pytest.mark.parametrize(
    ("experts", "width", "tiles"), [(1, 3072, ONE), (1, 1024, ONE_NARROW), (256, 3072, STACK)]
)
def test_the_tile_depends_on_the_rows_per_matrix(experts, width, tiles):
    weight = PackedWeight(torch.empty(experts, 8, width), torch.empty(experts, 8, 1), packed=True)
    assert list(tiles) == sorted(tiles)
    for max_rows, tile in tiles.items():
        assert fused.tile_for(experts * max_rows, weight) == tile
        assert fused.tile_for(experts * max_rows + 1, weight) != tile or max_rows == max(tiles)
    assert fused.tile_for(1, weight) == tiles[min(tiles)]


@pytest.mark.parametrize(
    "tile", dict.fromkeys([*ONE.values(), *ONE_NARROW.values(), *STACK.values()]), ids=str
)
def test_the_pipeline_stages_fit_into_shared_memory(tile):
    block = tile.columns * tile.slices * (tile.outputs + 2 * tile.rows)
    held = tile.stages if tile.slices == 1 else tile.stages - 1  # warpgroups read one meanwhile
    assert held * block <= SHARED_BYTES


def compiled_for_hopper(tile, folder, *, experts=1, groups=1):
    """Resources and opcodes of the kernel at the shape of a GLM-5 expert's gate and up."""
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    from paddock.kernels.w4a8_gemm import triton as kernels

    held = {"rows": "*i8", "row_scale": "*fp32", "weight": "*i8", "scale": "*fp32"}
    held |= {"out": "*bf16", "R": "i32", "F": "i32"}
    constants = {"D": 6144, "E": experts, "BE": experts, "G": groups, "PACKED": True}
    constants |= {"BF": tile.outputs, "BN": tile.rows, "BK": tile.columns, "SLICES": tile.slices}
    constants["WORDS"] = True
    if experts == 1:
        constants |= {"counts": None, "source": None}
    else:
        held |= {"counts": "*i64", "source": "*i64"}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    made = compiled(kernels.multiply, held, constants, folder, **options)
    return made, opcodes_of(folder / "cubin")


def opcodes_of(cubin):
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    code = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ +)?([A-Z][A-Z0-9]*)", code)


@pytest.mark.parametrize("tile", [*ONE.values(), *ONE_NARROW.values(), *CUTS.values()], ids=str)
def test_compiled_for_hopper_it_uses_tensor_cores_without_spills(tile, tmp_path):
    made, opcodes = compiled_for_hopper(tile, tmp_path)
    assert made.spilled == 0
    if tile.slices == 1:
        assert made.products > 0  # by warpgroups
    else:
        assert "IMMA" in opcodes  # each warp by itself
    # Nibbles are unpacked four at a time: byte by byte they would be permuted.
    assert opcodes.count("PRMT") <= 8


@pytest.mark.parametrize("tile", [CUTS["columns of their own"], *STACK.values()], ids=str)
@pytest.mark.parametrize(("experts", "groups"), [(256, 1), (1, 48)])
def test_compiled_for_hopper_experts_and_groups_do_not_spill(tile, experts, groups, tmp_path):
    made, opcodes = compiled_for_hopper(tile, tmp_path, experts=experts, groups=groups)
    assert made.spilled == 0
    assert made.products + opcodes.count("IMMA") > 0
    assert opcodes.count("PRMT") <= 8


@pytest.mark.parametrize("part", [1024, 8192])
def test_compiled_for_hopper_quantization_does_not_spill(part, tmp_path):
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    from paddock.kernels.w4a8_gemm import triton as kernels

    held = {"x": "*bf16", "integer": "*i8", "scale": "*fp32", "x_row": "i32"}
    constants = {"D": 6144, "BD": 8192, "BP": part, "GATED": part == 1024}
    assert compiled(kernels.round_rows, held, constants, tmp_path, num_warps=8).spilled == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_multiplies_as_the_reference_does(name):
    case = CASES[name]
    found = int_grouped_gemm(*case.inputs_of("cuda"), case.counts, torch.float32).cpu()
    expected = int_grouped_gemm(*case.inputs_of(), case.counts, torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CUT_CASES)
def test_a_gpu_gives_the_same_result_with_other_tiles(name):
    case, tile = CUT_CASES[name]
    rows, weight = case.inputs_of("cuda")
    how = (rows, weight, case.counts, torch.float32, tile.fitted(weight))
    expected = int_grouped_gemm(*case.inputs_of(), case.counts, torch.float32)
    torch.testing.assert_close(fused.multiply(*how).cpu(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 8, 16, 33, 64, 200, 1024])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 6144), (6144, 2048)])
def test_a_gpu_is_exact_at_the_shapes_of_experts(rows, outputs, inputs):
    held, weight = Product((rows,), inputs, outputs).inputs_of("cuda")
    found = int_grouped_gemm(held, weight, (rows,), torch.float32)
    assert torch.equal(found, reference.int_grouped_gemm(held, weight, (rows,), torch.float32))


@pytest.mark.gpu
def test_a_chain_of_products_in_a_graph_is_bitwise_identical_to_the_reference():
    """Every kernel depends on the one before it; captured once and replayed."""
    rng = torch.Generator().manual_seed(0)
    weights = []
    for outputs, inputs in [(4096, 2048), (2048, 4096)] * 8:
        integer = torch.randint(-8, 8, (outputs, inputs), generator=rng).to(torch.int8)
        scale = torch.full((outputs, 1), 0.2 * inputs**-0.5)
        weights.append(PackedWeight(pack_halves(integer).cuda(), scale.cuda(), packed=True))
    x = torch.empty(3, 2048, dtype=torch.bfloat16, device="cuda")

    def chain(multiplied, rounded):
        y = x
        for weight in weights:
            y = multiplied(rounded(y), weight.as_stack(), (3,), torch.bfloat16)
        return y

    chain(fused.int_grouped_gemm, fused.quantize_per_token)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(fused.int_grouped_gemm, fused.quantize_per_token)
    for seed in range(20):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        expected = chain(reference.int_grouped_gemm, reference.quantize_per_token)
        assert expected.abs().amax() > 0
        assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCATTERED)
def test_on_a_gpu_rows_may_be_gathered_by_index(name):
    case = SCATTERED[name]
    rows, weight = case.inputs_of("cuda")
    source = scattered_rows(rows.count).cuda()
    expected = int_grouped_gemm(rows, weight, case.counts, torch.float32)
    inputs = (rows[source.argsort()], weight, case.counts, torch.float32, source)
    assert torch.equal(int_grouped_gemm(*inputs), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 33, 65])
@pytest.mark.parametrize("inner", [96, 2048])
def test_a_gpu_quantizes_gated_activations_like_two_kernels(rows, inner):
    both = torch.randn(rows, 2 * inner, device="cuda", dtype=torch.bfloat16) * 2
    found, expected = silu_and_mul_quantize(both), quantize_per_token(silu_and_mul(both))
    assert torch.equal(found.integer_RD, expected.integer_RD)
    assert torch.equal(found.scale_R, expected.scale_R)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 33, 65])
def test_a_gpu_quantizes_as_the_reference_does(dtype, rows):
    x = torch.randn(rows, 6144, generator=torch.Generator().manual_seed(0)).to(dtype)
    found, expected = quantize_per_token(x.cuda()), reference.quantize_per_token(x)
    assert torch.equal(found.integer_RD.cpu(), expected.integer_RD)
    assert torch.equal(found.scale_R.cpu(), expected.scale_R)
