import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from paddock.kernels.newton_schulz import XTUNER, newton_schulz
from paddock.optim import AdamW, Muon, MuonSettings
from paddock.optim.muon import orthogonalize_role
from paddock.optim.param_groups import PARAM_GROUP_OPTIONS, ParamGroupOptions
from paddock.records import NamedParameter, ParameterRole
from paddock.records.parameter import MuonSplit

WHOLE = ParameterRole("matrix")
ROLES = {
    "embed": ((10, 8), ParameterRole("embedding")),
    "kv_up": ((4 * (3 + 5), 8), ParameterRole("matrix", MuonSplit(heads=4, rows=(3, 5)))),
    "gate_up": ((3, 12, 8), ParameterRole("matrix", MuonSplit(rows=(6, 6)))),
    "down": ((3, 8, 6), WHOLE),
    "out": ((8, 16), WHOLE),
    "router": ((3, 8), ParameterRole("router")),
    "gain": ((8,), ParameterRole("vector")),
}


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


def named_parameters(roles=ROLES, dtype=torch.float32):
    return [
        NamedParameter(name, nn.Parameter(torch.randn(shape).to(dtype)), role)
        for name, (shape, role) in roles.items()
    ]


def parameters_and_copy(roles=ROLES):
    """The same parameters twice."""
    ours = named_parameters(roles)
    return ours, copy.deepcopy(ours)


def set_gradients(*lots, step=0):
    rng = torch.Generator().manual_seed(step)
    for same in zip(*lots, strict=True):
        grad = torch.randn(same[0].parameter.shape, generator=rng)
        for each in same:
            each.parameter.grad = grad.to(each.parameter.dtype)


def run(optimizer, named, steps):
    for step in steps:
        set_gradients(named, step=step)
        optimizer.step()


def weights(named):
    return {each.name: each.parameter.detach() for each in named}


def assert_same_bits(named, others):
    torch.testing.assert_close(weights(named), weights(others), atol=0, rtol=0)


def assert_same_state(optimizer, other):
    ours, theirs = optimizer.state_dict(), other.state_dict()
    torch.testing.assert_close(ours["state"], theirs["state"], atol=0, rtol=0)
    assert ours["param_groups"] == theirs["param_groups"]


# The direction


@pytest.mark.parametrize(
    ("settings", "low", "high"),
    [
        (MuonSettings(), 0.68, 1.21),
        (MuonSettings(coefficients=XTUNER), 0.97, 1.15),
        (MuonSettings(scale="original"), 0.68, 1.21),
    ],
)
def test_every_block_is_near_orthogonal_at_its_own_scale(settings, low, high):
    role = ParameterRole("matrix", MuonSplit(heads=4, rows=(6, 10)))
    direction = orthogonalize_role(torch.randn(64, 20), role, settings)
    for head in direction.split(16):
        for block in head.split((6, 10)):
            scale = 0.2 * 20**0.5 if settings.scale == "rms" else 1.0
            values = torch.linalg.svdvals(block) / scale
            assert low < values.min() and values.max() < high


def test_a_step_has_about_the_size_of_an_adamw_step():
    for shape in [(64, 64), (32, 128), (128, 32)]:
        direction = orthogonalize_role(torch.randn(shape), WHOLE)
        assert 0.15 < direction.square().mean().sqrt() < 0.25


def test_a_small_gradient_head_is_independent_of_a_large_one():
    loud, quiet = torch.randn(2, 8, 32)
    split = ParameterRole("matrix", MuonSplit(heads=2, rows=(8,)))

    def quiet_direction(volume, role):
        return orthogonalize_role(torch.cat((volume * loud, quiet)), role)[8:]

    alone = orthogonalize_role(quiet, WHOLE)
    torch.testing.assert_close(quiet_direction(1.0, split), alone)
    torch.testing.assert_close(quiet_direction(1e4, split), alone)
    assert quiet_direction(1e4, WHOLE).norm() < 0.5 * quiet_direction(1.0, WHOLE).norm()


def test_keys_and_values_of_each_head_are_separate_blocks():
    update = torch.randn(4 * (3 + 5), 8)
    direction = orthogonalize_role(update, ParameterRole("matrix", MuonSplit(heads=4, rows=(3, 5))))
    for head in range(4):
        for rows in (slice(8 * head, 8 * head + 3), slice(8 * head + 3, 8 * head + 8)):
            expected = 0.2 * 8**0.5 * newton_schulz(update[rows])
            torch.testing.assert_close(direction[rows], expected)


@pytest.mark.parametrize("split", [None, MuonSplit(rows=(6, 6)), MuonSplit(heads=2, rows=(2, 4))])
def test_stacked_experts_are_orthogonalized_separately(split):
    role, update = ParameterRole("matrix", split), torch.randn(5, 12, 8)
    alone = torch.stack([orthogonalize_role(expert, role) for expert in update])
    torch.testing.assert_close(orthogonalize_role(update, role), alone)


