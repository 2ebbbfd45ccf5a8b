"""Triton index scores without a GPU: interpreted in float32, and compiled for Hopper."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paddock.kernels.index_scores import index_scores
from tests.kernels.compiled import KernelResources, compiled
from tests.kernels.index_scores_cases import CASES, TABLES, rows_of

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    file = tmp_path_factory.mktemp("scores") / "scores.pt"
    command = [sys.executable, "-m", "tests.kernels.index_scores_cases", str(file)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)
    return torch.load(file)


@pytest.mark.parametrize("name", CASES)
def test_every_visible_score_is_written_and_correct(name, interpreted):
    case, found = CASES[name], interpreted[name]
    query, keys, weight = case.inputs()
    for row, (t, start, visible) in enumerate(rows_of(case.spans)):
        if visible > case.k:  # else every key is kept, and nothing needs a score
            key = keys.rows(slice(start, start + visible))
            expected = index_scores(query[t : t + 1], key, weight[t : t + 1])[0]
            torch.testing.assert_close(found[row, :visible], expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", TABLES)
def test_every_visible_score_of_a_block_table_is_written_and_correct(name, interpreted):
    table, found = TABLES[name], interpreted[name]
    query, keys, weight, pages, _ = table.inputs()
    keys, spans = table.as_spans(keys, pages)
    for t, start, visible in rows_of(spans):
        if visible > table.k:
            key = keys.rows(slice(start, start + visible))
            expected = index_scores(query[t : t + 1], key, weight[t : t + 1])[0]
            torch.testing.assert_close(found[t, :visible], expected, atol=2e-5, rtol=1e-5)


def test_tiles_of_invisible_keys_are_skipped(interpreted):
    """A document of 150 queries has three tiles; the first two never touch the second key tile."""
    found = interpreted["one document"]
    assert found[:128, 128:].isnan().all()
    assert not found[128:, 128:150].isnan().any()


SHAPES = {"glm5": (32, 128), "small": (16, 64), "nano": (4, 16)}


def compiled_kernel(folder: Path, kernel: str, dtype: str, heads: int, dim: int) -> KernelResources:
    from paddock.kernels.index_scores import triton as kernels
    from paddock.kernels.index_scores.blocks import FIELDS, MANY, WIDTH

    function = getattr(kernels, kernel)
    held = {"Q": f"*{dtype}", "W": "*fp32", "K": f"*{dtype}", "OUT": "*fp32"}
    held |= dict.fromkeys(["ld", "q_stride", "h_stride", "k_stride"], "i32")
    constants = {"H": heads, "D": dim, "BD": dim, "BS": WIDTH, "SCALE": None, "PRECISION": "ieee"}
    if kernel == "_many_queries":
        held |= dict.fromkeys(["tiles", "steps"], "i32")
        constants |= {"BQ": MANY, "GROUP": kernels.GROUP}
    else:
        constants |= {"BH": max(16, heads), "SPAN": kernels.FEW_SPAN}
    if kernel == "_paged_queries":
        held |= dict.fromkeys(["pages", "k_kept"], "i32")
        held |= dict.fromkeys(["PAGE", "VISIBLE"], "*i32")
        constants |= {"SIZE": 64, "QUERIES": 4}
    else:
        held |= {"TILE": "*i32"}
        constants |= {"FIELDS": FIELDS, "SLOT": None}
    options = {"num_warps": kernels.WARPS, "num_stages": kernels.STAGES}
    return compiled(function, held, constants, folder, **options)


@pytest.mark.parametrize(
    ("kernel", "shape"),
    [
        ("_many_queries", "glm5"),
        ("_few_queries", "glm5"),
        ("_paged_queries", "glm5"),
        ("_many_queries", "small"),
        ("_few_queries", "nano"),
    ],
)
def test_compiled_for_hopper_it_uses_warpgroup_products_without_spills(kernel, shape, tmp_path):
    made = compiled_kernel(tmp_path, kernel, "bf16", *SHAPES[shape])
    assert made.spilled == 0
    assert 0 < made.fences < 2 * made.products


def test_compiled_for_hopper_float8_uses_warpgroup_products(tmp_path):
    halves = compiled_kernel(tmp_path, "_many_queries", "bf16", *SHAPES["glm5"])
    made = compiled_kernel(tmp_path, "_many_queries", "fp8e4nv", *SHAPES["glm5"])
    assert made.spilled == 0
    assert 0 < made.fences <= halves.fences  # no more waits between products than in half precision
