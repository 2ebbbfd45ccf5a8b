"""The transformer: embedding, decoder layers, final norm, output head and MTP layer.

Trainer and engine use the same definition.

T tokens of a packed step, S keys they may see, D hidden, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paddock.model.attention.mla import MLA
from paddock.model.attention_metadata import AttentionMetadata
from paddock.model.config import LATENT_ATTENTION, ModelConfig
from paddock.model.decoder_layer import DecoderLayer
from paddock.model.forward_context import AuxOutputs, AuxRequest, ForwardContext, TopKSelection
from paddock.model.kv_cache import KVCache, NoCache
from paddock.model.linear import Linear
from paddock.model.moe import GatedMLP
from paddock.model.mtp import MTP
from paddock.model.norm import RMSNorm
from paddock.model.roles import fp32_tensor_names, parameter_roles
from paddock.model.rope import rotary_cos_sin
from paddock.model.weight_init import init_weights
from paddock.records import NamedParameter


@dataclass(frozen=True, slots=True, eq=False)
class ModelOutput:
    hidden_TD: Tensor  # after the final norm: input of the head and of the MTP layer
    aux: tuple[AuxOutputs, ...]


class Transformer(nn.Module):
    """Embedding, layers, norm, head; optionally one MTP layer that shares embedding and head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.head = Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        self.mtp = MTP(config) if config.mtp is not None else None
        self.activation_checkpointing = False  # recompute each layer's activations in backward

    @classmethod
    def from_config(cls, config: ModelConfig, seed: int) -> "Transformer":
        """A newly initialised network; the same seed gives the same weights."""
        network = cls(config)
        init_weights(network, config, torch.Generator().manual_seed(seed))
        return network

    def forward(
        self,
        token_T: Tensor,
        metadata: AttentionMetadata,
        kv_cache: KVCache | None = None,
        aux: AuxRequest | None = None,
    ) -> ModelOutput:
        return self.forward_with_context(token_T, self.make_context(metadata, kv_cache, aux))

    def forward_with_context(self, token_T: Tensor, ctx: ForwardContext) -> ModelOutput:
        """`forward` with a context from `make_context`."""
        x_TD = self.embed(token_T)
        selection: TopKSelection | None = None
        aux = []
        for layer in self.layers:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x_TD, selection, layer_aux = checkpoint(
                    layer, x_TD, ctx, selection, use_reentrant=False
                )
            else:
                x_TD, selection, layer_aux = layer(x_TD, ctx, selection)
            aux.append(layer_aux)
        return ModelOutput(self.norm(x_TD), tuple(aux))

    def make_context(
        self,
        metadata: AttentionMetadata,
        kv_cache: KVCache | None = None,
        aux: AuxRequest | None = None,
    ) -> ForwardContext:
        """The inputs that all layers of one forward pass share."""
        cos_TP, sin_TP = rotary_cos_sin(metadata.position_T, self.config.rope, self.rope_dim)
        return ForwardContext(metadata, kv_cache or NoCache(), cos_TP, sin_TP, aux or AuxRequest())

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""
        return self.norm.weight.dtype

    @property
    def rope_dim(self) -> int:
        config = self.config
        if any(kind in LATENT_ATTENTION for kind in config.attention):
            assert config.mla is not None
            return config.mla.rope
        assert config.gqa is not None
        return config.gqa.dim

    def logits(self, token_ids: Sequence[int] | Tensor) -> Tensor:
        """[T, vocab] float32 logits of one sequence from its beginning."""
        token_T = torch.as_tensor(token_ids, dtype=torch.int64, device=self.device)
        if token_T.ndim != 1 or not len(token_T):
            raise ValueError(
                f"logits takes one non-empty sequence, got shape {tuple(token_T.shape)}"
            )
        if int(token_T.min()) < 0 or int(token_T.max()) >= self.config.vocab:
            raise ValueError(f"token ids must lie in [0, {self.config.vocab})")
        metadata = AttentionMetadata.packed([len(token_T)], device=token_T.device)
        return self.head(self(token_T, metadata).hidden_TD).float()  # type: ignore[no-any-return]

    def mtp_forward(
        self,
        hidden_TD: Tensor,
        token_S: Tensor,
        ctx: ForwardContext,
        depths: int,
        *,
        detach_trunk: bool = False,
    ) -> Iterator[tuple[Tensor, AuxOutputs]]:
        """MTP states at depth 1, 2, ...: at depth d, row t predicts token t + d + 1.

        The last d rows of each document have no token t + d; they take the document's last token
        instead and their predictions must be ignored. Causality keeps them from affecting other
        rows. `token_S` are the tokens of all keys: the next one may be on another rank. With
        `detach_trunk` gradients reach neither the hidden states nor the embedding.
        """
        assert self.mtp is not None
        assert self.config.mtp is not None
        shared: TopKSelection | None = None
        if detach_trunk:
            hidden_TD = hidden_TD.detach()
        for depth in range(1, depths + 1):
            ahead_T = _shift_tokens(token_S, ctx.attn_metadata, depth)
            embed_TD = self.embed(ahead_T)
            if detach_trunk:
                embed_TD = embed_TD.detach()
            hidden_TD, selection, aux = self.mtp(hidden_TD, embed_TD, ctx, shared)
            shared = selection if self.config.mtp.share_index else None
            yield hidden_TD, aux

    def mtp_draft(self, hidden_TD: Tensor, next_T: Tensor, ctx: ForwardContext) -> Tensor:
        """MTP states for speculative decoding: row t takes the hidden state at t and token t+1;
        the head turns the result into a draft of token t+2. The MTP layer attends to its own
        entries in the KV cache, so every token must pass through here once the next one is known.
        """
        assert self.mtp is not None
        state_TD, _, _ = self.mtp(hidden_TD, self.embed(next_T), ctx)
        return state_TD  # type: ignore[no-any-return]

    def cast(self, dtype: torch.dtype) -> "Transformer":
        """Convert parameters to `dtype` in place. Those whose role is `keep_fp32` stay at least
        float32: they decide rankings, and rounding would change the selection."""
        for _, parameter, role in self.parameter_roles():
            keep_fp32 = role.keep_fp32 and dtype.itemsize < 4
            parameter.data = parameter.data.to(torch.float32 if keep_fp32 else dtype)
        return self

    def fuse_weights(self) -> None:
        """Lay out weights that decoding multiplies with the same input contiguously in memory, so
        that they run as one product. Names and values do not change."""
        for module in self.modules():
            if isinstance(module, MLA | GatedMLP):
                module.fuse_weights()

    def parameter_roles(self) -> list[NamedParameter]:
        """Every parameter with its role."""
        return parameter_roles(self, self.config)

    def fp32_tensor_names(self) -> frozenset[str]:
        """Tensors that keep their dtype when the others are stored in a smaller one."""
        return fp32_tensor_names(self, self.config)


def _shift_tokens(token_S: Tensor, metadata: AttentionMetadata, depth: int) -> Tensor:
    queries = [span.queries for span in metadata.spans]
    ahead_T = np.repeat([s.key + s.past - s.query + depth for s in metadata.spans], queries)
    last_T = np.repeat([document.stop - 1 for document in metadata.documents], queries)
    index_T = np.minimum(np.arange(len(ahead_T)) + ahead_T, last_T)
    return token_S[torch.from_numpy(index_T).to(token_S.device)]
