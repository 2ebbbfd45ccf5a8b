import pytest
import torch

from paddock.kernels.spans import Span
from paddock.model.config import MoESettings
from paddock.model.moe import MoE, Routing, TopKRouter, balance_loss, expert_load, select_experts


def moe_of(**changes) -> MoE:
    settings = MoESettings(**({"experts": 6, "active": 2, "inner": 8} | changes))
    module = MoE(16, settings)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


@pytest.mark.parametrize("shared", [0, 1, 2])
def test_the_output_is_the_weighted_experts_plus_the_shared_ones(shared):
    moe, x = moe_of(shared=shared), torch.randn(9, 16)
    y, routing = moe(x)
    for t in range(9):
        expected = moe.shared(x[t]) if moe.shared is not None else torch.zeros(16)
        for e, w in zip(routing.expert_TK[t], routing.weight_TK[t], strict=True):
            gate, up = (moe.experts.gate_up[e] @ x[t]).chunk(2)
            expected = expected + w * (moe.experts.down[e] @ (torch.nn.functional.silu(gate) * up))
        torch.testing.assert_close(y[t], expected, atol=1e-5, rtol=1e-5)


def test_weights_are_normalised_scores_times_the_scale():
    moe, x = moe_of(scale=2.5), torch.randn(9, 16)
    routing = moe.router(x)
    torch.testing.assert_close(routing.weight_TK.sum(-1), torch.full((9,), 2.5))
    plain = moe_of(normalize=False, scale=1.0)
    routing = plain.router(x)
    torch.testing.assert_close(routing.weight_TK, routing.score_TE.gather(1, routing.expert_TK))


def test_the_bias_changes_the_selection_but_not_the_weights():
    router = TopKRouter(16, MoESettings(experts=6, active=2, inner=8, normalize=False))
    torch.nn.init.normal_(router.weight)
    x = torch.randn(9, 16)
    router.bias[3] = 10.0
    routing = router(x)
    assert bool((routing.expert_TK == 3).any(1).all())
    scores = torch.sigmoid(x @ router.weight.T)
    torch.testing.assert_close(routing.weight_TK, 2.5 * scores.gather(1, routing.expert_TK))


def test_only_the_best_groups_are_eligible():
    settings = MoESettings(experts=6, active=2, inner=8, groups=3, groups_kept=1)
    # Group 1 holds the single best expert, group 2 the best pair.
    choice = torch.tensor([[0.1, 0.1, 0.9, 0.0, 0.6, 0.5]])
    assert select_experts(choice, settings).tolist() == [[4, 5]]


def test_ties_go_to_the_lowest_index():
    settings = MoESettings(experts=6, active=2, inner=8)
    assert select_experts(torch.full((1, 6), 0.5), settings).tolist() == [[0, 1]]


def test_bias_updates_balance_a_skewed_router():
    torch.manual_seed(0)
    router = TopKRouter(16, MoESettings(experts=8, active=2, inner=8))
    torch.nn.init.normal_(router.weight)
    with torch.no_grad():
        router.weight[0] += 0.5
    x = torch.randn(512, 16) + 0.5
    before = expert_load(router(x)).float().std()
    for _ in range(300):
        router.update_bias(expert_load(router(x)), rate=0.003)
    assert expert_load(router(x)).float().std() < 0.2 * before


def test_the_balance_loss_is_one_per_token_if_balanced_and_more_if_skewed():
    even = Routing(
        expert_TK=torch.tensor([[0, 1], [2, 3]]),
        weight_TK=torch.ones(2, 2),
        score_TE=torch.full((2, 4), 0.5),
    )
    spans = (Span(0, 2, 0, 2),)
    assert float(balance_loss(even, spans)) == pytest.approx(2.0)
    lopsided = Routing(
        expert_TK=torch.tensor([[0, 1], [0, 1]]),
        weight_TK=torch.ones(2, 2),
        score_TE=torch.tensor([[0.9, 0.9, 0.1, 0.1]] * 2),
    )
    assert float(balance_loss(lopsided, spans)) == pytest.approx(2 * 1.8)


def test_the_balance_loss_is_computed_per_sequence():
    routing = Routing(
        expert_TK=torch.tensor([[0, 1], [2, 3]]),
        weight_TK=torch.ones(2, 2),
        score_TE=torch.tensor([[0.9, 0.9, 0.1, 0.1], [0.1, 0.1, 0.9, 0.9]]),
    )
    packed = balance_loss(routing, (Span(0, 2, 0, 2),))
    separate = balance_loss(routing, (Span(0, 1, 0, 1), Span(1, 1, 1, 1)))
    assert float(separate) > float(packed)


def test_the_balance_loss_has_a_router_gradient():
    moe = moe_of()
    balance_loss(moe.router(torch.randn(9, 16)), (Span(0, 9, 0, 9),)).backward()
    assert bool(moe.router.weight.grad.any())
