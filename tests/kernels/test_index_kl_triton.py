"""The kernels of the indexer's KL loss without a GPU: interpreted, and compiled for Hopper."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels.compiled import compiled
from tests.kernels.index_kl_cases import CASES, exact

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton runs on Linux alone")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    file = tmp_path_factory.mktemp("index_kl") / "found.pt"
    command = [sys.executable, "-m", "tests.kernels.index_kl_cases", str(file)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)
    return torch.load(file)


def assert_same(found, right):
    for ours, theirs in zip(found, right, strict=True):
        size = float(theirs.abs().max())
        torch.testing.assert_close(ours.double(), theirs, atol=3e-6 * size, rtol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_match_the_reference(name, interpreted):
    assert_same(interpreted[name], exact(CASES[name]))


def test_integer_sums_match_the_reference(interpreted):
    assert_same(interpreted["whole numbers"], exact(CASES["kept with gaps over tiles"]))


def test_the_loss_without_gradients(interpreted):
    assert_same(interpreted["no gradient"], exact(CASES["kept"])[:1])


HALVES = dict.fromkeys(["QUERY", "ROW", "KEY", "GRAD", "DQUERY"], "*bf16")
WORDS = dict.fromkeys(["TILE", "KEY_TILE", "INDEX"], "*i32")
NUMBERS = dict.fromkeys(["tiles", "K", "ld", "share_stride"], "i32")
STRIDES = dict.fromkeys(["q_stride", "h_stride", "r_stride"], "i32")
FLOATS = dict.fromkeys(["OUT", "WEIGHT", "DWEIGHT", "DKEY", "UNIT"], "*fp32")
TYPES = HALVES | WORDS | NUMBERS | STRIDES | FLOATS | {"scale": "fp32"}


def built(name, constants, folder, **options):
    from paddock.kernels.index_kl import triton as kernels

    kernel = getattr(kernels, name)
    held = {arg: TYPES[arg] for arg in kernel.arg_names if arg not in constants}
    return compiled(kernel, held, constants, folder, **options)


def target(H, C, folder, *, dense):
    from paddock.kernels.index_kl.triton import COLUMNS, DENSE, FIELDS, KEPT, MANY

    tile = DENSE if dense else KEPT
    shape = {"H": H, "C": C, "HP": H, "BS": tile.keys, "BC": COLUMNS}
    if dense:
        queries = tile.columns // H
        shape |= {"BQ": queries, "PARTS": MANY // queries, "FIELDS": FIELDS}
    name = "dense_target_kernel" if dense else "kept_target_kernel"
    return built(name, shape, folder, num_warps=tile.warps, num_stages=tile.stages)


@pytest.mark.parametrize(
    ("H", "C", "dense"),
    [
        (64, 576, True),
        (64, 576, False),
        pytest.param(16, 320, True, marks=pytest.mark.slow),
        pytest.param(16, 320, False, marks=pytest.mark.slow),
    ],
    ids=["glm5", "glm5 kept", "small", "small kept"],
)
def test_target_kernels_fit_hopper(H, C, dense, tmp_path):
    found = target(H, C, tmp_path, dense=dense)
    # Four steps of 16 columns per pass; 16 heads as rows are too few for warpgroup products.
    assert found.products >= 8
    assert found.spilled <= 64
    # Products of one tile overlap the next one's: the assembler did not serialise them.
    assert found.fences < 2 * found.products


@pytest.mark.parametrize(
    ("G", "D"), [(32, 128), pytest.param(16, 64, marks=pytest.mark.slow)], ids=["glm5", "small"]
)
@pytest.mark.parametrize("part", ["query", "key", "kept"])
def test_gradient_kernels_fit_hopper(part, G, D, tmp_path):
    from paddock.kernels.index_kl.triton import FIELDS, HEADS_TOGETHER, MANY, SHARES, WIDTH

    shape = {"G": G, "D": D, "BD": D}
    tiled = shape | {"BQ": MANY, "FIELDS": FIELDS}
    constants, warps, stages = {
        "query": (tiled | {"BH": HEADS_TOGETHER, "BS": 64}, 8, 3),
        "key": (tiled | {"PART": G // SHARES, "BS": WIDTH}, 8, 2),
        "kept": (shape | {"BG": G, "BS": 64}, 4, 2),
    }[part]
    name = f"{part}_gradient_kernel"
    found = built(name, constants, tmp_path, num_warps=warps, num_stages=stages)
    assert found.products >= 8
    assert found.spilled == 0
