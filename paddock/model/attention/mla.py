"""Multi-head latent attention: keys and values live as one narrow row a token.

The row is the normed latent followed by one rotated key that all heads share. Expanded form: every
row becomes per-head keys and values. Absorbed form: the up-projections move onto the query and the
output instead, so that cached rows are never expanded. Both are the same function.

T tokens, S keys or rows of storage, H heads, N nope dims, R rope dims, V value dims, C row width,
L latent rank, B sequences of a batch with Q queries each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paddock.kernels.dense_attention import dense_attention
from paddock.kernels.latent_decode import latent_decode, latent_decode_table
from paddock.kernels.spans import Span
from paddock.model.config import ModelConfig
from paddock.model.memory import Layout
from paddock.model.norm import RMSNorm
from paddock.model.rope import ROTATE, softmax_scale
from paddock.model.step import LayerNotes, Selection, Step


@dataclass(frozen=True, slots=True, eq=False)
class Projected:
    """What a layer computes from its input before it looks at anything."""

    latent_TQ: Tensor | None  # the normed query latent, which the indexer reads too
    query_THD: Tensor  # nope dims, then rotated rope dims
    row_TC: Tensor


class MLA(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.mla is not None
        self.mla, self.layer = config.mla, layer
        self.rotate = ROTATE[config.rope.layout]
        self.scale = softmax_scale(config.rope, self.mla.qk)
        mla, hidden = self.mla, config.hidden
        if mla.q_rank is None:
            self.q = nn.Linear(hidden, mla.heads * mla.qk, bias=False)
        else:
            self.q_a = nn.Linear(hidden, mla.q_rank, bias=False)
            self.q_norm = RMSNorm(mla.q_rank, mla.norm_eps)
            self.q_b = nn.Linear(mla.q_rank, mla.heads * mla.qk, bias=False)
        self.kv_a = nn.Linear(hidden, mla.row, bias=False)
        self.kv_norm = RMSNorm(mla.kv_rank, mla.norm_eps)
        self.kv_b = nn.Linear(mla.kv_rank, mla.heads * (mla.nope + mla.value), bias=False)
        self.o = nn.Linear(mla.heads * mla.value, hidden, bias=False)

    def forward(
        self, x_TD: Tensor, step: Step, selection: Selection | None
    ) -> tuple[Tensor, Selection | None, LayerNotes]:
        projected, layout = self.project(x_TD, step), step.layout
        stored_SC = step.memory.extend(self.layer, "row", projected.row_TC)
        loose_THD, batch_THD = layout.parted(projected.query_THD)
        pieces = []
        if loose_THD is not None:
            pieces.append(self.dense(loose_THD, layout.keys(stored_SC), layout.loose))
        if batch_THD is not None:
            pieces.append(self.dense_batch(batch_THD, stored_SC, layout))
        out_THV = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return self.o(out_THV.flatten(1)), selection, LayerNotes()

    def project(self, x_TD: Tensor, step: Step) -> Projected:
        mla = self.mla
        if mla.q_rank is None:
            latent_TQ, query = None, self.q(x_TD)
        else:
            latent_TQ = self.q_norm(self.q_a(x_TD))
            query = self.q_b(latent_TQ)
        query_THD = query.view(-1, mla.heads, mla.qk)
        query_THD = self.rotate(query_THD, step.cos_TP, step.sin_TP, mla.nope)
        latent_TL, key_TR = self.kv_a(x_TD).split((mla.kv_rank, mla.rope), -1)
        key_TR = self.rotate(key_TR.unsqueeze(1), step.cos_TP, step.sin_TP).squeeze(1)
        row_TC = torch.cat((self.kv_norm(latent_TL), key_TR), dim=-1)
        return Projected(latent_TQ, query_THD, row_TC)

    def dense(self, query_THD: Tensor, row_SC: Tensor, spans: Sequence[Span]) -> Tensor:
        """Attention to everything, in whichever form costs less. Queries in span order."""
        if self.expanding_is_cheaper(spans):
            return self.expanded(query_THD, row_SC, spans)
        absorbed_THC = self.absorb(query_THD)
        out_THL = latent_decode(
            absorbed_THC, row_SC, spans, scale=self.scale, value=self.mla.kv_rank
        )
        return self.emit(out_THL)

    def dense_batch(self, query_THD: Tensor, stored_SC: Tensor, layout: Layout) -> Tensor:
        """Attention to everything, for the queries of a batch."""
        assert layout.batch is not None
        query_BQHC = self.absorb(query_THD).unflatten(0, (-1, layout.batch.queries))
        out_BQHL = latent_decode_table(
            query_BQHC,
            stored_SC,
            layout.batch.pages,
            layout.batch.visible_BQ,
            scale=self.scale,
            value=self.mla.kv_rank,
        )
        return self.emit(out_BQHL.flatten(0, 1))

    def expanded(self, query_THD: Tensor, row_SC: Tensor, spans: Sequence[Span]) -> Tensor:
        return dense_attention(query_THD, *self.expand(row_SC), spans, scale=self.scale)

    def expand(self, row_SC: Tensor) -> tuple[Tensor, Tensor]:
        """Per-head keys and values of every row."""
        mla = self.mla
        latent_SL, key_SR = row_SC.split((mla.kv_rank, mla.rope), dim=-1)
        both = self.kv_b(latent_SL).unflatten(1, (mla.heads, mla.nope + mla.value))
        nope_SHN, value_SHV = both.split((mla.nope, mla.value), dim=-1)
        rope_SHR = key_SR.unsqueeze(1).expand(-1, mla.heads, -1)
        return torch.cat((nope_SHN, rope_SHR), dim=-1), value_SHV

    def expanding_is_cheaper(self, spans: Sequence[Span]) -> bool:
        """Expanding pays once per key, absorbing once per query and more per pair."""
        mla = self.mla
        up = mla.kv_rank * (mla.nope + mla.value)
        pairs = sum(span.queries * span.keys for span in spans)
        keys, queries = sum(s.keys for s in spans), sum(s.queries for s in spans)
        expanded = keys * up + pairs * (mla.qk + mla.value)
        absorbed = queries * up + pairs * (mla.row + mla.kv_rank)
        return expanded <= absorbed

    def absorb(self, query_THD: Tensor) -> Tensor:
        """Queries that can be compared with rows as they are."""
        nope_THN, rope_THR = query_THD.split((self.mla.nope, self.mla.rope), dim=-1)
        key_up_HNL, _ = self.up_projections()
        latent_HTL = torch.bmm(nope_THN.transpose(0, 1), key_up_HNL)
        return torch.cat((latent_HTL.transpose(0, 1), rope_THR), dim=-1)

    def emit(self, out_THL: Tensor) -> Tensor:
        """Values of a weighted sum of latents: the sum of the values, weighted."""
        _, value_up_HVL = self.up_projections()
        return torch.bmm(out_THL.transpose(0, 1), value_up_HVL.mT).transpose(0, 1)

    def up_projections(self) -> tuple[Tensor, Tensor]:
        """kv_b as its key part [H, N, L] and its value part [H, V, L]."""
        mla = self.mla
        up = self.kv_b.weight.view(mla.heads, mla.nope + mla.value, mla.kv_rank)
        return up[:, : mla.nope], up[:, mla.nope :]
