"""Quantizing on a device that is not the CPU: nothing is made on the wrong side, and the result is
the same network."""

import json

import pytest
import torch

from paddock.quant import QuantSettings, quantize_folder
from paddock.quant import calibrate as calibrating
from paddock.quant.calibrate import batch_experts, smooth
from paddock.quant.w4a8 import QuantizationArgs, quantize
from tests.model.networks import born, grouped_config, latent_config
from tests.quant.fake_device import ELSEWHERE, Pretending
from tests.quant.test_calibrate import watched
from tests.quant.test_run import contents
from tests.quant.tiny import QUICK, folder_of, network, text

BIASES = {"heads": 4, "kv_heads": 2, "dim": 8, "bias": "all", "qk_norm": True}
GROUPED = grouped_config("gqa", "gqa", gqa=BIASES)


def two_layers(second="full"):
    """A dense one and one of experts, which may share the other's choice of keys."""
    indexer = {"heads": 2, "dim": 8, "topk": 8, "layers": ("full", second)}
    return network(attention=("dsa",) * 2, mlp=("dense", "moe"), indexer=indexer)


def test_who_pretends_refuses_what_a_gpu_refuses():
    near = torch.randn(3, 4)
    with Pretending():
        far = near.to(ELSEWHERE)
        assert far.device == ELSEWHERE and (far @ far.mT).device == ELSEWHERE
        assert torch.equal(far.cpu(), near) and far.cpu().device.type == "cpu"
        for wrong in (lambda: far + near, lambda: far[torch.tensor([1])], lambda: near[far > 0]):
            with pytest.raises(RuntimeError):
                wrong()
        with pytest.raises(TypeError):
            far.numpy()
        apart = [not torch.equal((far / n).cpu(), near / n) for n in range(1, 20)]
    assert any(apart), "dividing by a number is not what a GPU does"


@pytest.mark.parametrize(
    ("made", "settings"),
    [
        (two_layers(), QUICK),
        (two_layers("shared"), QuantSettings(n_grid=2, calibration_rows=16, expert_group_size=8)),
        (two_layers(), QuantSettings(n_grid=2, expert_bits=8, quantize_linears=False)),
        (born(GROUPED), QUICK),
    ],
)
def test_a_folder_is_quantized_elsewhere(made, settings, tmp_path):
    source = folder_of(made, tmp_path / "source")
    here = quantize_folder(source, tmp_path / "here", settings, passages=text())
    with Pretending() as pretending:
        there = quantize_folder(
            source, tmp_path / "there", settings, passages=text(), device=ELSEWHERE
        )
    assert pretending.calls > 1000
    assert there["device"] == ELSEWHERE.type
    assert there["nll"] == pytest.approx(here["nll"], abs=2e-3)
    assert there["needle_recall"] == here["needle_recall"]
    for one, other in zip(here["layers"], there["layers"], strict=True):
        assert other["layer_error"] == pytest.approx(one["layer_error"], rel=0.1)
        assert other.get("smoothed") == one.get("smoothed")
    names = {"config.json", "model.safetensors.index.json"}
    found = [
        {n: b for n, b in contents(tmp_path / w).items() if n in names} for w in ("here", "there")
    ]
    assert found[0] == found[1]


def test_a_run_that_was_killed_elsewhere_goes_on_to_the_same_bytes(tmp_path):
    class Killed(Exception):
        pass

    def kill(moment):
        if moment.what == "layer 1: quantizing":
            raise Killed

    source = folder_of(two_layers(), tmp_path / "source")
    with Pretending():
        words = {"passages": text(), "device": ELSEWHERE}
        quantize_folder(source, tmp_path / "whole", QUICK, **words)
        with pytest.raises(Killed):
            quantize_folder(source, tmp_path / "q", QUICK, **words, on_progress=kill)
        quantize_folder(source, tmp_path / "q", QUICK, **words)
    assert contents(tmp_path / "q") == contents(tmp_path / "whole")
    assert json.loads((tmp_path / "q" / "quantization.json").read_text())["device"] == "ve"


@pytest.mark.parametrize(
    "grid",
    [
        QuantizationArgs(),
        QuantizationArgs(bits=8),
        QuantizationArgs(group_size=16),
        QuantizationArgs(ssz_iterations=20),
    ],
)
def test_the_same_weights_are_the_same_integers_everywhere(grid):
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    here = quantize(weight, grid)
    with Pretending():
        there = quantize(weight.to(ELSEWHERE), grid)
        assert torch.equal(there.integer_XFD.cpu(), here.integer_XFD)
        assert torch.equal(there.scale_XFG.cpu(), here.scale_XFG)


@pytest.mark.parametrize("group", [None, 16])
def test_matrices_side_by_side_are_refined_as_each_alone(group):
    """One of them stops at once: it is whole numbers already."""
    chance, grid = (
        torch.Generator().manual_seed(0),
        QuantizationArgs(group_size=group, ssz_iterations=20),
    )
    stack = torch.randn(3, 24, 64, generator=chance)
    stack[1] = torch.randint(-7, 8, (24, 64), generator=chance).float()
    stack[1, :, ::16] = 7.0
    rows = torch.randn(3, 50, 64, generator=chance)
    found = quantize(stack, grid, rows)
    for i in range(3):
        alone = quantize(stack[i], grid, rows[i])
        assert torch.equal(found.integer_XFD[i], alone.integer_XFD)
        torch.testing.assert_close(found.scale_XFG[i], alone.scale_XFG)


@torch.no_grad()
def test_experts_are_smoothed_together_as_each_alone():
    """Though they were given different numbers of rows."""
    settings = QuantSettings(n_grid=5)
    block, watch, *_ = watched(born(latent_config()), 1, settings)
    assert len({len(seen.rows_ND) for seen in watch.experts.values() if seen.count}) > 1
    alone = smooth(block, watch, settings)
    with Pretending():
        there, watch, *_ = watched(born(latent_config()).to(ELSEWHERE), 1, settings)
        found = smooth(there, watch, settings)
        down = there.mlp.experts.down.cpu()
    assert [(c.place, c.alpha) for c in found] == [(c.place, c.alpha) for c in alone]
    # Attention gathers there and masks here: rows round otherwise, and an integer flips.
    assert [c.error for c in found] == pytest.approx([c.error for c in alone], rel=1e-3)
    torch.testing.assert_close(down, block.mlp.experts.down.detach())


def test_no_more_experts_at_once_than_memory_takes(monkeypatch):
    stack, experts = torch.zeros(7, 24, 64), [0, 2, 3, 5, 6]
    assert list(batch_experts(stack, experts, 16)) == [[0], [2], [3], [5], [6]]
    with Pretending():
        there = stack.to(ELSEWHERE)
        assert list(batch_experts(there, experts, 16)) == [experts]
        each = 4 * 24 * (6 * 64 + 5 * 16)
        monkeypatch.setattr(calibrating, "scratch_bytes", lambda _: 2 * each)
        assert list(batch_experts(there, experts, 16)) == [[0, 2], [3, 5], [6]]
        monkeypatch.setattr(calibrating, "scratch_bytes", lambda _: each // 2)
        assert list(batch_experts(there, experts, 16)) == [[e] for e in experts]
