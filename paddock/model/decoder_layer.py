"""One decoder layer: x + attention(norm x), then x + feed-forward(norm x)."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from paddock.model.attention import build_attention
from paddock.model.config import ModelConfig
from paddock.model.forward_context import AuxOutputs, ForwardContext, TopKSelection
from paddock.model.moe import GatedMLP, MoE, Routing, balance_loss, expert_load
from paddock.model.norm import RMSNorm


class DecoderLayer(nn.Module):
    """Attention and MLP or MoE, each pre-normed with a residual connection."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps)
        self.attention = build_attention(config, layer)
        self.mlp_norm = RMSNorm(config.hidden, config.norm_eps)
        self.mlp: GatedMLP | MoE
        if config.mlp_kind(layer) == "dense":
            self.mlp = GatedMLP(config.hidden, config.dense_inner)
        else:
            assert config.moe is not None
            self.mlp = MoE(config.hidden, config.moe)

    def forward(
        self, x_TD: Tensor, ctx: ForwardContext, selection: TopKSelection | None
    ) -> tuple[Tensor, TopKSelection | None, AuxOutputs]:
        """Hidden states, the top-k selection that later layers may reuse, auxiliary outputs."""
        y_TD, selection, aux = self.attention(self.attention_norm(x_TD), ctx, selection)
        x_TD = x_TD + y_TD
        z_TD, aux = self.feed_forward(self.mlp_norm(x_TD), ctx, aux)
        return x_TD + z_TD, selection, aux

    def _document_experts(self, routing: Routing, ctx: ForwardContext) -> list[Tensor] | None:
        """Routed experts of each span's whole document; None if the spans are whole documents."""
        metadata = ctx.attn_metadata
        if metadata.context_shard is None:
            return None
        expert_SK = metadata.gather_keys(routing.expert_TK)
        return [expert_SK[document] for document in metadata.documents]

    def feed_forward(
        self, x_TD: Tensor, ctx: ForwardContext, aux: AuxOutputs
    ) -> tuple[Tensor, AuxOutputs]:
        if not isinstance(self.mlp, MoE):
            return self.mlp(x_TD), aux
        y_TD, routing = self.mlp(x_TD)
        loss = None
        if ctx.aux.balance_loss:
            loss = balance_loss(
                routing, ctx.attn_metadata.spans, self._document_experts(routing, ctx)
            )
        return y_TD, replace(
            aux,
            balance_loss=loss,
            expert_load_E=None if torch.is_inference_mode_enabled() else expert_load(routing),
            experts_TK=routing.expert_TK if ctx.aux.routing_and_topk else None,
        )
