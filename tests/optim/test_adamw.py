import pytest
import torch
from torch import nn

from paddock.optim import AdamSettings, AdamW
from paddock.optim.adamw import adamw_step_, fused_adamw_step_
from paddock.records import NamedParameter, ParameterRole

KINDS = {"w": "matrix", "embed": "embedding", "gain": "vector"}
SHAPES = {"w": (6, 8), "embed": (10, 4), "gain": (8,)}


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


def named_parameters(dtype):
    return [
        NamedParameter(name, nn.Parameter(torch.randn(shape).to(dtype)), ParameterRole(KINDS[name]))
        for name, shape in SHAPES.items()
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.98)])
def test_steps_follow_torchs_adamw(dtype, betas):
    ours = named_parameters(dtype)
    theirs = {each.name: nn.Parameter(each.parameter.detach().clone()) for each in ours}
    optimizer = AdamW(ours, lr=0.01, weight_decay=0.3, adam=AdamSettings(betas=betas))
    peer = torch.optim.AdamW(
        [
            {"params": [theirs["w"], theirs["embed"]], "weight_decay": 0.3},
            {"params": [theirs["gain"]], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=betas,
    )
    for step in range(10):
        for each in ours:
            grad = torch.randn_like(each.parameter) * 10.0 ** (step % 3 - 4)
            each.parameter.grad = theirs[each.name].grad = grad
        optimizer.step()
        peer.step()
    torch.testing.assert_close({each.name: each.parameter for each in ours}, theirs)


def test_a_half_precision_parameter_is_rounded_once_per_step():
    (full,) = named_parameters(torch.float32)[:1]
    half = NamedParameter("w", nn.Parameter(full.parameter.detach().bfloat16()), full.role)
    with torch.no_grad():
        full.parameter.copy_(half.parameter)
    full.parameter.grad = torch.randn(6, 8).bfloat16().float()
    half.parameter.grad = full.parameter.grad.bfloat16()
    for named in (full, half):
        AdamW([named], lr=0.1, weight_decay=0.5).step()
    assert half.parameter.equal(full.parameter.bfloat16())


def test_the_state_of_half_precision_parameters_is_loaded_unrounded():
    named = named_parameters(torch.bfloat16)
    for each in named:
        each.parameter.grad = torch.randn_like(each.parameter)
    optimizer, fresh = AdamW(named, lr=0.1), AdamW(named, lr=0.1)
    optimizer.step()
    fresh.load_state_dict(optimizer.state_dict())
    assert fresh.state[named[0].parameter]["mean"].dtype == torch.float32
    torch.testing.assert_close(
        fresh.state_dict()["state"], optimizer.state_dict()["state"], atol=0, rtol=0
    )


def test_the_fused_step_matches_single_steps():
    alone, fused = named_parameters(torch.float32), named_parameters(torch.float32)
    group = {"lr": 0.1, "lr_scale": 0.5, "weight_decay": 0.3, "betas": (0.9, 0.95), "eps": 1e-8}
    states = {each.name: ({}, {}) for each in alone}
    for one, other in zip(alone, fused, strict=True):
        other.parameter.data.copy_(one.parameter.data)
    for _ in range(4):
        for one, other in zip(alone, fused, strict=True):
            one.parameter.grad = other.parameter.grad = torch.randn_like(one.parameter)
        with torch.no_grad():
            for each in alone:
                adamw_step_(each.parameter, states[each.name][0], group)
            fused_adamw_step_([(e.parameter, states[e.name][1], group) for e in fused])
    for one, other in zip(alone, fused, strict=True):
        torch.testing.assert_close(one.parameter, other.parameter)
        torch.testing.assert_close(*states[one.name])