# The steps


@pytest.mark.filterwarnings("ignore:TF32")
@pytest.mark.parametrize(
    ("scale", "adjust"), [("rms", "match_rms_adamw"), ("original", "original")]
)
def test_whole_matrices_follow_torchs_muon(scale, adjust):
    roles = {"wide": ((12, 40), WHOLE), "tall": ((40, 12), WHOLE), "again": ((12, 40), WHOLE)}
    ours, theirs = parameters_and_copy(roles)
    settings = MuonSettings(scale=scale, dtype=torch.bfloat16)
    muon = Muon(ours, lr=0.02, weight_decay=0.1, muon=settings)
    peer = torch.optim.Muon(
        [each.parameter for each in theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn=adjust
    )
    # Without oneDNN: a virtual CPU may report AMX bfloat16 that it does not execute.
    with torch.backends.mkldnn.flags(enabled=False):
        for step in range(6):
            set_gradients(ours, theirs, step=step)
            muon.step()
            peer.step()
    # A step moves an entry by about 4e-3; a last bit of bfloat16 in it is 2e-5.
    torch.testing.assert_close(weights(ours), weights(theirs), atol=1e-4, rtol=0)


def test_a_step_is_nesterov_momentum_orthogonalized_by_role():
    named = named_parameters()
    before = copy.deepcopy(weights(named))
    muon = Muon(named, lr=0.1, weight_decay=0.5)
    total = {each.name: torch.zeros_like(each.parameter) for each in named}
    for step in range(3):
        set_gradients(named, step=step)
        muon.step()
        for each in named:
            grad = each.parameter.grad
            total[each.name].mul_(0.95).add_(grad)  # the running sum of the papers
            if each.role.kind == "matrix":
                direction = orthogonalize_role(grad + 0.95 * total[each.name], each.role)
                before[each.name].mul_(1 - 0.1 * 0.5).sub_(0.1 * direction)
    for each in named:
        if each.role.kind == "matrix":
            torch.testing.assert_close(each.parameter.detach(), before[each.name])


def test_parameters_that_are_not_matrices_use_adamw():
    ours, theirs = parameters_and_copy()
    run(Muon(ours, lr=0.01), ours, range(4))
    run(AdamW(theirs, lr=0.01), theirs, range(4))
    same = {
        name: torch.equal(value, weights(theirs)[name]) for name, value in weights(ours).items()
    }
    assert same == {name: role.kind != "matrix" for name, (_, role) in ROLES.items()}


def test_other_kinds_can_use_muon():
    ours, theirs = parameters_and_copy()
    run(Muon(ours, lr=0.01, muon=MuonSettings(kinds=("matrix", "router"))), ours, range(2))
    renamed = [
        NamedParameter(each.name, each.parameter, WHOLE if each.name == "router" else each.role)
        for each in theirs
    ]
    run(Muon(renamed, lr=0.01), theirs, range(2))
    torch.testing.assert_close(weights(ours), weights(theirs))


@pytest.mark.parametrize("stack_bytes", [1, 6 * 8 * 4 * 2, 1 << 30])
def test_the_size_of_a_stack_does_not_change_the_step(stack_bytes):
    ours, theirs = parameters_and_copy()
    run(Muon(ours, lr=0.01, muon=MuonSettings(stack_bytes=stack_bytes)), ours, range(2))
    run(Muon(theirs, lr=0.01), theirs, range(2))
    torch.testing.assert_close(weights(ours), weights(theirs))


def test_weight_decay_applies_to_all_but_vectors():
    named = named_parameters()
    before = copy.deepcopy(weights(named))
    for each in named:
        each.parameter.grad = torch.zeros_like(each.parameter)
    Muon(named, lr=0.1, weight_decay=0.5).step()
    for each in named:
        kept = 1.0 if each.role.kind == "vector" else 1 - 0.1 * 0.5
        torch.testing.assert_close(each.parameter.detach(), kept * before[each.name])


def test_a_parameter_without_gradient_is_unchanged():
    named = named_parameters()
    before = copy.deepcopy(weights(named))
    muon = Muon(named, lr=0.1)
    set_gradients(named)
    for each in named[::2]:
        each.parameter.grad = None
    muon.step()
    moved = {name for name, value in weights(named).items() if not value.equal(before[name])}
    assert moved == {each.name for each in named[1::2]}


def test_the_memory_layout_of_a_gradient_does_not_matter():
    ours, theirs = parameters_and_copy(
        {"gate_up": ((3, 12, 8), ParameterRole("matrix", MuonSplit(heads=2, rows=(6,))))}
    )
    grad = torch.randn(12, 3, 8).transpose(0, 1)
    ours[0].parameter.grad, theirs[0].parameter.grad = grad, grad.contiguous()
    Muon(ours, lr=0.1).step()
    Muon(theirs, lr=0.1).step()
    assert_same_bits(ours, theirs)


def test_a_closure_is_evaluated_with_gradients_before_the_step():
    named = named_parameters({"out": ((4, 4), WHOLE)})
    weight = named[0].parameter
    before = weight.detach().clone()

    def loss():
        result = weight.square().sum()
        result.backward()
        return result

    assert Muon(named, lr=0.1).step(loss) == before.square().sum()
    assert not weight.equal(before)


# Settings


def test_one_lr_moves_every_group_and_the_scale_of_a_kind_stays():
    named = named_parameters()
    muon = Muon(
        named, lr=1.0, rules={**PARAM_GROUP_OPTIONS, "embedding": ParamGroupOptions(lr_scale=5.0)}
    )
    halving = torch.optim.lr_scheduler.LambdaLR(muon, lambda step: 0.5**step)
    run(muon, named, range(1))
    halving.step()
    assert {group["lr"] for group in muon.param_groups} == {0.5}
    scales = {group["kind"]: group["lr_scale"] for group in muon.param_groups}
    assert scales == {"embedding": 5.0, "matrix": 1.0, "router": 1.0, "vector": 1.0}


def test_the_scale_of_a_kind_scales_its_steps():
    ours, theirs = parameters_and_copy()
    before = copy.deepcopy(weights(ours))
    run(
        Muon(
            ours, lr=0.1, rules={**PARAM_GROUP_OPTIONS, "matrix": ParamGroupOptions(lr_scale=0.5)}
        ),
        ours,
        range(1),
    )
    run(Muon(theirs, lr=0.05), theirs, range(1))
    for name, value in weights(ours).items():
        assert value.equal(weights(theirs)[name]) == (ROLES[name][1].kind == "matrix")
        assert not value.equal(before[name])


@pytest.mark.parametrize(
    ("shape", "role", "complaint"),
    [
        ((16, 8), ParameterRole("matrix", MuonSplit(heads=3, rows=(4,))), "w: 3 times .* 12 rows"),
        ((8,), ParameterRole("matrix"), "w: expected a matrix"),
    ],
)
def test_an_invalid_role_is_rejected_by_name(shape, role, complaint):
    with pytest.raises(ValueError, match=complaint):
        Muon([NamedParameter("w", nn.Parameter(torch.zeros(shape)), role)], lr=0.1)


# State


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_is_bitwise_identical(dtype):
    whole = named_parameters(dtype=dtype)
    muon = Muon(whole, lr=0.01)
    run(muon, whole, range(3))
    disk = io.BytesIO()
    torch.save(muon.state_dict(), disk)
    resumed = copy.deepcopy(whole)
    run(muon, whole, range(3, 6))

    fresh = Muon(resumed, lr=99.0)
    fresh.load_state_dict(torch.load(io.BytesIO(disk.getvalue()), weights_only=True))
    run(fresh, resumed, range(3, 6))
    assert_same_bits(whole, resumed)
    assert_same_state(muon, fresh)


def test_state_is_keyed_by_name_in_torchs_distributed_checkpoint():
    model, other_model = nn.Linear(4, 4), nn.Linear(4, 4)
    kinds = {"weight": WHOLE, "bias": ParameterRole("vector")}

    def optimizer_of(module):
        roles = [NamedParameter(name, p, kinds[name]) for name, p in module.named_parameters()]
        return Muon(roles, lr=0.1)

    muon, fresh = optimizer_of(model), optimizer_of(other_model)
    model(torch.randn(2, 4)).sum().backward()
    muon.step()
    set_optimizer_state_dict(other_model, fresh, get_optimizer_state_dict(model, muon))
    assert_same_state(muon, fresh)


def test_the_state_of_other_parameters_is_rejected():
    muon = Muon(named_parameters(), lr=0.01)
    renamed = {name.replace("down", "up"): role for name, role in ROLES.items()}
    with pytest.raises(ValueError, match=r"\['down', 'up'\]"):
        Muon(named_parameters(renamed), lr=0.01).load_state_dict(muon.state_dict())


def test_half_parameters_keep_their_state_in_float32():
    named = named_parameters(dtype=torch.bfloat16)
    muon = Muon(named, lr=0.01)
    run(muon, named, range(2))
    kept = {value.dtype for state in muon.state.values() for value in state.values()}
    assert kept == {torch.float32, torch.int64}
    assert all(each.parameter.dtype == torch.bfloat16 for each in named)
