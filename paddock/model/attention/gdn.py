"""Gated DeltaNet: linear attention with a delta rule and a fixed-size recurrent state.

    S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,   o_t = S_t^T q_t

Both variants keep the four projections of a GQA layer, so each can be initialised from one. Keys
and queries are L2-normalised per head, which keeps the recurrence stable for beta <= 1.

T tokens, H heads, D head dim, W convolution taps.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paddock.kernels.gated_delta import gated_delta_rule
from paddock.model.attention.gqa import GQA
from paddock.model.config import ModelConfig
from paddock.model.forward_context import AuxOutputs, ForwardContext, TopKSelection
from paddock.model.linear import Linear
from paddock.model.norm import RMSNorm


class SimpleGatedDeltaNet(GQA):
    """The recurrence on the pre-trained projections only: no convolution, no gate, no new weight.

    The paper does not give the equation; this is the plain delta rule (alpha = beta = 1) on rotated
    keys and queries, so that the pre-trained position and content features keep their use.
    """

    def forward(
        self, x_TD: Tensor, ctx: ForwardContext, selection: TopKSelection | None
    ) -> tuple[Tensor, TopKSelection | None, AuxOutputs]:
        query_THD, key_THD, value_THD = self.project_heads(x_TD, ctx)
        log_alpha_TH, beta_TH = self.compute_gates(x_TD)
        outputs = []
        for i, span in enumerate(ctx.attn_metadata.spans):
            q = span.query_slice
            out_NHD, state_HDD = gated_delta_rule(
                query_THD[q],
                key_THD[q],
                value_THD[q],
                log_alpha_TH[q],
                beta_TH[q],
                initial_state_HKV=ctx.kv_cache.load_state(self.layer, "state", i),
            )
            ctx.kv_cache.store_state(self.layer, "state", i, state_HDD)
            outputs.append(out_NHD)
        return self.project_output(torch.cat(outputs), x_TD), selection, AuxOutputs()

    def project_heads(self, x_TD: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Normalised queries and keys, and values, with KV heads repeated per query head."""
        query_THD, key_TGD, value_TGD = self.project(x_TD, ctx)
        groups = self.gqa.heads // self.gqa.kv_heads
        return (
            F.normalize(query_THD, dim=-1),
            F.normalize(key_TGD, dim=-1).repeat_interleave(groups, dim=1),
            value_TGD.repeat_interleave(groups, dim=1),
        )

    def compute_gates(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """log alpha and beta of each token and head."""
        ones_TH = x_TD.new_ones(len(x_TD), self.gqa.heads)
        return torch.zeros_like(ones_TH), ones_TH

    def project_output(self, out_THD: Tensor, x_TD: Tensor) -> Tensor:  # noqa: ARG002
        return self.o(out_THD.flatten(1))  # type: ignore[no-any-return]


class GatedDeltaNet(SimpleGatedDeltaNet):
    """Gated DeltaNet: short convolutions on queries, keys and values, learned decay and step size,
    a gated and normed output. Position comes from the convolutions and the decay, not from RoPE."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        gqa, hidden = self.gqa, config.hidden
        self.q_conv = ShortConvolution(gqa.heads * gqa.dim, gqa.conv)
        self.k_conv = ShortConvolution(gqa.kv_heads * gqa.dim, gqa.conv)
        self.v_conv = ShortConvolution(gqa.kv_heads * gqa.dim, gqa.conv)
        self.decay = Linear(hidden, gqa.heads, bias=False)
        self.decay_log = nn.Parameter(torch.empty(gqa.heads))
        self.decay_bias = nn.Parameter(torch.empty(gqa.heads))
        self.beta = Linear(hidden, gqa.heads, bias=False)
        self.gate = Linear(hidden, gqa.heads * gqa.dim, bias=False)
        self.out_norm = RMSNorm(gqa.dim, config.norm_eps)

    def project(self, x_TD: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        gqa = self.gqa
        query = self.q_conv(self.q(x_TD), ctx, self.layer, "q_conv")
        key = self.k_conv(self.k(x_TD), ctx, self.layer, "k_conv")
        value = self.v_conv(self.v(x_TD), ctx, self.layer, "v_conv")
        return (
            query.unflatten(1, (gqa.heads, gqa.dim)),
            key.unflatten(1, (gqa.kv_heads, gqa.dim)),
            value.unflatten(1, (gqa.kv_heads, gqa.dim)),
        )

    def compute_gates(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        log_alpha_TH = -self.decay_log.exp() * F.softplus(self.decay(x_TD) + self.decay_bias)
        return log_alpha_TH, self.beta(x_TD).sigmoid()

    def project_output(self, out_THD: Tensor, x_TD: Tensor) -> Tensor:
        gate_THD = self.gate(x_TD).unflatten(1, (self.gqa.heads, self.gqa.dim))
        return self.o((self.out_norm(out_THD) * F.silu(gate_THD)).flatten(1))  # type: ignore[no-any-return]


class ShortConvolution(nn.Module):
    """Causal depthwise convolution followed by SiLU; initialised as the identity."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, taps))

    def forward(self, x_TC: Tensor, ctx: ForwardContext, layer: int, stream: str) -> Tensor:
        channels, taps = self.weight.shape
        outputs = []
        for i, span in enumerate(ctx.attn_metadata.spans):
            previous = ctx.kv_cache.load_state(layer, stream, i)
            if previous is None:
                previous = x_TC.new_zeros(taps - 1, channels)
            padded = torch.cat((previous, x_TC[span.query_slice]))
            ctx.kv_cache.store_state(layer, stream, i, padded[len(padded) - (taps - 1) :])
            outputs.append(F.conv1d(padded.mT, self.weight.unsqueeze(1), groups=channels).mT)
        return F.silu(torch.cat(outputs))
