"""Triton kernels in bfloat16 on a GPU, against their references in float64."""

import pytest
import torch

from paddock.kernels import (
    dense_attention,
    dispatch,
    expert_topk,
    linear_cross_entropy,
    linear_fp32,
    moe_permute,
    norm,
    rope,
    swiglu,
)
from paddock.kernels.topk import topk_indices
from paddock.model import AttentionMetadata
from paddock.optim import AdamW, clip_grad_norm_
from paddock.records import NamedParameter, ParameterRole
from tests.kernels.interpreter_cases import chosen, documents, error
from tests.model.networks import build_network, latent_config, tokens

pytestmark = pytest.mark.gpu


def leaf(*shape, scale=1.0):
    made = scale * torch.randn(*shape, device="cuda")
    return made.bfloat16().requires_grad_()


def gradients(function, leaves, above):
    out = function(*leaves)
    return [out, *torch.autograd.grad(out, leaves, above)]


def distances(function, leaves):
    """Relative errors of a half-precision function against itself in float64, which no kernel
    supports. A second run must give the same bits."""
    above = torch.randn_like(function(*leaves))
    found = gradients(function, leaves, above)
    again = gradients(function, leaves, above)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = gradients(function, exact, above.double())
    return [error(a, b) for a, b in zip(found, expected, strict=True)]


ATTENTION = {
    "documents of many lengths": ((700, 1, 129, 300), (4, 4), 128, 128, 40),
    "wide heads": ((400, 131), (2, 2), 256, 256, 64),
    "narrow values of groups": ((300,), (4, 2), 192, 128, 33),
    "small heads": ((200, 57), (3, 3), 24, 16, 9),
}


@pytest.mark.parametrize("case", ATTENTION.values(), ids=ATTENTION)
@pytest.mark.parametrize("masked", [True, False])
def test_attention_over_documents(case, masked):
    lengths, (heads, groups), dim, value, k = case
    torch.manual_seed(0)
    spans = documents(*lengths)
    T = sum(lengths)
    leaves = (leaf(T, heads, dim), leaf(T, groups, dim), leaf(T, groups, value))
    index = chosen(spans, k).cuda()
    name = "topk_masked_attention" if masked else "causal_attention"

    def attend(q, k, v):
        assert q.dtype == torch.float64 or dense_attention.packed.suits(name, q, k, v, spans)
        if masked:
            return dense_attention.topk_masked_attention(q, k, v, spans, index, scale=dim**-0.5)
        if q.dtype == torch.float64:
            return dense_attention.dense_attention(q, k, v, spans, scale=dim**-0.5)
        return dense_attention.packed.attention(q, k, v, spans, None, scale=dim**-0.5)

    assert max(distances(attend, leaves)) < 8e-3


def test_attention_of_the_small_preset_under_random_masks():
    torch.manual_seed(0)
    spans = documents(4096, 2048)
    T = 6144
    score = torch.rand(T, 4096, device="cuda")
    local = torch.cat([torch.arange(n, device="cuda") for n in (4096, 2048)])
    hidden = torch.arange(4096, device="cuda") > local.unsqueeze(1)
    index = score.masked_fill(hidden, -1.0).topk(1024, dim=1).indices.sort(1).values
    first = torch.repeat_interleave(torch.tensor([0, 4096]), torch.tensor([4096, 2048])).cuda()
    index = torch.where((local < 1024).unsqueeze(1), -1, index + first.unsqueeze(1)).int()
    leaves = tuple(leaf(T, 2, 128) for _ in range(3))
    assert (
        max(
            distances(
                lambda q, k, v: dense_attention.topk_masked_attention(
                    q, k, v, spans, index, scale=0.1
                ),
                leaves,
            )
        )
        < 8e-3
    )


@pytest.mark.parametrize(("rows", "dim"), [(5000, 1024), (70, 6144), (1, 320), (3000, 96)])
def test_norms(rows, dim):
    torch.manual_seed(0)
    x, weight, bias = leaf(rows, dim + 8), leaf(dim), leaf(dim)
    assert norm.fused.suits(x, weight)
    found = distances(lambda x, w: norm.rms_norm(x[:, 8:], w, 1e-5), (x, weight))
    assert max(found) < 6e-3
    found = distances(lambda x, w, b: norm.layer_norm(x[:, 8:], w, b, 1e-6), (x, weight, bias))
    assert max(found) < 6e-3


@pytest.mark.parametrize("rotate", [rope.rope_interleaved, rope.rope_halves])
@pytest.mark.parametrize(("dims", "first"), [(64, 0), (128, 64), (256, 192), (128, 0)])
def test_rotations(rotate, dims, first):
    torch.manual_seed(0)
    angle = torch.randn(300, 32, device="cuda")
    x = leaf(300, 16, dims)
    assert rope.fused.suits(x, angle.cos())
    found = distances(lambda x: rotate(x, angle.cos(), angle.sin(), first), (x,))
    assert max(found) < 4e-3


def test_the_gated_activation():
    torch.manual_seed(0)
    gate, up, both = leaf(999, 512), leaf(999, 512), leaf(777, 3000)
    assert swiglu.fused.suits(gate, up) and swiglu.fused.suits(both)
    assert max(distances(swiglu.swiglu, (gate, up))) < 4e-3
    assert max(distances(swiglu.silu_and_mul, (both,))) < 4e-3


