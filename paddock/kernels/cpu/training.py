"""Autograd of the CPU kernels: linear layers, RMSNorm, RoPE, SwiGLU, causal attention,
cross-entropy.

The ops that use these have a contract and a reference; `suits_training` says where kernels apply.
T tokens, D inputs or features, F outputs, H heads, P pairs; K tokens with a target, R of them in a
chunk, V vocabulary.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from paddock.kernels import cpu
from paddock.kernels.spans import Span

NORM_ROWS = 64  # of training.h


def _rows(x: Tensor) -> Tensor:
    """The kernels take any stride between rows."""
    return x if x.stride(-1) == 1 else x.contiguous()


def weight_grad(grad_TF: Tensor, x_TD: Tensor, into_FD: Tensor | None = None) -> Tensor:
    """grad.T @ x in float32; added to `into_FD` if that is given."""
    grad_TF, x_TD = _rows(grad_TF), _rows(x_TD)
    (T, outputs), inputs = grad_TF.shape, x_TD.shape[1]
    out_FD = grad_TF.new_empty(outputs, inputs, dtype=torch.float32) if into_FD is None else into_FD
    cpu.function("weight_grad", grad_TF.dtype)(
        *(T, outputs, inputs, grad_TF.data_ptr(), grad_TF.stride(0)),
        *(x_TD.data_ptr(), x_TD.stride(0), out_FD.data_ptr(), into_FD is not None),
    )
    return out_FD


def linear(x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    return _Linear.apply(x_TD, weight_FD)  # type: ignore[no-any-return]


def multiply(x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    """x @ weight.T by oneDNN. PyTorch multiplies float32 with MKL, which reaches half of that on
    processors of other vendors than its own (212 of 440 GFLOP/s on two Zen 5 cores)."""
    if x_TD.dtype != torch.float32 or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return F.linear(x_TD, weight_FD)
    return torch.ops.mkldnn._linear_pointwise(x_TD, weight_FD, None, "none", [], "")  # type: ignore[no-any-return]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_FD: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_FD)
        return multiply(x_TD, weight_FD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TD, weight_FD = ctx.saved_tensors
        dx_TD = multiply(grad_TF, weight_FD.T) if ctx.needs_input_grad[0] else None
        dweight_FD = weight_grad(grad_TF, x_TD) if ctx.needs_input_grad[1] else None
        return dx_TD, dweight_FD


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return _RMSNorm.apply(x_TD, weight_D, eps)  # type: ignore[no-any-return]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x_TD, weight_D)
        ctx.eps = eps
        T, D = x_TD.shape
        out_TD = x_TD.new_empty(T, D)
        cpu.function("rms_norm", x_TD.dtype)(
            *(T, D, x_TD.data_ptr(), x_TD.stride(0), weight_D.data_ptr(), eps),
            *(out_TD.data_ptr(), D),
        )
        return out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None]:
        x_TD, weight_D = ctx.saved_tensors
        T, D = x_TD.shape
        grad_TD = _rows(grad_TD)
        dx_TD = x_TD.new_empty(T, D)
        part_PD = x_TD.new_empty(-(-T // NORM_ROWS), D, dtype=torch.float32)
        cpu.function("rms_norm_grad", x_TD.dtype)(
            *(T, D, grad_TD.data_ptr(), grad_TD.stride(0), x_TD.data_ptr(), x_TD.stride(0)),
            *(weight_D.data_ptr(), ctx.eps, dx_TD.data_ptr(), part_PD.data_ptr()),
        )
        return dx_TD, part_PD.sum(0).to(weight_D.dtype), None


def rope(x_THD: Tensor, cos_TP: Tensor, sin_TP: Tensor, first: int, *, interleaved: bool) -> Tensor:
    return _Rope.apply(x_THD, cos_TP, sin_TP, first, interleaved)  # type: ignore[no-any-return]


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_THD: Tensor, cos_TP: Tensor, sin_TP: Tensor, first: int, interleaved: bool
    ) -> Tensor:
        ctx.save_for_backward(cos_TP, sin_TP)
        ctx.layout = first, interleaved
        return rotate(x_THD, cos_TP, sin_TP, first, interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        cos_TP, sin_TP = ctx.saved_tensors
        return rotate(_rows(grad_THD), cos_TP, -sin_TP, *ctx.layout), None, None, None, None


def rotate(x_THD: Tensor, cos_TP: Tensor, sin_TP: Tensor, first: int, interleaved: bool) -> Tensor:
    T, H, D = x_THD.shape
    out_THD = x_THD.new_empty(T, H, D)
    angles = cos_TP.float().contiguous(), sin_TP.float().contiguous()
    cpu.function("rope", x_THD.dtype)(
        *(T, H, D, x_THD.data_ptr(), x_THD.stride(0), x_THD.stride(1), out_THD.data_ptr(), first),
        *(angles[0].data_ptr(), angles[1].data_ptr(), cos_TP.shape[1], interleaved),
    )
    return out_THD


def swiglu(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    return _SwiGLU.apply(gate_TF, up_TF)  # type: ignore[no-any-return]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_TF: Tensor, up_TF: Tensor) -> Tensor:
        ctx.save_for_backward(gate_TF, up_TF)
        out_TF = gate_TF.new_empty(gate_TF.shape)
        cpu.function("swiglu", gate_TF.dtype)(
            *(*gate_TF.shape, gate_TF.data_ptr(), gate_TF.stride(0)),
            *(up_TF.data_ptr(), up_TF.stride(0), out_TF.data_ptr()),
        )
        return out_TF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor, Tensor]:
        gate_TF, up_TF = ctx.saved_tensors
        grad_TF = grad_TF.contiguous()
        dgate_TF, dup_TF = gate_TF.new_empty(gate_TF.shape), up_TF.new_empty(up_TF.shape)
        cpu.function("swiglu_grad", gate_TF.dtype)(
            *(*gate_TF.shape, grad_TF.data_ptr(), gate_TF.data_ptr(), gate_TF.stride(0)),
            *(up_TF.data_ptr(), up_TF.stride(0), dgate_TF.data_ptr(), dup_TF.data_ptr()),
            dgate_TF.shape[1],
        )
        return dgate_TF, dup_TF


def attention(
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGV: Tensor,
    spans: Sequence[Span],
    *,
    scale: float,
) -> Tensor:
    """Causal attention of whole documents that lie one after another in all inputs."""
    start_2B = torch.tensor([(span.query, span.queries) for span in spans]).T.contiguous()
    return _Attention.apply(query_THD, key_TGD, value_TGV, start_2B, scale)  # type: ignore[no-any-return]


def suits_attention(
    query_THD: Tensor, key_TGD: Tensor, value_TGV: Tensor, spans: Sequence[Span]
) -> bool:
    heads = (query_THD, key_TGD, value_TGV)
    return (
        torch.is_grad_enabled()
        and cpu.suits_training(*heads)
        and all(span.past == 0 and span.query == span.key for span in spans)
        and sum(span.queries for span in spans) == len(query_THD) == len(key_TGD)
        and all(a.query + a.queries == b.query for a, b in pairwise(spans))
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        query_THD, key_TGD, value_TGV, start_2B, scale = inputs
        heads = query_THD.contiguous(), key_TGD.contiguous(), value_TGV.contiguous()
        out_THV = query_THD.new_empty(*query_THD.shape[:2], value_TGV.shape[2])
        lse_TH = query_THD.new_empty(query_THD.shape[:2], dtype=torch.float32)
        cpu.function("causal_attention", query_THD.dtype)(
            *_attention_shape(start_2B, query_THD, value_TGV, scale),
            *(x.data_ptr() for x in (*heads, out_THV, lse_TH)),
        )
        ctx.save_for_backward(*heads, out_THV, lse_TH, start_2B)
        ctx.scale = scale
        return out_THV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THV: Tensor) -> tuple[Tensor | None, ...]:
        query_THD, key_TGD, value_TGV, out_THV, lse_TH, start_2B = ctx.saved_tensors
        dquery_THD = torch.empty_like(query_THD)
        dkey_THD = torch.empty_like(query_THD, dtype=torch.float32)
        dvalue_THV = torch.empty_like(out_THV, dtype=torch.float32)
        inputs = (query_THD, key_TGD, value_TGV, out_THV, lse_TH, grad_THV.contiguous())
        cpu.function("causal_attention_grad", query_THD.dtype)(
            *_attention_shape(start_2B, query_THD, value_TGV, ctx.scale),
            *(x.data_ptr() for x in (*inputs, dquery_THD, dkey_THD, dvalue_THV)),
        )
        dkey_TGD, dvalue_TGV = _sum_groups(dkey_THD, key_TGD), _sum_groups(dvalue_THV, value_TGV)
        return dquery_THD, dkey_TGD, dvalue_TGV, None, None


def _attention_shape(
    start_2B: Tensor, query_THD: Tensor, value_TGV: Tensor, scale: float
) -> tuple[float, ...]:
    """The first arguments of both kernels."""
    (_, H, D), (_, G, V) = query_THD.shape, value_TGV.shape
    starts, lengths = start_2B[0].data_ptr(), start_2B[1].data_ptr()
    return start_2B.shape[1], starts, lengths, H, G, D, V, scale


def _sum_groups(grad_THD: Tensor, like_TGD: Tensor) -> Tensor:
    """The gradients of the query heads that share a key head, added up."""
    grad_TGRD = grad_THD.unflatten(1, (like_TGD.shape[1], -1))
    one = grad_TGRD.shape[2] == 1
    return (grad_THD if one else grad_TGRD.sum(2)).to(like_TGD.dtype)


def cross_entropy(
    logit_RV: Tensor, target_R: Tensor, temperature: float, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """Negative log-likelihood of each row's target and its gradient in the logits before they are
    divided by the temperature, in `dtype`; None: no gradient. In float32 it overwrites them."""
    R, V = logit_RV.shape
    nll_R, grad_RV = logit_RV.new_empty(R), None
    if dtype is not None:
        grad_RV = logit_RV if dtype == torch.float32 else logit_RV.new_empty(R, V, dtype=dtype)
    cpu.function("cross_entropy", dtype or torch.float32)(
        *(R, V, logit_RV.data_ptr(), target_R.data_ptr(), 1 / temperature, nll_R.data_ptr()),
        None if grad_RV is None else grad_RV.data_ptr(),
    )
    return nll_R, grad_RV
