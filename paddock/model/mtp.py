"""Multi-token prediction (MTP): one extra layer, shared by all depths."""

import torch
from torch import Tensor, nn

from paddock.model.config import ModelConfig
from paddock.model.decoder_layer import DecoderLayer
from paddock.model.forward_context import AuxOutputs, ForwardContext, TopKSelection
from paddock.model.linear import Linear
from paddock.model.norm import RMSNorm


class MTP(nn.Module):
    """Predicts token t+2 from the state at t and the embedding of token t+1.

    Fed its own output and the embedding of token t+2 it predicts t+3, and so on: the same weights
    serve every depth, so drafting three tokens costs the memory of one layer.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_norm = RMSNorm(config.hidden, config.norm_eps)
        self.hidden_norm = RMSNorm(config.hidden, config.norm_eps)
        self.join = Linear(2 * config.hidden, config.hidden, bias=False)
        self.block = DecoderLayer(config, config.mtp_layer)
        self.norm = RMSNorm(config.hidden, config.norm_eps)

    def forward(
        self,
        hidden_TD: Tensor,
        next_embed_TD: Tensor,
        ctx: ForwardContext,
        selection: TopKSelection | None = None,
    ) -> tuple[Tensor, TopKSelection | None, AuxOutputs]:
        """Normed states for the shared head and the next depth, the selected keys (those of
        `selection`, where an earlier depth passes it) and auxiliary outputs."""
        # Separate norms: hidden states are far larger than embeddings and would dominate the sum.
        # Embedding first: the order of the released checkpoint.
        joined = torch.cat((self.embed_norm(next_embed_TD), self.hidden_norm(hidden_TD)), dim=-1)
        x_TD, selection, aux = self.block(self.join(joined), ctx, selection)
        return self.norm(x_TD), selection, aux
