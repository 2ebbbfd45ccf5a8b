"""MLA decode preparation: the reference against float64, the kernel against the reference."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paddock.kernels import mla_prepare
from paddock.kernels.mla_prepare import fused, reference
from tests.kernels.compiled import compiled
from tests.kernels.mla_prepare_cases import CASES, exact

ROOT = Path(__file__).parents[2]
TOLERANCE = {torch.float32: (2e-6, 2e-5), torch.float16: (4e-3, 4e-3)}


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    file = tmp_path_factory.mktemp("prepare") / "found.pt"
    command = [sys.executable, "-m", "tests.kernels.mla_prepare_cases", str(file)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)
    return torch.load(file)


def rms(x, weight, eps):
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def rotated(x, angles, interleaved):
    """The first 2 P numbers of every row, pair by pair."""
    out, pairs = x.clone(), angles.cos_TP.shape[1]
    for p in range(pairs):
        a, b = (2 * p, 2 * p + 1) if interleaved else (p, pairs + p)
        cos, sin = (
            angle_TP[:, p].view(-1, *(1,) * (x.ndim - 2))
            for angle_TP in (angles.cos_TP, angles.sin_TP)
        )
        out[..., a] = x[..., a] * cos - x[..., b] * sin
        out[..., b] = x[..., a] * sin + x[..., b] * cos
    return out


def by_hand(inputs):
    latent, row, key, angles, slot, queries, index = exact(inputs)
    rope = 2 * angles.cos_TP.shape[1]
    found = {"latent": rms(latent.raw_TQ, latent.weight_Q, latent.eps)}
    rows = row.stored_SC
    rows[slot, :-rope] = rms(row.raw_TC[:, :-rope], row.weight_L, row.eps)
    rows[slot, -rope:] = rotated(row.raw_TC[:, -rope:], angles, row.interleaved)
    absorbed = queries.absorbed_THC
    absorbed[..., -rope:] = rotated(queries.raw_THD[..., -rope:], angles, queries.interleaved)
    found |= {"rows": rows, "absorbed": absorbed}
    if key is None:
        return found
    centred = key.raw_TD - key.raw_TD.mean(-1, keepdim=True)
    normed = rms(centred, key.weight_D, key.eps) + key.bias_D
    key.stored_SD[slot] = rotated(normed, angles, key.interleaved)
    index_query = rotated(index.raw_THD, angles, index.interleaved)
    weights = index.scale * index.x_TE @ index.weight_HE.T
    return found | {"keys": key.stored_SD, "index": index_query, "weights": weights}


def assert_same(found, expected, atol, rtol):
    """All values match; NaN where nothing is written."""
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            found[name].double().cpu(), expected[name], atol=atol, rtol=rtol, equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_reference_matches_float64(name):
    inputs = CASES[name].inputs(torch.float64)
    expected = by_hand(inputs)
    assert_same(CASES[name].prepared(reference, inputs), expected, 1e-12, 1e-12)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_matches_the_reference(name, dtype, interpreted):
    case = CASES[name]
    found = interpreted[name, dtype]
    expected = {k: x.double() for k, x in case.prepared(reference, case.inputs(dtype)).items()}
    assert_same(found, expected, *TOLERANCE[dtype])
    assert_same(found, by_hand(case.inputs(dtype)), *TOLERANCE[dtype])


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_rounds_like_the_separate_operations(name, interpreted):
    """Another order of summation rarely changes a rounded value; leaving out a rounding between
    two operations would change many."""
    found = interpreted[name, torch.float16]
    case = CASES[name]
    expected = case.prepared(reference, case.inputs(torch.float16))
    for part in found.keys() - {"weights"}:
        written = ~(found[part].isnan() & expected[part].isnan())
        differ = (found[part] != expected[part])[written].double().mean()
        assert differ < 0.02, (part, float(differ))


@pytest.mark.parametrize("name", CASES)
def test_other_slots_stay_untouched(name, interpreted):
    case = CASES[name]
    slot = case.inputs()[4]
    others = torch.ones(case.slots, dtype=torch.bool).index_fill(0, slot, False)
    for part in interpreted[name, torch.float32].keys() & {"rows", "keys"}:
        stored = interpreted[name, torch.float32][part]
        assert stored[others].isnan().all()
        assert stored[slot].isfinite().all()
    absorbed = interpreted[name, torch.float32]["absorbed"]
    assert absorbed[..., : case.row].isnan().all()


def test_a_token_does_not_depend_on_the_others(interpreted):
    whole = interpreted["tokens that fill no block", torch.float32]
    slot = CASES["tokens that fill no block"].inputs()[4][0]
    for part, alone in interpreted["first token"].items():
        at = slot if part in ("rows", "keys") else 0
        same = (alone[at] == whole[part][at]) | (alone[at].isnan() & whole[part][at].isnan())
        assert same.all(), part


@torch.no_grad()
def test_the_cpu_uses_the_reference():
    case = CASES["three tokens"]
    inputs = case.inputs(torch.float16)
    assert not mla_prepare.suits(inputs[0].raw_TQ, inputs[0].weight_Q)
    found = case.prepared(mla_prepare, inputs)
    expected = case.prepared(reference, case.inputs(torch.float16))
    assert all(torch.equal(found[k].nan_to_num(), expected[k].nan_to_num()) for k in expected)


@pytest.mark.parametrize("index", [True, False])
def test_compiled_for_hopper_store_latents_does_not_spill(index, tmp_path):
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    from paddock.kernels.mla_prepare import triton as kernels

    held = dict.fromkeys(
        ["LATENT", "LATENT_WEIGHT", "LATENT_OUT", "ROW", "ROW_WEIGHT", "ROWS"], "*bf16"
    )
    held |= {"COS": "*fp32", "SIN": "*fp32", "SLOT": "*i64"}
    held |= dict.fromkeys(["latent_eps", "row_eps", "key_eps"], "fp32")
    held |= dict.fromkeys(["latent_token", "row_token", "key_token"], "i32")
    keys = ["KEY", "KEY_WEIGHT", "KEY_BIAS", "KEYS"]
    constants = {} if index else dict.fromkeys(keys)
    held |= dict.fromkeys(keys, "*bf16") if index else {}
    constants |= {"Q": 2048, "L": 512, "P": 32, "D": 128, "BQ": 2048, "BL": 512, "BP": 32}
    constants |= {"BREST": 64, "ROW_INTERLEAVED": True, "KEY_INTERLEAVED": index}
    made = compiled(kernels.store_latents, held, constants, tmp_path, num_warps=4)
    assert made.spilled == 0
    assert made.registers <= 128


@pytest.mark.parametrize("index", [True, False])
def test_compiled_for_hopper_turn_queries_does_not_spill(index, tmp_path):
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    from paddock.kernels.mla_prepare import triton as kernels

    held = {"QUERY": "*bf16", "ABSORBED": "*bf16", "COS": "*fp32", "SIN": "*fp32", "scale": "fp32"}
    held |= dict.fromkeys(["tokens", "query_token", "index_token", "x_token"], "i32")
    index_query = {"INDEX": "*bf16", "INDEX_OUT": "*bf16", "X": "*bf16"}
    index_query |= {"WEIGHT": "*fp32", "WEIGHTS": "*fp32"}
    held |= index_query if index else {}
    constants = {} if index else dict.fromkeys(index_query)
    constants |= {"H": 64, "D": 256, "C": 576, "P": 32, "IH": 32, "ID": 128, "E": 6144}
    constants |= {"BH": 64, "BIH": 32, "BP": 32, "BREST": 64, "BT": fused.WEIGHT_TOKENS}
    constants |= {"BE": fused.WEIGHT_COLUMNS, "INTERLEAVED": True, "INDEX_INTERLEAVED": index}
    made = compiled(kernels.turn_queries, held, constants, tmp_path, num_warps=4)
    assert made.spilled == 0
    assert made.registers <= 200
