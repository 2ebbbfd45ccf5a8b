"""Metrics of the quantization report against explicit sums."""

import pytest
import torch
from torch import nn

from paddock.quant.calibration_data import CalibrationBatch, CalibrationText
from paddock.quant.measure import MIN_KL, QuantEvalStats, update_stats
from tests.model.networks import tokens


def measured(change, ids):
    """The metrics of original and changed hidden states under one head, and each token's KL."""
    rng = torch.Generator().manual_seed(0)
    head = nn.Linear(16, 50, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.randn(50, 16, generator=rng))
    exact = torch.randn(len(ids), 16, generator=rng)
    other = change(exact.clone())
    tally = QuantEvalStats()
    update_stats(
        CalibrationBatch((CalibrationText(ids=ids, purpose="validation"),)),
        exact,
        other,
        head,
        tally,
    )
    with torch.no_grad():
        p, q = (head(x[:-1]).double().log_softmax(-1) for x in (exact, other))
    return tally.summary(), (p.exp() * (p - q)).sum(-1)


def test_the_geometric_mean_kl_is_not_dominated_by_one_token():
    ids = tuple(tokens(300).tolist())

    def shaken(x):
        x += 1e-3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
        x[7] += 5.0  # another expert was selected here
        return x

    found, kl_T = measured(shaken, ids)
    assert found["kl_mean"] == pytest.approx(float(kl_T.mean()), rel=1e-6)
    assert found["kl_geometric_mean"] == pytest.approx(float(kl_T.log().mean().exp()), rel=1e-6)
    assert found["kl_mean"] > 100 * found["kl_geometric_mean"]
    assert found["kl_by_position"] == {
        "128": pytest.approx(float(kl_T[:128].mean())),
        "512": pytest.approx(float(kl_T[128:].mean())),
    }


def test_identical_distributions_have_zero_divergence():
    found, _ = measured(lambda x: x, tuple(tokens(20).tolist()))
    assert found["kl_mean"] == 0
    assert found["kl_geometric_mean"] == pytest.approx(MIN_KL)
    assert found["nll"][0] == found["nll"][1]
    assert found["top1_agreement"] == 1
    assert found["tokens"] == 19


def test_divergences_below_float32_precision_are_resolved():
    def shaken(x):
        return x + 1e-5 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))

    found, kl_T = measured(shaken, tuple(tokens(100).tolist()))
    assert float(kl_T.mean()) < 1e-8
    assert found["kl_mean"] == pytest.approx(float(kl_T.mean()), rel=1e-3)
