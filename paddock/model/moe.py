"""Gated MLP and mixture of experts (MoE): top-k router, routed and shared experts, balance loss.

T tokens, D hidden, F inner, E experts, K routed per token, R = T * K routed rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paddock.kernels import cpu
from paddock.kernels.expert_topk import expert_topk, route_experts
from paddock.kernels.fused_experts import fused_experts, is_supported
from paddock.kernels.grouped_gemm import grouped_gemm
from paddock.kernels.linear_fp32 import linear_fp32
from paddock.kernels.moe_permute import count_tokens_per_expert, permute, sort_by_expert, unpermute
from paddock.kernels.spans import Span
from paddock.kernels.swiglu import silu_and_mul, swiglu
from paddock.model.config import MoESettings
from paddock.model.fuse import fuse_weights, fused_linears
from paddock.model.linear import Linear
from paddock.parallel import SINGLE_RANK, ExpertDispatch, MeshDim


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x)"""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = Linear(hidden, inner, bias=False)
        self.up = Linear(hidden, inner, bias=False)
        self.down = Linear(inner, hidden, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        if x_TD.is_cuda and not torch.is_grad_enabled():
            gate_TF, up_TF = fused_linears(x_TD, (self.gate, self.up))
        else:
            gate_TF, up_TF = self.gate(x_TD), self.up(x_TD)
        return self.down(swiglu(gate_TF, up_TF))  # type: ignore[no-any-return]

    def fuse_weights(self) -> None:
        """Lay out `gate` and `up` contiguously in memory, to run as one product."""
        fuse_weights((self.gate, self.up))


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Experts of each token, ascending, and the weights of their outputs."""

    expert_TK: Tensor
    weight_TK: Tensor
    score_TE: Tensor  # sigmoid scores before bias and selection


class TopKRouter(nn.Module):
    """Sigmoid scores in float32, with a bias for auxiliary-loss-free load balancing.

    `update_bias` adjusts the bias after each step; no gradient reaches it. The bias affects which
    experts are selected, never the weights of their outputs.
    """

    bias: Tensor

    def __init__(self, hidden: int, moe: MoESettings) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.experts, hidden))
        self.register_buffer("bias", torch.zeros(moe.experts, dtype=torch.float32))

    def forward(self, x_TD: Tensor) -> Routing:
        logit_TE = linear_fp32(x_TD, self.weight)
        moe = self.moe
        if moe.groups == 1 and cpu.suits(logit_TE, self.bias):
            routed = route_experts(
                logit_TE, self.bias, moe.active, normalize=moe.normalize, scale=moe.scale
            )
            return Routing(*routed)
        score_TE = logit_TE.sigmoid()
        expert_TK = select_experts(score_TE.detach() + self.bias, self.moe)
        weight_TK = score_TE.gather(1, expert_TK)
        if self.moe.normalize:
            weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + 1e-20)
        return Routing(expert_TK, weight_TK * self.moe.scale, score_TE)

    @torch.no_grad()
    def update_bias(self, load_E: Tensor, rate: float) -> None:
        """Lower the bias of overloaded experts and raise that of underloaded ones by `rate`."""
        self.bias += rate * torch.sign(load_E.float().mean() - load_E.float())


def select_experts(score_TE: Tensor, moe: MoESettings) -> Tensor:
    """[T, K] indices of the top-k experts, ascending; ties go to the lowest index.

    With groups, only experts of the best groups (by the sum of their two best scores) qualify.
    """
    if moe.groups > 1:
        grouped_TGE = score_TE.unflatten(1, (moe.groups, -1))
        group_TG = grouped_TGE.topk(2, dim=-1).values.sum(-1)
        selected_TG = torch.zeros_like(group_TG, dtype=torch.bool)
        selected_TG.scatter_(1, expert_topk(group_TG, moe.groups_kept), True)
        score_TE = grouped_TGE.masked_fill(~selected_TG.unsqueeze(-1), float("-inf")).flatten(1)
    return expert_topk(score_TE, moe.active)


class GroupedExperts(nn.Module):
    """All experts of a layer as two stacked weights; gate rows first, as in fused checkpoints.

    After `shard` each rank holds some of them, and tokens are dispatched along `axis`.
    """

    def __init__(self, hidden: int, moe: MoESettings) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(moe.experts, 2 * moe.inner, hidden))
        self.down = nn.Parameter(torch.empty(moe.experts, hidden, moe.inner))
        self.axis = SINGLE_RANK

    def shard(self, axis: MeshDim) -> None:
        """Keep only this rank's experts."""
        for name, stack in list(self.named_parameters()):
            local = stack.detach()[axis.local_slice(len(stack))].clone()
            setattr(self, name, nn.Parameter(local, requires_grad=stack.requires_grad))
        self.axis = axis

    def forward(self, x_TD: Tensor, routing: Routing) -> Tensor:
        stacks = self.gate_up, self.down
        if self.axis.size == 1 and is_supported(x_TD, routing.expert_TK, *stacks):
            return fused_experts(x_TD, routing.expert_TK, routing.weight_TK, *stacks)
        order = sort_by_expert(routing.expert_TK, routing.score_TE.shape[1])
        dispatch = ExpertDispatch(order.counts_E, self.axis)
        x_RD, counts_E = dispatch.dispatch(permute(x_TD, order)), dispatch.counts_H
        inner_RF = silu_and_mul(grouped_gemm(x_RD, self.gate_up, counts_E))
        output_RD = dispatch.combine(grouped_gemm(inner_RF, self.down, counts_E))
        return unpermute(output_RD, routing.weight_TK, order)


class MoE(nn.Module):
    """Routed experts plus shared experts, whose output is added unscaled for every token."""

    def __init__(self, hidden: int, moe: MoESettings) -> None:
        super().__init__()
        self.router = TopKRouter(hidden, moe)
        self.experts = GroupedExperts(hidden, moe)
        self.shared = GatedMLP(hidden, moe.inner * moe.shared) if moe.shared else None

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Routing]:
        routing = self.router(x_TD)
        y_TD = self.experts(x_TD, routing)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        return y_TD, routing


