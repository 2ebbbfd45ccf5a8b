"""Quantizing on a device other than the CPU: no tensor is created on the wrong device, and the
result is the same network."""

import json

import pytest
import torch

from paddock.quant import QuantSettings, quantize_folder
from paddock.quant import calibrate as calibrating
from paddock.quant.calibrate import batch_experts, smooth
from paddock.quant.w4a8 import QuantizationArgs, quantize
from tests.model.networks import build_network, grouped_config, latent_config
from tests.quant.fake_device import FAKE_DEVICE, FakeDeviceMode
from tests.quant.test_calibrate import observed
from tests.quant.test_run import contents
from tests.quant.tiny import QUICK, folder_of, network, text

BIASES = {"heads": 4, "kv_heads": 2, "dim": 8, "bias": "all", "qk_norm": True}
GROUPED = grouped_config("gqa", "gqa", gqa=BIASES)


def two_layers(second="full"):
    """A dense layer and an expert layer, which may share the first layer's index."""
    indexer = {"heads": 2, "dim": 8, "topk": 8, "layers": ("full", second)}
    return network(attention=("dsa",) * 2, mlp=("dense", "moe"), indexer=indexer)


def test_the_fake_device_rejects_what_a_gpu_rejects():
    on_cpu = torch.randn(3, 4)
    with FakeDeviceMode():
        on_fake = on_cpu.to(FAKE_DEVICE)
        assert on_fake.device == FAKE_DEVICE and (on_fake @ on_fake.mT).device == FAKE_DEVICE
        assert torch.equal(on_fake.cpu(), on_cpu) and on_fake.cpu().device.type == "cpu"
        for wrong in (
            lambda: on_fake + on_cpu,
            lambda: on_fake[torch.tensor([1])],
            lambda: on_cpu[on_fake > 0],
        ):
            with pytest.raises(RuntimeError):
                wrong()
        with pytest.raises(TypeError):
            on_fake.numpy()
        differs = [not torch.equal((on_fake / n).cpu(), on_cpu / n) for n in range(1, 20)]
    assert any(differs), "dividing by a number is not what a GPU does"


@pytest.mark.parametrize(
    ("made", "settings"),
    [
        (two_layers(), QUICK),
        (two_layers("shared"), QuantSettings(n_grid=2, calibration_rows=16, expert_group_size=8)),
        (two_layers(), QuantSettings(n_grid=2, expert_bits=8, quantize_linears=False)),
        (build_network(GROUPED), QUICK),
    ],
)
def test_a_folder_is_quantized_on_another_device(made, settings, tmp_path):
    source = folder_of(made, tmp_path / "source")
    on_cpu = quantize_folder(source, tmp_path / "cpu", settings, passages=text())
    with FakeDeviceMode() as mode:
        on_fake = quantize_folder(
            source, tmp_path / "fake", settings, passages=text(), device=FAKE_DEVICE
        )
    assert mode.calls > 1000
    assert on_fake["device"] == FAKE_DEVICE.type
    assert on_fake["nll"] == pytest.approx(on_cpu["nll"], abs=2e-3)
    assert on_fake["needle_recall"] == on_cpu["needle_recall"]
    for one, other in zip(on_cpu["layers"], on_fake["layers"], strict=True):
        assert other["layer_error"] == pytest.approx(one["layer_error"], rel=0.1)
        assert other.get("smoothed") == one.get("smoothed")
    names = {"config.json", "model.safetensors.index.json"}
    found = [
        {n: b for n, b in contents(tmp_path / w).items() if n in names} for w in ("cpu", "fake")
    ]
    assert found[0] == found[1]


def test_a_killed_run_on_another_device_resumes_to_the_same_bytes(tmp_path):
    class Killed(Exception):
        pass

    def kill(progress):
        if progress.what == "layer 1: quantizing":
            raise Killed

    source = folder_of(two_layers(), tmp_path / "source")
    with FakeDeviceMode():
        options = {"passages": text(), "device": FAKE_DEVICE}
        quantize_folder(source, tmp_path / "whole", QUICK, **options)
        with pytest.raises(Killed):
            quantize_folder(source, tmp_path / "q", QUICK, **options, on_progress=kill)
        quantize_folder(source, tmp_path / "q", QUICK, **options)
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
def test_the_same_weights_give_the_same_integers_on_every_device(grid):
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    on_cpu = quantize(weight, grid)
    with FakeDeviceMode():
        on_fake = quantize(weight.to(FAKE_DEVICE), grid)
        assert torch.equal(on_fake.integer_XFD.cpu(), on_cpu.integer_XFD)
        assert torch.equal(on_fake.scale_XFG.cpu(), on_cpu.scale_XFG)


@pytest.mark.parametrize("group", [None, 16])
def test_stacked_matrices_are_refined_as_each_alone(group):
    """One of them stops at once: its values are integers already."""
    rng, grid = (
        torch.Generator().manual_seed(0),
        QuantizationArgs(group_size=group, ssz_iterations=20),
    )
    stack = torch.randn(3, 24, 64, generator=rng)
    stack[1] = torch.randint(-7, 8, (24, 64), generator=rng).float()
    stack[1, :, ::16] = 7.0
    rows = torch.randn(3, 50, 64, generator=rng)
    found = quantize(stack, grid, rows)
    for i in range(3):
        alone = quantize(stack[i], grid, rows[i])
        assert torch.equal(found.integer_XFD[i], alone.integer_XFD)
        torch.testing.assert_close(found.scale_XFG[i], alone.scale_XFG)


@torch.no_grad()
def test_batched_experts_are_smoothed_as_each_alone():
    """Experts have different numbers of rows."""
    settings = QuantSettings(n_grid=5)
    block, watch, *_ = observed(build_network(latent_config()), 1, settings)
    assert len({len(seen.rows_ND) for seen in watch.experts.values() if seen.count}) > 1
    alone = smooth(block, watch, settings)
    with FakeDeviceMode():
        on_fake, watch, *_ = observed(build_network(latent_config()).to(FAKE_DEVICE), 1, settings)
        found = smooth(on_fake, watch, settings)
        down = on_fake.mlp.experts.down.cpu()
    assert [(c.place, c.alpha) for c in found] == [(c.place, c.alpha) for c in alone]
    # Attention gathers on the device and masks on the CPU: rounding differs, and an integer flips.
    assert [c.error for c in found] == pytest.approx([c.error for c in alone], rel=1e-3)
    torch.testing.assert_close(down, block.mlp.experts.down.detach())


def test_expert_batches_fit_the_scratch_memory(monkeypatch):
    stack, experts = torch.zeros(7, 24, 64), [0, 2, 3, 5, 6]
    assert list(batch_experts(stack, experts, 16)) == [[0], [2], [3], [5], [6]]
    with FakeDeviceMode():
        on_fake = stack.to(FAKE_DEVICE)
        assert list(batch_experts(on_fake, experts, 16)) == [experts]
        each = 4 * 24 * (6 * 64 + 5 * 16)
        monkeypatch.setattr(calibrating, "scratch_bytes", lambda _: 2 * each)
        assert list(batch_experts(on_fake, experts, 16)) == [[0, 2], [3, 5], [6]]
        monkeypatch.setattr(calibrating, "scratch_bytes", lambda _: each // 2)
        assert list(batch_experts(on_fake, experts, 16)) == [[e] for e in experts]
