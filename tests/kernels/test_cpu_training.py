"""Gradients of the CPU kernels against those of the references in float32."""

import pytest
import torch

from paddock.kernels import cpu
from paddock.kernels.cpu import library
from paddock.kernels.dense_attention import dense_attention
from paddock.kernels.dispatch import disable_kernels
from paddock.kernels.linear import linear
from paddock.kernels.linear_cross_entropy import cpu as loss_kernel
from paddock.kernels.linear_cross_entropy import linear_cross_entropy, token_logprobs
from paddock.kernels.norm import rms_norm
from paddock.kernels.rope import rope_halves, rope_interleaved
from paddock.kernels.spans import Span
from paddock.kernels.swiglu import silu_and_mul, swiglu

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def kernels():
    if library.library_file() is None:
        pytest.skip("no C++ compiler: references are used")
    assert cpu.load(wait=True)
    torch.manual_seed(0)


def check(function, *inputs, dtype, kernel):
    """Output and gradients of the kernel, for a random upstream gradient, are the reference's."""
    halves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    wide = [x.detach().float().requires_grad_() for x in halves]
    found = function(*halves)
    assert kernel in type(found.grad_fn).__name__ or kernel in str(found.grad_fn.next_functions)
    with disable_kernels("cpu"):
        expected = function(*wide)
    above = torch.randn(found.shape).to(found.dtype)
    found.backward(above)
    expected.backward(above.float())
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    pairs = [(found, expected), *((a.grad, b.grad) for a, b in zip(halves, wide, strict=True))]
    for ours, theirs in pairs:
        scale = float(theirs.detach().abs().max())
        torch.testing.assert_close(ours.float(), theirs, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize(("T", "D", "outputs"), [(1, 6, 10), (530, 70, 100), (64, 64, 96)])
def test_linear(T, D, outputs):
    weight, bias = torch.randn(outputs, D), torch.randn(outputs)
    check(linear, torch.randn(T, D), weight, dtype=torch.float32, kernel="_Linear")
    check(linear, torch.randn(T, D), weight, bias, dtype=torch.float32, kernel="_Linear")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(130, 70), (1, 576), (9, 3, 24)])
def test_rms_norm(dtype, shape):
    def norm(x, weight):
        return rms_norm(x, weight, 1e-5)

    check(norm, torch.randn(shape), torch.randn(shape[-1]), dtype=dtype, kernel="_RMSNorm")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rope", [rope_halves, rope_interleaved])
@pytest.mark.parametrize("first", [0, 6])
def test_rope(dtype, rope, first):
    angle = torch.randn(40, 9)

    def rotated(both):
        return rope(both[:, 1:], angle.cos(), angle.sin(), first)  # heads of a wider row

    check(rotated, torch.randn(40, 4, 24), dtype=dtype, kernel="_Rope")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [40, 64])
def test_swiglu(dtype, inner):
    gate, up = 5 * torch.randn(70, inner), torch.randn(70, inner)
    check(swiglu, gate, up, dtype=dtype, kernel="_SwiGLU")
    check(silu_and_mul, torch.cat((gate, up), dim=1), dtype=dtype, kernel="_SwiGLU")


def test_swiglu_of_a_very_negative_gate_is_zero():
    gate = torch.full((1, 16), -200.0, requires_grad=True)
    out = swiglu(gate, torch.ones(1, 16))
    out.sum().backward()
    assert out.abs().max() < 1e-30 and gate.grad.abs().max() < 1e-30


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("H", "G", "D", "V"), [(6, 2, 64, 64), (3, 3, 24, 40), (2, 1, 96, 80)])
def test_attention_of_whole_documents(dtype, H, G, D, V):
    lengths = (1, 200, 64, 47, 130)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    spans = [Span(s, n, s, n) for s, n in zip(starts, lengths, strict=True)]

    def attend(query, key, value):
        return dense_attention(query, key, value, spans, scale=D**-0.5)

    T = sum(lengths)
    heads = torch.randn(T, H, D), torch.randn(T, G, D), torch.randn(T, G, V)
    check(attend, *heads, dtype=dtype, kernel="_Attention")


T, D, V = 700, 48, 203


def losses(hidden, head, *, chunk_rows=300):
    target = torch.randint(V, (T,), generator=torch.Generator().manual_seed(1))
    target[::7] = -100
    return linear_cross_entropy(hidden, head, target, chunk_bytes=chunk_rows * V * 4)


def logprobs(hidden, head):
    target = torch.randint(V, (T,), generator=torch.Generator().manual_seed(1))
    target[::7] = -100
    return token_logprobs(hidden, head, target, temperature=0.7, chunk_bytes=300 * V * 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("saved_bytes", [0, loss_kernel.SAVED_BYTES])
def test_linear_cross_entropy_of_any_upstream_gradient(dtype, saved_bytes, monkeypatch):
    monkeypatch.setattr(loss_kernel, "SAVED_BYTES", saved_bytes)
    for function in (losses, logprobs):
        operands = torch.randn(T, D), torch.randn(V, D) / 3
        check(function, *operands, dtype=dtype, kernel="_NegLogLikelihood")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mean_loss_makes_its_logits_once(dtype, monkeypatch):
    rows = []
    kernel = loss_kernel.training.cross_entropy

    def counted(logit_RV, *arguments):
        rows.append(len(logit_RV))
        return kernel(logit_RV, *arguments)

    monkeypatch.setattr(loss_kernel.training, "cross_entropy", counted)
    hidden, head = torch.randn(T, D), torch.randn(V, D) / 3
    halves = [x.to(dtype).requires_grad_() for x in (hidden, head)]
    losses(*halves).mean().backward()
    assert sum(rows) == T - 100 and max(rows) == 300
    with disable_kernels("cpu"):
        wide = [x.detach().float().requires_grad_() for x in halves]
        losses(*wide).mean().backward()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for ours, theirs in zip(halves, wide, strict=True):
        scale = float(theirs.grad.abs().max())
        torch.testing.assert_close(ours.grad.float(), theirs.grad, rtol=0, atol=tolerance * scale)


def test_a_loss_of_no_targets_and_of_frozen_sides():
    hidden = torch.randn(T, D, requires_grad=True)
    head = torch.randn(V, D, requires_grad=True)
    linear_cross_entropy(hidden, head, torch.full((T,), -100)).sum().backward()
    assert hidden.grad.count_nonzero() == head.grad.count_nonzero() == 0
    (dhidden,) = torch.autograd.grad(losses(hidden, head.detach()).sum(), hidden)
    (dhead,) = torch.autograd.grad(losses(hidden.detach(), head).sum(), head)
    both = torch.autograd.grad(losses(hidden, head).sum(), (hidden, head))
    torch.testing.assert_close((dhidden, dhead), both)
    with torch.no_grad():
        torch.testing.assert_close(losses(hidden, head), losses(hidden, head, chunk_rows=1))