def expert_load(routing: Routing) -> Tensor:
    """Number of tokens routed to each expert."""
    return count_tokens_per_expert(routing.expert_TK, routing.score_TE.shape[1])


def balance_loss(
    routing: Routing, spans: tuple[Span, ...], document_experts: Sequence[Tensor] | None = None
) -> Tensor:
    """Sequence-level balance loss: sum over sequences of tokens * sum_e f_e * P_e.

    f_e is the fraction of a sequence's routed tokens that went to expert e, times E, so that a
    perfectly balanced sequence scores 1 per token; P_e is the expert's mean normalised score and
    carries the gradient. `document_experts` are the routed experts of each span's whole sequence,
    where a span is only part of it.
    """
    T, E = routing.score_TE.shape
    prob_TE = routing.score_TE / (routing.score_TE.sum(-1, keepdim=True) + 1e-20)
    length_B = torch.tensor([span.queries for span in spans], device=prob_TE.device)
    sequence_T = torch.arange(len(spans), device=prob_TE.device).repeat_interleave(
        length_B, output_size=T
    )
    if document_experts is None:
        expert_TK = routing.expert_TK + E * sequence_T.unsqueeze(1)
        load_BE = count_tokens_per_expert(expert_TK, len(spans) * E).view(-1, E)
        rows_B = length_B * routing.expert_TK.shape[1]
    else:
        load_BE = torch.stack(
            [count_tokens_per_expert(experts_NK, E) for experts_NK in document_experts]
        )
        rows_B = torch.tensor(
            [experts_NK.numel() for experts_NK in document_experts], device=prob_TE.device
        )
    fraction_BE = load_BE.to(prob_TE.dtype) * (E / rows_B.unsqueeze(1))
    return (fraction_BE[sequence_T] * prob_TE).sum()
