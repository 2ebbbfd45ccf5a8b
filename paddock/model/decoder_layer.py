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
        self, x_TD: Tensor, step: ForwardContext, selection: TopKSelection | None
    ) -> tuple[Tensor, TopKSelection | None, AuxOutputs]:
        """The layer's output, the selection the next layer may share, and its report."""
        y_TD, selection, notes = self.attention(self.attention_norm(x_TD), step, selection)
        x_TD = x_TD + y_TD
        z_TD, notes = self.feed_forward(self.mlp_norm(x_TD), step, notes)
        return x_TD + z_TD, selection, notes

    def _choices(self, routing: Routing, step: ForwardContext) -> list[Tensor] | None:
        """Of each span's whole document; None where the spans are whole documents."""
        layout = step.attn_metadata
        if layout.context_shard is None:
            return None
        expert_SK = layout.gather_keys(routing.expert_TK)
        return [expert_SK[document] for document in layout.documents]

    def feed_forward(
        self, x_TD: Tensor, step: ForwardContext, notes: AuxOutputs
    ) -> tuple[Tensor, AuxOutputs]:
        if isinstance(self.mlp, GatedMLP):
            return self.mlp(x_TD), notes
        y_TD, routing = self.mlp(x_TD)
        loss = None
        if step.aux.balance_loss:
            loss = balance_loss(routing, step.attn_metadata.spans, self._choices(routing, step))
        return y_TD, replace(
            notes,
            balance_loss=loss,
            expert_load_E=None if torch.is_inference_mode_enabled() else expert_load(routing),
            experts_TK=routing.expert_TK if step.aux.routing_and_topk else None,
        )