@pytest.mark.parametrize(("experts", "k"), [(32, 4), (256, 8), (20, 3)])
def test_expert_topk_and_permutation(experts, k):
    torch.manual_seed(0)
    score = torch.randn(3000, experts, device="cuda").mul(3).round()
    assert expert_topk.fused.suits(score, k)
    expert = expert_topk.expert_topk(score, k)
    assert torch.equal(expert.cpu(), topk_indices(score.cpu(), k))
    assert moe_permute.fused.sorts(expert, experts)
    order = moe_permute.sort_by_expert(expert, experts)
    expected = moe_permute.reference.sort_by_expert(expert.cpu(), experts)
    for name in ("token_R", "slot_TK", "counts_E"):
        assert torch.equal(getattr(order, name).cpu(), getattr(expected, name)), name
    assert torch.equal(moe_permute.count_tokens_per_expert(expert, experts), order.counts_E)
    few, wanted = (
        sort(expert[:9], experts)
        for sort in (moe_permute.sort_by_expert, moe_permute.reference.sort_by_expert)
    )
    for name in ("token_R", "slot_TK", "counts_E"):
        assert torch.equal(getattr(few, name), getattr(wanted, name)), name
    x, answer = leaf(3000, 136), leaf(3000 * k, 136)
    weight = torch.rand(3000, k, device="cuda", requires_grad=True)
    assert max(distances(lambda x: moe_permute.permute(x, order), (x,))) < 4e-3
    found = distances(lambda a, w: moe_permute.unpermute(a, w, order), (answer, weight))
    assert max(found) < 4e-3


def test_linear_fp32():
    torch.manual_seed(0)
    x, weight = leaf(500, 256), leaf(32, 256)
    assert linear_fp32.fused.suits(x, weight)
    out, dx, dweight = distances(linear_fp32.linear_fp32, (x, weight))
    assert out < 1e-6
    assert max(dx, dweight) < 5e-3


def test_linear_fp32_with_float32_weights():
    torch.manual_seed(0)
    x = leaf(500, 256)
    weight = torch.randn(16, 256, device="cuda", requires_grad=True)
    assert linear_fp32.fused.suits(x, weight)
    out, dx, dweight = distances(linear_fp32.linear_fp32, (x, weight))
    assert out < 1e-5  # a bfloat16 weight alone would be 2e-3 away
    assert max(dx, dweight) < 5e-3


@pytest.mark.parametrize("ignored", [0, 200])
def test_linear_cross_entropy(ignored):
    torch.manual_seed(0)
    hidden, head = leaf(500, 64), leaf(5000, 64, scale=0.2)
    target = torch.randint(0, 5000, (500,), device="cuda")
    target[:ignored] = -100
    assert linear_cross_entropy.fused.suits(hidden, head)
    loss, dhidden, dhead = distances(
        lambda h, w: linear_cross_entropy.linear_cross_entropy(
            h, w, target, chunk_bytes=4 * 5000 * 130
        ),
        (hidden, head),
    )
    assert loss < 1e-5
    assert max(dhidden, dhead) < 6e-3


def test_the_fused_adamw_step_matches_the_cpu():
    torch.manual_seed(0)
    values = [torch.randn(40, 30), torch.randn(7), torch.randn(3, 8, 8)]
    grads = [[torch.randn_like(value) for value in values] for _ in range(3)]

    def stepped(device):
        kinds = ("matrix", "vector", "matrix")
        parameters = [torch.nn.Parameter(value.to(device)) for value in values]
        roles = [
            NamedParameter(f"p{i}", p, ParameterRole(kind))
            for i, (p, kind) in enumerate(zip(parameters, kinds, strict=True))
        ]
        optimizer = AdamW(roles, lr=0.1)
        for each in grads:
            for parameter, grad in zip(parameters, each, strict=True):
                parameter.grad = grad.to(device)
            norm = clip_grad_norm_(parameters, 1.0)
            optimizer.step()
        return [norm, *parameters]

    for found, expected in zip(stepped("cuda"), stepped("cpu"), strict=True):
        assert error(found.cpu(), expected) < 1e-6


def test_a_network_is_as_accurate_with_kernels_as_without():
    """Both run in bfloat16, so both differ from float64, and from each other, by as much."""
    network = build_network(latent_config(mtp=None)).cuda().cast(torch.bfloat16)
    token_T, layout = tokens(90).cuda(), AttentionMetadata.packed([50, 40], device="cuda")

    def run():
        network.zero_grad()
        hidden_TD = network(token_T, layout).hidden_TD
        loss_T = linear_cross_entropy.linear_cross_entropy(hidden_TD, network.head.weight, token_T)
        loss_T.mean().backward()
        grads = [p.grad.double() for p in network.parameters() if p.grad is not None]
        return loss_T.detach(), grads

    def distance(grads):
        return float(sum((a - b).square().sum() for a, b in zip(grads, true, strict=True))) ** 0.5

    loss_T, grads = run()
    again_T, _ = run()
    assert torch.equal(loss_T, again_T)
    with dispatch.disable_kernels(*dispatch.KERNELS):
        plain_T, plain = run()
        network.cast(torch.float64)
        true_T, true = run()
    assert float((loss_T.mean() - true_T.mean()).abs()) < 2e-2
    assert float((plain_T.mean() - true_T.mean()).abs()) < 2e-2
    # A router or an indexer may choose either of two scores that differ by a rounding.
    assert distance(grads) < 1.5 * distance(plain) + 0.02
