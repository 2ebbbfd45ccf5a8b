"""The lightning indexer: a few cheap heads that say which keys are worth attending to.

T tokens, H index heads, D index head dim, R rotated dims of it (the first), Q query latent.
"""

from torch import Tensor, nn

from paddock.kernels import mla_prepare
from paddock.kernels.linear_fp32 import linear_fp32
from paddock.model.config import ModelConfig
from paddock.model.forward_context import ForwardContext
from paddock.model.norm import LayerNorm
from paddock.model.rope import APPLY_ROPE


class IndexerWeightsProjection(nn.Linear):
    """What each head's opinion weighs, [T, H] in float32 or better: the weights are few, and a
    rounded one moves every score of a query. Sharded training gathers it as a module of its own
    (`shard(exact=...)`), which happens when it is called."""

    def forward(self, x_TD: Tensor) -> Tensor:
        return linear_fp32(x_TD, self.weight)


class Indexer(nn.Module):
    """score[t, s] = sum_h weight[t, h] relu(query[t, h] . key[s]); scales folded into the weights.

    It reads its inputs detached: the language loss cannot move it, and its own loss cannot move
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
        self.query = nn.Linear(config.mla.q_rank, heads * dim, bias=False)
        self.scale = (heads * dim) ** -0.5
        self.key = nn.Linear(config.hidden, dim, bias=False)
        self.key_norm = LayerNorm(dim, self.settings.norm_eps)
        self.weights = IndexerWeightsProjection(config.hidden, heads, bias=False)

    def compute_keys(self, x_TD: Tensor, step: ForwardContext) -> Tensor:
        """[T, D] of the new tokens."""
        key_TD = self.key_norm(self.key(x_TD.detach()))
        return self._rotated(key_TD.unsqueeze(1), step).squeeze(1)

    def compute_queries(
        self, x_TD: Tensor, latent_TQ: Tensor, step: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """[T, H, D] of the new tokens, and [T, H] what each head's opinion weighs."""
        heads, dim = self.settings.heads, self.settings.dim
        query_THD = self._rotated(self.query(latent_TQ.detach()).view(-1, heads, dim), step)
        return query_THD, self.weights(x_TD.detach()) * self.scale

    def index_key_input(self, raw_TD: Tensor, stored_SD: Tensor) -> mla_prepare.IndexKeyInput:
        """What is to become of the product with `key`, and where it is to lie."""
        norm = self.key_norm
        return mla_prepare.IndexKeyInput(
            raw_TD, norm.weight, norm.bias, norm.eps, self.interleaved, stored_SD
        )

    def index_query_input(self, raw_TF: Tensor, x_TD: Tensor) -> mla_prepare.IndexQueryInput:
        """What is to become of the product with `query`, and of the hidden states."""
        raw_THD = raw_TF.unflatten(1, (self.settings.heads, self.settings.dim))
        return mla_prepare.IndexQueryInput(
            raw_THD, self.interleaved, x_TD, self.weights.weight, self.scale
        )

    def _rotated(self, x_THD: Tensor, step: ForwardContext) -> Tensor:
        return self.rotate(x_THD, step.cos_TP, step.sin_TP)
