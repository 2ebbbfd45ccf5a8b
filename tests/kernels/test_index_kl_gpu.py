"""The indexer's KL loss in half precision on a GPU against float64."""

from dataclasses import replace

import pytest
import torch

from paddock.kernels import dispatch
from paddock.kernels.index_kl import (
    IndexerInputs,
    IndexerTarget,
    fused,
    index_kl,
    index_kl_topk,
    reference,
)
from paddock.kernels.spans import Span
from tests.kernels.index_kl_cases import CASES, Case, exact, found, packed, poisoned

pytestmark = pytest.mark.gpu

LOSS, GRADIENT = 1e-4, 1e-2  # relative to the norm; bfloat16 rounds to 2e-3
GLM5 = {"H": 64, "C": 576, "G": 32, "D": 128}
SMALL = {"H": 16, "C": 320, "G": 16, "D": 64}
LARGE = {
    "glm5": Case(T=400, S=2200, spans=packed((1800, 200), (0, 200)), **GLM5),
    "glm5 of 96 heads": Case(T=130, S=1130, spans=packed((1000, 130)), **GLM5 | {"H": 96}),
    "small": Case(T=300, S=1300, spans=packed((1000, 200), (0, 93), (0, 7)), **SMALL),
    "glm5 kept": Case(T=40, S=4096, kept=2048, **GLM5),
    "small kept": Case(T=60, S=4096, kept=1000, gaps=True, **SMALL),
}
ONE_KEY = "one key is kept"  # loss and gradients are zero: no relative error
EVERY = LARGE | {name: case for name, case in CASES.items() if name != ONE_KEY}


def relative(ours, right):
    error = (ours.double() - right).norm() / right.norm().clamp_min(1e-30)
    return float(error.nan_to_num(nan=9e9))


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    monkeypatch.setattr(fused, "_rectangles", poisoned)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.bfloat16) for name in EVERY]
    + [(name, torch.float16) for name in ("small", "small kept")],
)
def test_loss_and_gradients(name, dtype):
    case = EVERY[name]
    ours, right = found(case, dtype, "cuda"), exact(case, dtype, "cuda")
    errors = [relative(a, b) for a, b in zip(ours, right, strict=True)]
    assert errors[0] < LOSS
    assert max(errors[1:]) < GRADIENT


def test_a_single_key_has_zero_loss_and_gradients():
    assert all(float(x.abs().max()) < 1e-5 for x in found(CASES[ONE_KEY], torch.bfloat16, "cuda"))


@pytest.mark.parametrize("name", ["glm5", "small"])
def test_the_dense_loss_is_bitwise_reproducible(name):
    first, second = (found(LARGE[name], torch.bfloat16, "cuda") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_topk_loss_is_bitwise_reproducible_in_deterministic_mode():
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (found(LARGE["glm5 kept"], torch.bfloat16, "cuda") for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    right = exact(LARGE["glm5 kept"], torch.bfloat16, "cuda")
    assert max(relative(a, b) for a, b in zip(first, right, strict=True)) < GRADIENT


@pytest.mark.parametrize("name", ["glm5", "small"])
def test_the_block_size_does_not_change_the_result(name, monkeypatch):
    whole = found(LARGE[name], torch.bfloat16, "cuda")
    monkeypatch.setattr(fused, "scratch_bytes", lambda _: 1 << 20)
    cut = found(LARGE[name], torch.bfloat16, "cuda")
    assert max(relative(a, b.double()) for a, b in zip(cut, whole, strict=True)) < 1e-3


def test_dispatch_chooses_kernel_or_reference(monkeypatch):
    """The kernel for half precision; the reference for others, or if the kernel is disabled."""
    reference_calls = []
    for name in ("index_kl", "index_kl_topk"):
        plain = getattr(reference, name)
        monkeypatch.setattr(reference, name, lambda *x, f=plain: reference_calls.append(1) or f(*x))
    dense, kept = LARGE["small"], replace(LARGE["small kept"], gaps=False)
    kept_TK = kept.choice("cuda")[4:]
    for dtype, off, expected in (
        (torch.bfloat16, (), 0),
        (torch.bfloat16, ("index_kl",), 2),
        (torch.float32, (), 2),
    ):
        reference_calls.clear()
        index, attention = dense.sides(dtype, "cuda")
        few, teacher = kept.sides(dtype, "cuda")
        few = IndexerInputs(few.query_THD[4:], few.key_SD, few.weight_TH[4:])
        teacher = teacher._replace(query_THC=teacher.query_THC[4:])
        with dispatch.disable_kernels(*off):
            losses = index_kl(index, attention, dense.spans), index_kl_topk(few, teacher, kept_TK)
        assert len(reference_calls) == expected
        assert all(bool(loss.isfinite()) for loss in losses)


def test_far_offsets():
    """Teacher queries of more than 2^31 elements, of which the last are used."""
    T, S, H, C = 60_000, 600, 64, 576
    case = Case(T=32, S=S, spans=(Span(0, 32, 0, S),), **GLM5)
    index, attention = case.sides(torch.bfloat16, "cuda")
    far_THC = torch.zeros(T, H, C, device="cuda", dtype=torch.bfloat16)
    far_THC[-32:] = attention.query_THC
    wide = [torch.zeros(T, *x.shape[1:], device="cuda", dtype=x.dtype) for x in index[::2]]
    for x, given in zip(wide, index[::2], strict=True):
        x[-32:] = given
    query_THD, weight_TH = (x.requires_grad_() for x in wide)
    loss = index_kl(
        IndexerInputs(query_THD, index.key_SD, weight_TH),
        IndexerTarget(far_THC, attention.row_SC, attention.scale),
        (Span(T - 32, 32, 0, S),),
    )
    (3 * loss).backward()
    right = exact(case, torch.bfloat16, "cuda")
    assert relative(loss.detach(), right[0]) < LOSS
    assert relative(query_THD.grad[-32:], right[1]) < GRADIENT
    assert relative(weight_TH.grad[-32:], right[3]) < GRADIENT
    assert not bool(query_THD.grad[:-32].any())
