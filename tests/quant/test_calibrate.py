import copy

import pytest
import torch

from paddock.model import AttentionMetadata
from paddock.quant import QuantSettings
from paddock.quant.calibrate import ActivationObserver, ActivationStats, search_alpha, smooth
from paddock.quant.rotate import fuse_norms
from paddock.quant.w4a8 import QuantizationArgs
from tests.model.networks import build_network, grouped_config, latent_config, tokens

BIASES = {"heads": 4, "kv_heads": 2, "dim": 8, "bias": "all", "qk_norm": True}
NETWORKS = {
    "sparse": latent_config(),
    "dense": latent_config(attention=("mla",) * 4, indexer=None),
    "grouped": grouped_config("gqa", "gqa", gqa=BIASES),
    "windowed, recurrent": grouped_config("swa", "simple_gdn"),
}


def observed(network, layer, settings):
    """A layer that has processed text with its observers, and its outputs."""
    device = network.embed.weight.device
    token_T, layout = tokens(120).to(device), AttentionMetadata.packed([60, 60], device)
    step, x_TD = network.make_context(layout), network.embed(token_T)
    block = network.layers[layer]
    watch = ActivationObserver(block, settings, batches=1)
    with watch.observe():
        out_TD, _, _ = block(x_TD, step, None)
    return block, watch, x_TD, step, out_TD


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("layer", [0, 1])
@torch.no_grad()
def test_smoothing_does_not_change_the_function(name, layer):
    network, settings = build_network(NETWORKS[name]), QuantSettings()
    block, watch, x_TD, step, before_TD = observed(network, layer, settings)
    fuse_norms(block)
    weights = copy.deepcopy(block.state_dict())
    choices = smooth(block, watch, settings)
    assert any(choice.alpha is not None for choice in choices)
    assert any(not torch.equal(weights[n], t) for n, t in block.state_dict().items())
    after_TD, _, _ = block(x_TD, step, None)
    torch.testing.assert_close(after_TD, before_TD, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_the_default_settings_smooth_every_supported_linear():
    network, settings = build_network(latent_config()), QuantSettings()
    block, watch, *_ = observed(network, 1, settings)
    places = {choice.place for choice in smooth(block, watch, settings)}
    experts = {f"mlp.experts.{e}.down" for e in range(6)}
    assert places - experts == {
        "attention.q_a",
        "attention.q_b",
        "attention.o",
        "mlp.shared.down",
    }
    assert places & experts


def seen_of(rows):
    seen = ActivationStats(max_rows=len(rows), max_rows_per_batch=len(rows))
    seen.add(rows)
    return seen


def test_alpha_minimises_the_error_of_the_real_quantizer():
    rng = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 32, generator=rng)
    rows[:, 5] *= 40  # one outlier channel spoils the rounding of all others
    weight = torch.randn(24, 32, generator=rng)
    seen = seen_of(rows)
    strengths = [(a / 10, seen.mean_D ** (a / 10)) for a in range(11)]
    choice, scale_D = search_alpha("here", seen, (weight,), QuantizationArgs(bits=8), strengths)
    assert choice.alpha is not None and choice.alpha > 0
    assert choice.error < 0.2 * choice.before
    assert int(scale_D.argmax()) == 5
    worse = [
        search_alpha("here", seen, (weight,), QuantizationArgs(bits=8), [one])[0].error
        for one in strengths
    ]
    assert choice.error == min(worse)


def test_an_unused_channel_is_harmless():
    rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    rows[:, 2] = 0.0
    seen, weight = seen_of(rows), torch.randn(4, 8)
    weight[:, 3] = 0.0
    _, scale_D = search_alpha(
        "here", seen, (weight,), QuantizationArgs(), [(0.5, seen.mean_D**0.5)]
    )
    assert scale_D.isfinite().all() and (scale_D > 0).all()


def test_kept_rows_are_bounded():
    seen = ActivationStats(max_rows=10, max_rows_per_batch=4)
    for start in range(6):
        seen.add(torch.full((100, 3), float(start)) + torch.arange(100).unsqueeze(-1) / 1000)
    assert seen.rows_ND.shape == (10, 3)
    assert seen.count == 600
    torch.testing.assert_close(seen.mean_D, torch.full((3,), 2.5495))
    torch.testing.assert_close(seen.max_abs_D, torch.full((3,), 5.099))
