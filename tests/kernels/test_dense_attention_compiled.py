"""Attention over packed documents, compiled for Hopper."""

import sys

import pytest

from paddock.kernels.dense_attention.packed import plan_for
from tests.kernels.compiled import compiled

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton runs on Linux alone")

HALVES = {"q", "k", "v", "grad", "out", "dk_out", "dv_out", "dq_out"}
FLOATS = {"lse", "delta"}
NUMBERS = {"scale", "scale2"}
WORDS = {"words", "lists", "counts", "table"}
SHAPE = {"MASKED", "D", "V", "BD", "BV", "BM", "BN"}


def type_of(name):
    kinds = {"*bf16": HALVES, "*fp32": FLOATS, "fp32": NUMBERS, "*i32": WORDS}
    return next((kind for kind, names in kinds.items() if name in names), "i32")


def built(part, width, masked, folder):
    from paddock.kernels.dense_attention import triton as kernels

    kernel = {"forward": "forward", "keys": "backward_keys", "queries": "backward_queries"}[part]
    function, blocks = getattr(kernels, kernel), getattr(plan_for(width, masked=masked), part)
    held = {name: type_of(name) for name in function.arg_names if name not in SHAPE}
    shape = {"MASKED": masked, "D": width, "V": width, "BD": width, "BV": width}
    shape |= {"BM": blocks.queries, "BN": blocks.keys}
    return compiled(function, held, shape, folder, num_warps=blocks.warps, num_stages=blocks.stages)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("width", "masked", "part"),
    [
        (128, True, "forward"),
        (128, True, "keys"),
        (128, True, "queries"),
        pytest.param(64, True, "forward", marks=SLOW),
        # With keys 256 wide gradients fill the registers; Triton 3.9 serialises them, 3.6 does not.
        pytest.param(256, True, "forward", marks=SLOW),
        pytest.param(256, True, "queries", marks=SLOW),
        pytest.param(128, False, "forward", marks=SLOW),
        pytest.param(128, False, "queries", marks=SLOW),
    ],
)
def test_products_overlap_and_registers_suffice(width, masked, part, tmp_path):
    found = built(part, width, masked, tmp_path)
    assert found.products > 0
    assert found.fences < found.products
    # A few addresses spilled outside the loop are harmless.
    assert found.spilled <= 64
