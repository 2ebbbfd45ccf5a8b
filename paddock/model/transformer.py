"""The network, one definition for trainer and engine alike.

T tokens of a packed step, S keys they may see, D hidden, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paddock.model.attention.mla import MLA
from paddock.model.config import LATENT_ATTENTION, ModelConfig
from paddock.model.decoder_layer import DecoderLayer
from paddock.model.forward_context import AuxOutputs, AuxRequest, ForwardContext, TopKSelection
from paddock.model.kv_cache import AttentionMetadata, KVCache, NoCache
from paddock.model.moe import GatedMLP
from paddock.model.mtp import MTP
from paddock.model.norm import RMSNorm
from paddock.model.roles import parameter_roles
from paddock.model.rope import rotary_cos_sin
from paddock.model.weight_init import init_weights
from paddock.records import NamedParameter


@dataclass(frozen=True, slots=True, eq=False)
class ModelOutput:
    hidden_TD: Tensor  # after the final norm: what the head and the MTP layer read
    aux: tuple[AuxOutputs, ...]


class Transformer(nn.Module):
    """Embedding, layers, norm, head; and one MTP layer that shares embedding and head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        self.mtp = MTP(config) if config.mtp is not None else None
        self.activation_checkpointing = (
            False  # layers forget their insides and compute them again for gradients
        )

    @classmethod
    def from_config(cls, config: ModelConfig, seed: int) -> "Transformer":
        """A fresh network, the same for the same seed."""
        network = cls(config)
        init_weights(network, config, torch.Generator().manual_seed(seed))
        return network

    def forward(
        self,
        token_T: Tensor,
        layout: AttentionMetadata,
        memory: KVCache | None = None,
        ask: AuxRequest | None = None,
    ) -> ModelOutput:
        return self.forward_with_context(token_T, self.make_context(layout, memory, ask))

    def forward_with_context(self, token_T: Tensor, step: ForwardContext) -> ModelOutput:
        """The same, with what all layers share made beforehand."""
        x_TD = self.embed(token_T)
        selection: TopKSelection | None = None
        notes = []
        for layer in self.layers:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x_TD, selection, note = checkpoint(
                    layer, x_TD, step, selection, use_reentrant=False
                )
            else:
                x_TD, selection, note = layer(x_TD, step, selection)
            notes.append(note)
        return ModelOutput(self.norm(x_TD), tuple(notes))

    def make_context(
        self,
        layout: AttentionMetadata,
        memory: KVCache | None = None,
        ask: AuxRequest | None = None,
    ) -> ForwardContext:
        """What all layers of one pass share."""
        cos_TP, sin_TP = rotary_cos_sin(layout.position_T, self.config.rope, self.rope_dim)
        return ForwardContext(layout, memory or NoCache(), cos_TP, sin_TP, ask or AuxRequest())

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
        token_T = torch.as_tensor(token_ids, dtype=torch.int64, device=self.embed.weight.device)
        if token_T.ndim != 1 or not len(token_T):
            raise ValueError(
                f"logits wants one non-empty sequence, got shape {tuple(token_T.shape)}"
            )
        if int(token_T.min()) < 0 or int(token_T.max()) >= self.config.vocab:
            raise ValueError(f"token ids must lie in [0, {self.config.vocab})")
        layout = AttentionMetadata.packed([len(token_T)], device=token_T.device)
        return self.head(self(token_T, layout).hidden_TD).float()  # type: ignore[no-any-return]

    def mtp_forward(
        self, hidden_TD: Tensor, token_S: Tensor, step: ForwardContext, depths: int
    ) -> Iterator[tuple[Tensor, AuxOutputs]]:
        """MTP states at depth 1, 2, ...: at depth d, row t predicts token t + d + 1.

        The last d rows of each document have no token t + d to read; they repeat the document's
        last token and their predictions mean nothing. Causality keeps them from the others.
        `token_S` are the tokens of all keys: the next one may be another rank's.
        """
        assert self.mtp is not None
        assert self.config.mtp is not None
        shared: TopKSelection | None = None
        for depth in range(1, depths + 1):
            ahead_T = _shifted(token_S, step.attn_metadata, depth)
            hidden_TD, selection, notes = self.mtp(hidden_TD, self.embed(ahead_T), step, shared)
            shared = selection if self.config.mtp.share_index else None
            yield hidden_TD, notes

    def mtp_draft(self, hidden_TD: Tensor, next_T: Tensor, step: ForwardContext) -> Tensor:
        """MTP states while serving: row t reads the state at t and the token after it, and the head
        makes of it a guess at the token after that. The layer looks back on its own rows in the
        step's memory, which therefore must be given every token once the next one is known.
        """
        assert self.mtp is not None
        state_TD, _, _ = self.mtp(hidden_TD, self.embed(next_T), step)
        return state_TD  # type: ignore[no-any-return]

    def cast(self, dtype: torch.dtype) -> "Transformer":
        """Parameters to `dtype` in place; what decides rankings (index head weights, router bias)
        stays float32, where a rounded number would change a choice."""
        for name, parameter in self.named_parameters():
            keep = name.endswith("indexer.weights.weight") and dtype.itemsize < 4
            parameter.data = parameter.data.to(torch.float32 if keep else dtype)
        return self

    def fuse_weights(self) -> None:
        """Weights that decoding reads with the same input, one behind the other in memory. They
        keep their names and their values, and nothing else of the network notices."""
        for module in self.modules():
            if isinstance(module, MLA | GatedMLP):
                module.fuse_weights()

    def parameter_roles(self) -> list[NamedParameter]:
        """Every parameter with what the optimizer must know of it."""
        return parameter_roles(self, self.config)


def _shifted(token_S: Tensor, layout: AttentionMetadata, depth: int) -> Tensor:
    queries = [span.queries for span in layout.spans]
    ahead_T = np.repeat([s.key + s.past - s.query + depth for s in layout.spans], queries)
    last_T = np.repeat([document.stop - 1 for document in layout.documents], queries)
    place_T = np.minimum(np.arange(len(ahead_T)) + ahead_T, last_T)
    return token_S[torch.from_numpy(place_T).to(token_S.device)]
