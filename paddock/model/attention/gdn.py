"""Linear attention with a delta rule: a state of fixed size instead of a growing past.

    S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,   o_t = S_t^T q_t

Both variants keep a GQA layer's four projections, so each can start from one. Keys and queries are
L2-normalised per head, which keeps the recurrence stable for beta <= 1.

T tokens, H heads, D head dim, W convolution taps.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paddock.kernels.gated_delta import gated_delta_rule
from paddock.model.attention.gqa import GQA
from paddock.model.config import ModelConfig
from paddock.model.forward_context import AuxOutputs, ForwardContext, TopKSelection
from paddock.model.norm import RMSNorm


class SimpleGatedDeltaNet(GQA):
    """The recurrence on the pre-trained projections alone: no convolution, no gate, no new weight.

    The paper leaves the equation open; ours is the delta rule itself (alpha = beta = 1) on rotated
    keys and queries, so that what the layer knew of position and content is still addressed.
    """

    def forward(
        self, x_TD: Tensor, step: ForwardContext, selection: TopKSelection | None
    ) -> tuple[Tensor, TopKSelection | None, AuxOutputs]:
        query_THD, key_THD, value_THD = self.project_heads(x_TD, step)
        log_alpha_TH, beta_TH = self.compute_gates(x_TD)
        pieces = []
        for i, span in enumerate(step.attn_metadata.spans):
            q = span.query_slice
            out_NHD, state_HDD = gated_delta_rule(
                query_THD[q],
                key_THD[q],
                value_THD[q],
                log_alpha_TH[q],
                beta_TH[q],
                initial_state_HKV=step.kv_cache.load_state(self.layer, "state", i),
            )
            step.kv_cache.store_state(self.layer, "state", i, state_HDD)
            pieces.append(out_NHD)
        return self.project_output(torch.cat(pieces), x_TD), selection, AuxOutputs()

    def project_heads(self, x_TD: Tensor, step: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values with one key head for each query head."""
        query_THD, key_TGD, value_TGD = self.project(x_TD, step)
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
        self.decay = nn.Linear(hidden, gqa.heads, bias=False)
        self.decay_log = nn.Parameter(torch.empty(gqa.heads))
        self.decay_bias = nn.Parameter(torch.empty(gqa.heads))
        self.beta = nn.Linear(hidden, gqa.heads, bias=False)
        self.gate = nn.Linear(hidden, gqa.heads * gqa.dim, bias=False)
        self.out_norm = RMSNorm(gqa.dim, config.norm_eps)

    def project(self, x_TD: Tensor, step: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        gqa = self.gqa
        query = self.q_conv(self.q(x_TD), step, self.layer, "q_conv")
        key = self.k_conv(self.k(x_TD), step, self.layer, "k_conv")
        value = self.v_conv(self.v(x_TD), step, self.layer, "v_conv")
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
    """Each channel looks at its own last few values. Starts as the identity before the silu."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, taps))

    def forward(self, x_TC: Tensor, step: ForwardContext, layer: int, stream: str) -> Tensor:
        channels, taps = self.weight.shape
        pieces = []
        for i, span in enumerate(step.attn_metadata.spans):
            before = step.kv_cache.load_state(layer, stream, i)
            if before is None:
                before = x_TC.new_zeros(taps - 1, channels)
            padded = torch.cat((before, x_TC[span.query_slice]))
            step.kv_cache.store_state(layer, stream, i, padded[len(padded) - (taps - 1) :])
            pieces.append(F.conv1d(padded.mT, self.weight.unsqueeze(1), groups=channels).mT)
        return F.silu(torch.cat(pieces))
