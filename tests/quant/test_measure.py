"""What the report's numbers mean, against sums written out by hand."""

import pytest
import torch
from torch import nn

from paddock.quant.calibration_data import CalibrationBatch, CalibrationText
from paddock.quant.measure import MIN_KL, QuantEvalStats, update_stats
from tests.model.networks import tokens


def weighed(change, ids):
    """A tally of states, and of states changed, under one head; and the divergence of each."""
    chance = torch.Generator().manual_seed(0)
    head = nn.Linear(16, 50, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.randn(50, 16, generator=chance))
    exact = torch.randn(len(ids), 16, generator=chance)
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


def test_the_typical_divergence_is_not_made_by_one_token():
    ids = tuple(tokens(300).tolist())

    def shaken(x):
        x += 1e-3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
        x[7] += 5.0  # another expert was chosen here
        return x

    found, apart = weighed(shaken, ids)
    assert found["kl_mean"] == pytest.approx(float(apart.mean()), rel=1e-6)
    assert found["kl_geometric_mean"] == pytest.approx(float(apart.log().mean().exp()), rel=1e-6)
    assert found["kl_mean"] > 100 * found["kl_geometric_mean"]
    assert found["kl_by_position"] == {
        "128": pytest.approx(float(apart[:128].mean())),
        "512": pytest.approx(float(apart[128:].mean())),
    }


def test_opinions_that_do_not_differ_are_not_apart():
    found, _ = weighed(lambda x: x, tuple(tokens(20).tolist()))
    assert found["kl_mean"] == 0
    assert found["kl_geometric_mean"] == pytest.approx(MIN_KL)
    assert found["nll"][0] == found["nll"][1]
    assert found["top1_agreement"] == 1
    assert found["tokens"] == 19


def test_divergences_too_small_for_float32_are_told_apart():
    def shaken(x):
        return x + 1e-5 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))

    found, apart = weighed(shaken, tuple(tokens(100).tolist()))
    assert float(apart.mean()) < 1e-8
    assert found["kl_mean"] == pytest.approx(float(apart.mean()), rel=1e-3)
