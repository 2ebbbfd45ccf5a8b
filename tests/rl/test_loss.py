import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paddock.rl.loss import (
    PolicyLossInputs,
    double_sided,
    double_sided_weight,
    icepop,
    icepop_weight,
    importance_weighted_ppo,
    ppo_clip,
    reinforce,
    teacher_logprob_diff,
)
from paddock.rl.policy_loss import PolicyLoss
from paddock.rl.settings import PolicyLossSettings
from paddock.train.policy import PolicyTokens
from tests.rl import reference_losses

LOGP = st.floats(-6, -0.01)
ROWS = st.lists(
    st.tuples(LOGP, st.floats(-1.2, 1.2), st.floats(-1.2, 1.2), st.floats(-3, 3)),
    min_size=1,
    max_size=12,
)
CASES = {
    "ppo": (
        lambda t: ppo_clip(t, clip_low=0.2, clip_high=0.28),
        lambda logp, old, _, a: reference_losses.ppo(logp, old, a, 0.2, 0.28),
    ),
    "icepop": (
        lambda t: icepop(t, beta=2.0, clip_low=0.2, clip_high=0.28),
        lambda *x: reference_losses.icepop(*x, beta=2.0, below=0.2, above=0.28),
    ),
    "tis": (
        lambda t: importance_weighted_ppo(t, clip_low=0.2, clip_high=0.28, cap=2.0),
        lambda *x: reference_losses.corrected(*x, cap=2.0, below=0.2, above=0.28),
    ),
    "decoupled": (
        lambda t: importance_weighted_ppo(t, clip_low=0.2, clip_high=0.28),
        lambda *x: reference_losses.corrected(*x, cap=float("inf"), below=0.2, above=0.28),
    ),
    "double_sided": (
        lambda t: double_sided(t, clip_low=0.5, clip_high=1.0),
        lambda logp, _, rollout, a: reference_losses.double_sided(
            logp, rollout, a, below=0.5, above=1.0
        ),
    ),
    "reinforce": (reinforce, lambda logp, _, __, a: (a * logp, a)),
}


def tokens(rows):
    """Rows of (logp, old - logp, rollout - logp, advantage), in double precision."""
    logp, old, rollout, advantage = torch.tensor(rows, dtype=torch.float64).T
    return PolicyLossInputs(logp.clone().requires_grad_(), logp + old, logp + rollout, advantage)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=60)
@given(rows=ROWS)
def test_values_and_gradients_match_the_reference(name, rows):
    ours, theirs = CASES[name]
    of = tokens(rows)
    gains = ours(of)
    gains.objective_N.sum().backward()
    expected = np.array(
        [
            theirs(*row)
            for row in zip(
                *(
                    t.tolist()
                    for t in (of.logprob_N, of.old_logprob_N, of.rollout_logprob_N, of.advantage_N)
                ),
                strict=True,
            )
        ]
    )
    np.testing.assert_allclose(
        gains.objective_N.detach().numpy(), expected[:, 0], rtol=1e-9, atol=1e-12
    )
    np.testing.assert_allclose(of.logprob_N.grad.numpy(), expected[:, 1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize(
    ("ratio", "kept"), [(0.49, False), (0.5, False), (0.51, True), (1.99, True), (2.0, False)]
)
def test_the_double_sided_window_is_open_and_ignores_the_sign_of_the_advantage(sign, ratio, kept):
    logp = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    rollout = -torch.tensor([ratio], dtype=torch.float64).log()
    of = PolicyLossInputs(logp, logp.detach(), rollout, torch.tensor([sign], dtype=torch.float64))
    # e^log(x) may miss x by a rounding: the edges are tested on the window itself.
    edge = double_sided_weight(
        torch.tensor([ratio], dtype=torch.float64), clip_low=0.5, clip_high=1.0
    )
    assert bool(edge > 0) is kept
    if ratio not in (0.5, 2.0):
        gains = double_sided(of, clip_low=0.5, clip_high=1.0)
        gains.objective_N.sum().backward()
        assert bool(gains.kept_N) is kept
        assert (float(logp.grad) != 0.0) is kept
        assert kept or float(logp.grad) == 0.0


def test_the_icepop_window_is_closed():
    edges = torch.tensor([0.5, 2.0, np.nextafter(0.5, 0), np.nextafter(2.0, 3)])
    assert icepop_weight(edges.double(), beta=2.0).tolist()[:2] == [0.5, 2.0]
    assert icepop_weight(torch.tensor([0.499, 2.001]), beta=2.0).tolist() == [0.0, 0.0]


def test_on_policy_every_loss_has_the_reinforce_gradient():
    rows = [(-1.0, 0.0, 0.0, 0.5), (-0.2, 0.0, 0.0, -1.5), (-3.0, 0.0, 0.0, 2.0)]
    for ours, _ in CASES.values():
        of = tokens(rows)
        gains = ours(of)
        gains.objective_N.sum().backward()
        assert bool(gains.kept_N.all())
        torch.testing.assert_close(of.logprob_N.grad, of.advantage_N)


def test_a_ratio_beyond_float_range_stays_finite():
    of = PolicyLossInputs(
        torch.tensor([-0.1], requires_grad=True),
        torch.tensor([-0.1]),
        torch.tensor([-500.0]),
        torch.tensor([1.0]),
    )
    gains = importance_weighted_ppo(of, clip_low=0.2, clip_high=0.28)
    gains.objective_N.sum().backward()
    assert torch.isfinite(gains.objective_N).all() and torch.isfinite(of.logprob_N.grad).all()


def test_the_teacher_advantage_is_a_constant_that_may_be_clipped():
    logp = torch.tensor([-1.0, -9.0, -0.1], requires_grad=True)
    teacher = torch.tensor([-0.5, -0.1, -8.0])
    for clip, expected in ((None, [0.5, 8.9, -7.9]), (5.0, [0.5, 5.0, -5.0])):
        found = teacher_logprob_diff(teacher, logp, clip=clip)
        assert found.tolist() == pytest.approx(expected)
        assert not found.requires_grad


def test_the_teacher_advantage_is_not_clipped_by_default_as_in_equation_2():
    of = PolicyTokens(
        logprob_N=torch.tensor([-9.0]),
        old_logprob_N=torch.tensor([-9.0]),
        rollout_logprob_N=torch.tensor([-9.0]),
        advantage_N=torch.zeros(1),
        teacher_logprob_N=torch.tensor([-0.5]),
        teacher_weight_N=torch.ones(1),
    )
    for chosen, expected in (
        (PolicyLossSettings(), 8.5),
        (PolicyLossSettings(teacher_clip=5.0), 5.0),
    ):
        loss = PolicyLoss(chosen)
        loss(of)
        assert loss.records[0].advantage_N.tolist() == [expected]
