"""Linear cross-entropy on a CPU: the logits of a chunk are made once, for loss and gradients.

The gradient of the hidden states is linear in each token's upstream gradient: it is computed in
forward and scaled in backward. That of the head sums over tokens. Where all tokens are expected to
have the same upstream gradient it is computed in forward too; otherwise the gradient of the logits
is saved, up to SAVED_BYTES, and beyond that computed again in backward.

T tokens, K tokens with a target, R rows of one chunk, D hidden dim, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paddock.kernels.cpu import suits_training, training
from paddock.kernels.packed_linear import is_packable, pack, packed_linear
from paddock.kernels.workspace import chunks

CHUNK_BYTES = 1 << 27
SAVED_BYTES = 1 << 28


def suits(hidden_TD: Tensor, head_VD: Tensor) -> bool:
    return suits_training(hidden_TD, head_VD) and is_packable(head_VD)


def nll(
    hidden_TD: Tensor,
    head_VD: Tensor,
    target_T: Tensor,
    temperature: float,
    chunk_bytes: int | None,
    *,
    same_upstream: bool,
) -> Tensor:
    """Negative log-likelihood of each target; see the package's contract."""
    trains = torch.is_grad_enabled() and (hidden_TD.requires_grad or head_VD.requires_grad)
    plan = _Plan(target_T, temperature, chunk_bytes or CHUNK_BYTES, trains, same_upstream)
    return _NegLogLikelihood.apply(hidden_TD, head_VD, plan)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """Arguments that are not differentiated."""

    target_T: Tensor
    temperature: float
    chunk_bytes: int
    trains: bool
    same_upstream: bool

    def chunks(
        self, hidden_TD: Tensor, head_VD: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
        """Rows with a target, their hidden states, losses, and gradients of the logits."""
        index_K = (self.target_T >= 0).nonzero().squeeze(1)
        half = head_VD.dtype == torch.bfloat16
        packed = pack(head_VD) if half else None
        for part in chunks(len(index_K), 4 * len(head_VD), self.chunk_bytes):
            row_R = index_K[part]
            hidden_RD = hidden_TD[row_R]
            if packed is None:
                logit_RV = training.multiply(hidden_RD, head_VD)
            else:
                logit_RV = packed_linear(hidden_RD, packed, fp32=True)
            nll_R, grad_RV = training.cross_entropy(
                logit_RV,
                self.target_T[row_R],
                self.temperature,
                head_VD.dtype if self.trains else None,
            )
            yield row_R, hidden_RD, nll_R, grad_RV


class _NegLogLikelihood(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, head_VD: Tensor, plan: _Plan) -> Tensor:
        wants_hidden, wants_head = (plan.trains and wanted for wanted in ctx.needs_input_grad[:2])
        targets, V = int((plan.target_T >= 0).sum()), len(head_VD)
        nll_T = hidden_TD.new_zeros(len(plan.target_T), dtype=torch.float32)
        dhidden_TD = torch.zeros_like(hidden_TD) if wants_hidden else None
        dhead_VD = None
        if wants_head and plan.same_upstream:
            dhead_VD = torch.zeros_like(head_VD, dtype=torch.float32)
        saves = wants_head and dhead_VD is None and targets * V * head_VD.itemsize <= SAVED_BYTES
        saved: list[Tensor] = []
        for row_R, hidden_RD, nll_R, grad_RV in plan.chunks(hidden_TD, head_VD):
            nll_T[row_R] = nll_R
            if grad_RV is None:
                continue
            if dhidden_TD is not None:
                dhidden_TD[row_R] = training.multiply(grad_RV, head_VD.T)
            if dhead_VD is not None:
                training.weight_grad(grad_RV, hidden_RD, into_FD=dhead_VD)
            if saves:
                saved += [row_R, grad_RV]
        ctx.save_for_backward(hidden_TD, head_VD, dhidden_TD, dhead_VD, *saved)
        ctx.plan, ctx.saves = plan, saves
        return nll_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden_TD, head_VD, dhidden_TD, dhead_VD, *saved = ctx.saved_tensors
        grad_T = torch.where(ctx.plan.target_T >= 0, grad_T, 0)
        if dhidden_TD is not None:
            dhidden_TD = dhidden_TD * grad_T.unsqueeze(1).to(dhidden_TD.dtype)
        if not ctx.needs_input_grad[1]:
            return dhidden_TD, None, None
        upstream_K = grad_T[ctx.plan.target_T >= 0]
        if dhead_VD is not None and bool((upstream_K == upstream_K[:1]).all()):
            dhead_VD = dhead_VD * upstream_K[:1].sum()
        else:
            dhead_VD = torch.zeros_like(head_VD, dtype=torch.float32)
            made = ctx.plan.chunks(hidden_TD, head_VD)
            pairs = (
                zip(saved[::2], saved[1::2], strict=True)
                if ctx.saves
                else ((row_R, grad_RV) for row_R, _, _, grad_RV in made)
            )
            for row_R, grad_RV in pairs:
                # Hidden states are scaled instead of logits: they are narrower.
                above_RD = hidden_TD[row_R] * grad_T[row_R].unsqueeze(1).to(hidden_TD.dtype)
                training.weight_grad(grad_RV, above_RD, into_FD=dhead_VD)
        return dhidden_TD, dhead_VD.to(head_VD.dtype), None
