"""The sparse MLA kernels without a GPU: interpreted in float32, and compiled for Hopper."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.kernels.sparse_mla_cases import ARMS, HOPPER, PLAIN, exact

triton = pytest.importorskip("triton", reason="Triton has no wheel for this platform")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    file = tmp_path_factory.mktemp("sparse") / "found.pt"
    command = [sys.executable, "-m", "tests.kernels.sparse_mla_cases", str(file)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)
    return torch.load(file)


def assert_same(found, case):
    """Compares row by row, so that a single wrong query shows."""
    problem = case.problem()
    attended, dquery, drow = exact(case, problem)
    for ours, theirs in zip(found, (attended.out_THV, attended.lse_TH, dquery, drow), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_triton_matches_float64_forward_and_backward(name, fixed, interpreted):
    assert_same(interpreted[name, fixed], PLAIN[name])


@pytest.mark.parametrize(("name", "deterministic", "united"), ARMS)
def test_gluon_matches_float64_forward_and_backward(name, deterministic, united, interpreted):
    assert_same(interpreted[name, deterministic, united], HOPPER[name])


@pytest.mark.parametrize("neighbours", [2, 8])
def test_a_shared_list_names_every_row_once_with_its_queries(neighbours, interpreted):
    index, list_NU, count_N = interpreted["union", neighbours]
    bits = 31 - neighbours
    for n, count in enumerate(count_N.tolist()):
        keepers = Counter()
        for g, row in enumerate(index[n * neighbours : (n + 1) * neighbours].tolist()):
            keepers.update({key: 1 << g for key in row if key >= 0})
        words = list_NU[n].tolist()
        named = [(word & ((1 << bits) - 1), word >> bits) for word in words[:count]]
        assert named == sorted(keepers.items())
        assert not any(words[count : max(-(-count // 128), 1) * 128])


def test_integer_row_gradients_do_not_overflow():
    """Every query on one row, every product of the same sign: the largest possible sum."""
    from paddock.kernels.sparse_mla.problem import Problem, from_sums, row_sums

    T, H, V = 1000, 8, 16
    query, row = torch.full((T, H, V), 3.0), torch.full((2, V), -3.0)
    grad = torch.full((T, H, V), 5.0)
    problem = Problem(query, row, torch.zeros(T, 1, dtype=torch.int32), 0.25, V)
    sums, unit = row_sums(problem, grad, fixed=True)
    max_sum = T * H * (5 + 2 * 0.25 * grad[0, 0].norm() * row[0].norm() * 3)
    counted = int(max_sum * unit)
    assert counted < 2**63
    back = from_sums(torch.full_like(sums, counted), unit, torch.float32)
    torch.testing.assert_close(back, torch.full((2, V), float(max_sum)))


@pytest.mark.parametrize("grad", [0.0, 1e-30, 1e15, float("inf"), float("nan")])
def test_gradients_of_any_scale_have_a_unit_or_stay_infinite(grad):
    from paddock.kernels.sparse_mla.problem import Problem, from_sums, row_sums

    query, row = torch.ones(2, 1, 4), torch.ones(3, 4)
    problem = Problem(query, row, torch.zeros(2, 1, dtype=torch.int32), 1.0, 4)
    sums, unit = row_sums(problem, torch.full((2, 1, 4), grad), fixed=True)
    whole = (grad * unit).to(torch.int64)
    back = from_sums(sums + whole, unit, torch.float32)
    if torch.isfinite(torch.tensor(grad)):
        torch.testing.assert_close(back, torch.full((3, 4), grad), atol=0, rtol=1e-6)
    else:
        assert not back.isfinite().any()


def built(kernel, types: dict[str, str], constants: dict[str, object], warps: int) -> Counter:
    """Instruction counts of the code for sm_90, and its resource usage."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(n),): [["tt.divisibility", 16]] for n in types if types[n].startswith("*")},
    )
    made = triton.compile(source, GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    code = Path(made.metadata_group[f"{made.metadata.name}.cubin"])
    listing = subprocess.run([tool, "-sass", code], capture_output=True, text=True, check=True)
    ops = Counter(
        re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(\w+)", listing.stdout, re.M)
    )
    ops["shared"] = made.metadata.shared
    return ops


HALVES = dict.fromkeys(["QUERY", "ROW", "OUT", "GRAD", "DQUERY"], "*bf16")
TYPES = HALVES | {
    "LISTS": "*i32",
    "COUNT": "*i32",
    "WHOLE": "*i32",
    "LSE": "*fp32",
    "scale": "fp32",
}
TYPES |= {"T": "i32", "H": "i32", "U": "i32", "DELTA": "*fp32", "UNIT": "*fp32"}


def assert_no_spills(ops: Counter, products: int) -> None:
    assert ops["HGMMA"] == products
    assert ops["STL"] == ops["LDL"] == 0  # nothing spilled: there is no cache left to spill to
    # A warpgroup waits before and after every product when the assembler had to serialise them.
    assert ops["WARPGROUP"] < ops["HGMMA"] / 2
    assert ops["shared"] <= 232_448


@pytest.mark.slow
@pytest.mark.parametrize(
    ("V", "HP", "stages", "products"), [(512, 64, 2, 88), (256, 16, 4, 56)], ids=["glm5", "small"]
)
def test_the_forward_kernel_fits_hopper(V, HP, stages, products):
    """Two warpgroups: each scores a tile (V/16 + 4 products) and adds the values of two (8)."""
    from paddock.kernels.sparse_mla.gluon import forward_kernel

    constants = {"V": V, "R": 64, "HP": HP, "STAGES": stages, "REGISTERS": 56}
    types = {name: TYPES[name] for name in forward_kernel.arg_names if name in TYPES}
    assert_no_spills(built(forward_kernel, types, constants, warps=4), products)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("V", "HP", "chunk", "sums", "products"),
    [(512, 64, 128, "*fp32", 112), (512, 64, 64, "*i64", 144), (256, 16, 128, "*fp32", 64)],
    ids=["glm5", "glm5 deterministic", "small"],
)
def test_the_backward_kernel_fits_hopper(V, HP, chunk, sums, products):
    from paddock.kernels.sparse_mla.gluon_backward import backward_kernel

    constants = {"V": V, "R": 64, "HP": HP, "CHUNK": chunk}
    types = {name: TYPES[name] for name in backward_kernel.arg_names if name in TYPES}
    ops = built(backward_kernel, types | {"DROW": sums}, constants, warps=8)
    assert_no_spills(ops, products)
    assert ops["ATOMG"] == 0 and ops["REDG"] > 0  # atomics do not return the old value
