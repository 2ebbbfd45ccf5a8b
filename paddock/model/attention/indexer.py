"""The lightning indexer: cheap heads whose index scores select the keys to attend to.

T tokens, H index heads, D index head dim (its first dims are rotated), Q query latent.
"""

from torch import Tensor, nn

from paddock.kernels import mla_prepare
from paddock.kernels.linear_fp32 import linear_fp32
from paddock.model.config import ModelConfig
from paddock.model.forward_context import ForwardContext
from paddock.model.linear import Linear
from paddock.model.norm import LayerNorm
from paddock.model.rope import APPLY_ROPE


class IndexerWeightsProjection(nn.Linear):
    """Weight of each index head, [T, H] in float32 or wider: a rounded weight would shift every
    index score of a query. FSDP wraps it as a separate float32 module (`apply_fsdp(exact=...)`),
    which gathers its weight when called."""

    def forward(self, x_TD: Tensor) -> Tensor:
        return linear_fp32(x_TD, self.weight)


class Indexer(nn.Module):
    """score[t, s] = sum_h weight[t, h] relu(query[t, h] . key[s]); scales folded into the weights.

    Its inputs are detached: the language loss does not train it, and its own loss does not train
    the trunk.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.indexer is not None
        assert config.mla is not None
        assert config.mla.q_rank is not None
        self.settings = config.indexer
        self.rotate = APPLY_ROPE[self.settings.rope_layout]
        self.interleaved = self.settings.rope_layout == "interleaved"
        heads, dim = self.settings.heads, self.settings.dim
        self.query = Linear(config.mla.q_rank, heads * dim, bias=False)
        self.scale = (heads * dim) ** -0.5
        self.key = Linear(config.hidden, dim, bias=False)
        self.key_norm = LayerNorm(dim, self.settings.norm_eps)
        self.weights = IndexerWeightsProjection(config.hidden, heads, bias=False)

    def compute_keys(self, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
        """[T, D] index keys of the new tokens."""
        key_TD = self.key_norm(self.key(x_TD.detach()))
        return self._rotated(key_TD.unsqueeze(1), ctx).squeeze(1)

    def compute_queries(
        self, x_TD: Tensor, latent_TQ: Tensor, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """[T, H, D] index queries of the new tokens, and the [T, H] weight of each head."""
        heads, dim = self.settings.heads, self.settings.dim
        query_THD = self._rotated(self.query(latent_TQ.detach()).view(-1, heads, dim), ctx)
        return query_THD, self.weights(x_TD.detach()) * self.scale

    def index_key_input(self, raw_TD: Tensor, stored_SD: Tensor) -> mla_prepare.IndexKeyInput:
        """Kernel arguments that norm, rotate and store the output of `key`."""
        norm = self.key_norm
        return mla_prepare.IndexKeyInput(
            raw_TD, norm.weight, norm.bias, norm.eps, self.interleaved, stored_SD
        )

    def index_query_input(self, raw_TF: Tensor, x_TD: Tensor) -> mla_prepare.IndexQueryInput:
        """Kernel arguments that rotate the output of `query` and compute head weights."""
        raw_THD = raw_TF.unflatten(1, (self.settings.heads, self.settings.dim))
        return mla_prepare.IndexQueryInput(
            raw_THD, self.interleaved, x_TD, self.weights.weight, self.scale
        )

    def _rotated(self, x_THD: Tensor, ctx: ForwardContext) -> Tensor:
        return self.rotate(x_THD, ctx.cos_TP, ctx.sin_TP)
