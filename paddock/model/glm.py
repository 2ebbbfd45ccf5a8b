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
from paddock.model.block import Block
from paddock.model.config import LATENT, ModelConfig
from paddock.model.init import initialize
from paddock.model.memory import Layout, Memory, NoMemory
from paddock.model.moe import GatedMLP
from paddock.model.mtp import MTP
from paddock.model.norm import RMSNorm
from paddock.model.roles import parameter_roles
from paddock.model.rope import angles
from paddock.model.step import Ask, LayerNotes, Selection, Step
from paddock.records import NamedParameter


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    hidden_TD: Tensor  # after the final norm: what the head and the MTP layer read
    notes: tuple[LayerNotes, ...]


class Network(nn.Module):
    """Embedding, layers, norm, head; and one MTP layer that shares embedding and head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        self.mtp = MTP(config) if config.mtp is not None else None
        self.recompute = False  # layers forget their insides and compute them again for gradients

    @classmethod
    def born(cls, config: ModelConfig, seed: int) -> "Network":
        """A fresh network, the same for the same seed."""
        network = cls(config)
        initialize(network, config, torch.Generator().manual_seed(seed))
        return network

    def forward(
        self,
        token_T: Tensor,
        layout: Layout,
        memory: Memory | None = None,
        ask: Ask | None = None,
    ) -> Output:
        return self.through(token_T, self.step(layout, memory, ask))

    def through(self, token_T: Tensor, step: Step) -> Output:
        """The same, with what all layers share made beforehand."""
        x_TD = self.embed(token_T)
        selection: Selection | None = None
        notes = []
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                x_TD, selection, note = checkpoint(
                    layer, x_TD, step, selection, use_reentrant=False
                )
            else:
                x_TD, selection, note = layer(x_TD, step, selection)
            notes.append(note)
        return Output(self.norm(x_TD), tuple(notes))

    def step(self, layout: Layout, memory: Memory | None = None, ask: Ask | None = None) -> Step:
        """What all layers of one pass share."""
        cos_TP, sin_TP = angles(layout.position_T, self.config.rope, self.rotated_dims)
        return Step(layout, memory or NoMemory(), cos_TP, sin_TP, ask or Ask())

    @property
    def rotated_dims(self) -> int:
        config = self.config
        if any(kind in LATENT for kind in config.attention):
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
        layout = Layout.packed([len(token_T)], device=token_T.device)
        return self.head(self(token_T, layout).hidden_TD).float()  # type: ignore[no-any-return]

    def look_ahead(
        self, hidden_TD: Tensor, token_S: Tensor, step: Step, depths: int
    ) -> Iterator[tuple[Tensor, LayerNotes]]:
        """MTP states at depth 1, 2, ...: at depth d, row t predicts token t + d + 1.

        The last d rows of each document have no token t + d to read; they repeat the document's
        last token and their predictions mean nothing. Causality keeps them from the others.
        `token_S` are the tokens of all keys: the next one may be another rank's.
        """
        assert self.mtp is not None
        assert self.config.mtp is not None
        shared: Selection | None = None
        for depth in range(1, depths + 1):
            ahead_T = _shifted(token_S, step.layout, depth)
            hidden_TD, selection, notes = self.mtp(hidden_TD, self.embed(ahead_T), step, shared)
            shared = selection if self.config.mtp.share_index else None
            yield hidden_TD, notes

    def draft(self, hidden_TD: Tensor, next_T: Tensor, step: Step) -> Tensor:
        """MTP states while serving: row t reads the state at t and the token after it, and the head
        makes of it a guess at the token after that. The layer looks back on its own rows in the
        step's memory, which therefore must be given every token once the next one is known.
        """
        assert self.mtp is not None
        state_TD, _, _ = self.mtp(hidden_TD, self.embed(next_T), step)
        return state_TD  # type: ignore[no-any-return]

    def cast(self, dtype: torch.dtype) -> "Network":
        """Parameters to `dtype` in place; what decides rankings (index head weights, router bias)
        stays float32, where a rounded number would change a choice."""
        for name, parameter in self.named_parameters():
            keep = name.endswith("indexer.weights.weight") and dtype.itemsize < 4
            parameter.data = parameter.data.to(torch.float32 if keep else dtype)
        return self

    def lay_together(self) -> None:
        """Weights that decoding reads with the same input, one behind the other in memory. They
        keep their names and their values, and nothing else of the network notices."""
        for module in self.modules():
            if isinstance(module, MLA | GatedMLP):
                module.lay_together()

    def parameter_roles(self) -> list[NamedParameter]:
        """Every parameter with what the optimizer must know of it."""
        return parameter_roles(self, self.config)


def _shifted(token_S: Tensor, layout: Layout, depth: int) -> Tensor:
    queries = [span.queries for span in layout.spans]
    ahead_T = np.repeat([s.key + s.past - s.query + depth for s in layout.spans], queries)
    last_T = np.repeat([document.stop - 1 for document in layout.documents], queries)
    place_T = np.minimum(np.arange(len(ahead_T)) + ahead_T, last_T)
    return token_S[torch.from_numpy(place_T).to(token_S.device)]
