"""Quantizing on a GPU gives the same network as on the CPU."""

import pytest
import torch

from paddock.checkpoint import load_pretrained
from paddock.quant import QuantSettings, quantize_folder
from paddock.quant.w4a8 import QuantizationArgs, quantize
from tests.model.networks import build_network, latent_config, tokens
from tests.quant.test_run import contents
from tests.quant.tiny import folder_of, text

pytestmark = pytest.mark.gpu

SETTINGS = QuantSettings(n_grid=4, batch_tokens=128)
# Wide enough for the W4A8 kernels.
WIDE = latent_config(
    hidden=128,
    dense_inner=256,
    mla={"heads": 4, "q_rank": 64, "kv_rank": 64, "nope": 16, "rope": 16, "value": 32},
    indexer={"heads": 2, "dim": 32, "topk": 8, "layers": ("full", "shared", "full", "shared")},
    moe={"experts": 6, "active": 2, "inner": 64},
    init={"std": 0.1},
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return folder_of(build_network(WIDE), tmp_path_factory.mktemp("wide") / "model")


def quantized(source, folder, device, **how):
    return quantize_folder(source, folder, SETTINGS, passages=text(), device=device, **how)


@torch.no_grad()
def test_a_folder_is_quantized_as_on_the_cpu(source, tmp_path):
    on_cpu = quantized(source, tmp_path / "cpu", "cpu")
    on_gpu = quantized(source, tmp_path / "cuda", "cuda")
    assert on_gpu["device"] == "cuda"
    assert on_gpu["nll"] == pytest.approx(on_cpu["nll"], abs=5e-3)
    for one, other in zip(on_cpu["layers"], on_gpu["layers"], strict=True):
        assert other["layer_error"] == pytest.approx(one["layer_error"], rel=0.1)
    exact, *found = (
        load_pretrained(folder).logits(tokens(60))
        for folder in (source, tmp_path / "cpu", tmp_path / "cuda")
    )
    errors = [float((logits - exact).norm() / exact.norm()) for logits in found]
    assert errors[1] < 1.2 * errors[0]


def test_a_killed_run_resumes_to_the_same_bytes(source, tmp_path):
    class Killed(Exception):
        pass

    def kill(progress):
        if progress.what == "layer 2: quantizing":
            raise Killed

    quantized(source, tmp_path / "whole", "cuda")
    with pytest.raises(Killed):
        quantized(source, tmp_path / "q", "cuda", on_progress=kill)
    quantized(source, tmp_path / "q", "cuda")
    assert contents(tmp_path / "q") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    "grid",
    [
        QuantizationArgs(),
        QuantizationArgs(bits=8),
        QuantizationArgs(group_size=32),
        QuantizationArgs(group_size=32, bits=8),
    ],
)
def test_the_same_weights_give_the_same_integers(grid):
    weight = torch.randn(200, 512, generator=torch.Generator().manual_seed(0))
    on_cpu, on_gpu = quantize(weight, grid), quantize(weight.cuda(), grid)
    assert torch.equal(on_gpu.integer_XFD.cpu(), on_cpu.integer_XFD)
    assert torch.equal(on_gpu.scale_XFG.cpu(), on_cpu.scale_XFG)
