"""Ops that use torch's own CUDA kernels match the references on a GPU."""

import pytest
import torch

from paddock.kernels.grouped_gemm import fused, grouped_gemm, reference
from paddock.kernels.index_scores import index_scores
from paddock.kernels.linear_cross_entropy import linear_cross_entropy
from paddock.kernels.precision import mm_fp32
from paddock.kernels.topk import index_topk
from paddock.model import AttentionMetadata, Transformer, preset

pytestmark = pytest.mark.gpu


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double().cpu() - exact.double().cpu()).norm() / exact.double().norm().cpu())


@pytest.mark.parametrize("counts", [[100, 0, 7, 300], [0, 0, 0, 64], [1, 1, 1, 1]])
def test_the_grouped_product_and_its_gradients(counts):
    torch.manual_seed(0)
    x = torch.randn(sum(counts), 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 128, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(sum(counts), 128, device="cuda", dtype=torch.bfloat16)
    assert fused.suits(x, weight)
    out = grouped_gemm(x, weight, counts)
    dx, dweight = torch.autograd.grad(out, (x, weight), grad)
    exact = [t.detach().double().cpu().requires_grad_() for t in (x, weight)]
    exact_out = reference.grouped_gemm(*exact, counts)
    exact_dx, exact_dweight = torch.autograd.grad(exact_out, exact, grad.double().cpu())
    assert error(out.detach(), exact_out.detach()) < 5e-3
    assert error(dx, exact_dx) < 5e-3
    assert error(dweight, exact_dweight) < 5e-3


def test_half_precision_products_are_accumulated_in_float32():
    torch.manual_seed(0)
    a, b = (torch.randn(300, 300, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found = mm_fp32(a, b)
    assert found.dtype == torch.float32
    assert error(found, a.double() @ b.double()) < 1e-6


def test_index_scores_and_topk_match_the_cpu():
    torch.manual_seed(0)
    query, key, weight = torch.randn(300, 4, 16), torch.randn(300, 16), torch.randn(300, 4)
    on_gpu = [x.cuda() for x in (query, key, weight)]
    assert error(index_scores(*on_gpu), index_scores(query, key, weight)) < 1e-5
    tied = [x.round() for x in (query, key, weight)]  # integers: exact, and full of ties
    kept = index_topk(*(x.cuda() for x in tied), past=0, k=20)
    assert torch.equal(kept.cpu(), index_topk(*tied, past=0, k=20))


def test_the_loss_and_its_gradients():
    torch.manual_seed(0)
    hidden = torch.randn(200, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = (torch.randn(500, 64, device="cuda") / 8).bfloat16().requires_grad_()
    target = torch.randint(0, 500, (200,), device="cuda")
    loss = linear_cross_entropy(hidden, head, target)
    dhidden, dhead = torch.autograd.grad(loss.sum(), (hidden, head))
    exact = [t.detach().double().cpu().requires_grad_() for t in (hidden, head)]
    exact_loss = linear_cross_entropy(*exact, target.cpu())
    exact_dhidden, exact_dhead = torch.autograd.grad(exact_loss.sum(), exact)
    assert error(loss.detach(), exact_loss.detach()) < 1e-5
    assert error(dhidden, exact_dhidden) < 5e-3
    assert error(dhead, exact_dhead) < 5e-3


def test_a_network_gives_the_same_logits_on_both_devices():
    network = Transformer.from_config(preset("nano"), seed=0)
    token_T = torch.randint(0, 960, (200,), generator=torch.Generator().manual_seed(0))
    on_cpu = network.logits(token_T)
    on_cpu.logsumexp(-1).sum().backward()
    grads = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
    network.zero_grad()
    network = network.cuda()
    on_gpu = network.logits(token_T)
    on_gpu.logsumexp(-1).sum().backward()
    assert error(on_gpu.detach(), on_cpu.detach()) < 1e-4
    for name, parameter in network.named_parameters():
        if parameter.grad is not None:
            assert error(parameter.grad, grads[name]) < 1e-2, name
    packed = network(token_T.cuda(), AttentionMetadata.packed([120, 80], device="cuda")).hidden_TD
    assert packed.isfinite().all()
