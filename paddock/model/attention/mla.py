"""Multi-head latent attention: keys and values live as one narrow row a token.

The row is the normed latent followed by one rotated key that all heads share. Expanded form: every
row becomes per-head keys and values. Absorbed form: the up-projections move onto the query and the
output instead, so that cached rows are never expanded. Both are the same function.

T tokens, S keys or rows of storage, H heads, N nope dims, R rope dims, V value dims, C row width,
L latent rank, B sequences of a batch with Q queries each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from paddock.kernels import mla_prepare
from paddock.kernels.dense_attention import dense_attention
from paddock.kernels.index_kl import IndexerInputs
from paddock.kernels.mla_decode import mla_decode, mla_paged_decode
from paddock.kernels.spans import Span
from paddock.model.attention.indexer import Indexer
from paddock.model.config import ModelConfig
from paddock.model.forward_context import AuxOutputs, ForwardContext, TopKSelection
from paddock.model.fuse import fuse_weights, fused_linears
from paddock.model.kv_cache import AttentionMetadata
from paddock.model.norm import RMSNorm
from paddock.model.rope import APPLY_ROPE, softmax_scale


@dataclass(frozen=True, slots=True, eq=False)
class MLAProjections:
    """What a layer computes from its input before it looks at anything."""

    latent_TQ: Tensor | None  # the normed query latent, which the indexer reads too
    query_THD: Tensor  # nope dims, then rotated rope dims
    row_TC: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class MLADecodeInputs:
    """What a step of decoding looks with, and at what."""

    absorbed_THC: Tensor
    stored_SC: Tensor
    index: IndexerInputs | None  # None where nobody asked for an opinion


@runtime_checkable
class SlotMappedCache(Protocol):
    """A memory whose storage a layer may write to itself."""

    def storage_and_slots(self, layer: int, stream: str) -> tuple[Tensor, Tensor]:
        """The storage, and which rows of it are the new tokens'."""


class MLA(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.mla is not None
        self.mla, self.layer = config.mla, layer
        self.indexer: Indexer | None = None
        self.rotate = APPLY_ROPE[config.rope.layout]
        self.interleaved = config.rope.layout == "interleaved"
        self.scale = softmax_scale(config.rope, self.mla.qk_head_dim)
        mla, hidden = self.mla, config.hidden
        if mla.q_rank is None:
            self.q = nn.Linear(hidden, mla.heads * mla.qk_head_dim, bias=False)
        else:
            self.q_a = nn.Linear(hidden, mla.q_rank, bias=False)
            self.q_norm = RMSNorm(mla.q_rank, mla.norm_eps)
            self.q_b = nn.Linear(mla.q_rank, mla.heads * mla.qk_head_dim, bias=False)
        self.kv_a = nn.Linear(hidden, mla.kv_cache_dim, bias=False)
        self.kv_norm = RMSNorm(mla.kv_rank, mla.norm_eps)
        self.kv_b = nn.Linear(mla.kv_rank, mla.heads * (mla.nope + mla.value), bias=False)
        self.o = nn.Linear(mla.heads * mla.value, hidden, bias=False)

    def forward(
        self, x_TD: Tensor, step: ForwardContext, selection: TopKSelection | None
    ) -> tuple[Tensor, TopKSelection | None, AuxOutputs]:
        if self.can_fuse_decode(x_TD, step):
            ready = self.prepare_decode(x_TD, step, wanted=False)
            out_THV = self.attend_dense_decode(
                ready.absorbed_THC, ready.stored_SC, step.attn_metadata
            )
            return self.o(out_THV.flatten(1)), selection, AuxOutputs()
        projected, layout = self.project(x_TD, step), step.attn_metadata
        stored_SC = step.kv_cache.update(self.layer, "row", projected.row_TC)
        loose_THD, batch_THD = layout.split_prefill_decode(projected.query_THD)
        pieces = []
        if loose_THD is not None:
            pieces.append(
                self.attend_dense(loose_THD, layout.gather_keys(stored_SC), layout.prefill_spans)
            )
        if batch_THD is not None:
            pieces.append(self.attend_dense_decode(self.absorb(batch_THD), stored_SC, layout))
        out_THV = layout.select_own(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
        return self.o(out_THV.flatten(1)), selection, AuxOutputs()

    def project(self, x_TD: Tensor, step: ForwardContext) -> MLAProjections:
        mla = self.mla
        if mla.q_rank is None:
            latent_TQ, query = None, self.q(x_TD)
        else:
            latent_TQ = self.q_norm(self.q_a(x_TD))
            query = self.q_b(latent_TQ)
        query_THD = query.view(-1, mla.heads, mla.qk_head_dim)
        query_THD = self.rotate(query_THD, step.cos_TP, step.sin_TP, mla.nope)
        latent_TL, key_TR = self.kv_a(x_TD).split((mla.kv_rank, mla.rope), -1)
        key_TR = self.rotate(key_TR.unsqueeze(1), step.cos_TP, step.sin_TP).squeeze(1)
        row_TC = torch.cat((self.kv_norm(latent_TL), key_TR), dim=-1)
        return MLAProjections(latent_TQ, query_THD, row_TC)

    def can_fuse_decode(self, x_TD: Tensor, step: ForwardContext) -> bool:
        """Whether this is a step of decoding whose small operations a GPU takes as two launches."""
        layout = step.attn_metadata
        return (
            layout.decode_batch is not None
            and not layout.prefill_spans
            and self.mla.q_rank is not None
            and mla_prepare.suits(x_TD, self.q_norm.weight, self.kv_norm.weight)
            and isinstance(step.kv_cache, SlotMappedCache)
        )

    def prepare_decode(
        self, x_TD: Tensor, step: ForwardContext, *, wanted: bool
    ) -> MLADecodeInputs:
        """`project`, `extend` and `absorb` at once, and the indexer's opinion where it is
        `wanted`. Its keys are kept in any case: later tokens will choose among them."""
        mla, indexer = self.mla, self.indexer
        angles = mla_prepare.RotaryCosSin(step.cos_TP, step.sin_TP)
        latent_TQ, stored_SC, stored_SD = self._stored(x_TD, step, angles)
        asked = indexer if wanted else None
        query_TF, *index_TF = fused_linears(latent_TQ, self._readers_of_latent(asked))
        query_THD = query_TF.unflatten(1, (mla.heads, mla.qk_head_dim))
        absorbed_THC = query_THD.new_empty(len(x_TD), mla.heads, mla.kv_cache_dim)
        opinion = mla_prepare.rotate_queries(
            mla_prepare.QueryRopeInput(query_THD, self.interleaved, absorbed_THC),
            angles,
            None if asked is None else asked.index_query_input(index_TF[0], x_TD),
        )
        torch.bmm(
            query_THD[..., : mla.nope].transpose(0, 1),
            self.up_projections()[0],
            out=absorbed_THC[..., : mla.kv_rank].transpose(0, 1),
        )
        if opinion is None:
            return MLADecodeInputs(absorbed_THC, stored_SC, None)
        assert stored_SD is not None
        return MLADecodeInputs(
            absorbed_THC, stored_SC, IndexerInputs(opinion[0], stored_SD, opinion[1])
        )

    def _stored(
        self, x_TD: Tensor, step: ForwardContext, angles: mla_prepare.RotaryCosSin
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The normed query latent, and the storage of rows and of index keys, the new ones in."""
        assert isinstance(step.kv_cache, SlotMappedCache)
        stored_SC, slot_T = step.kv_cache.storage_and_slots(self.layer, "row")
        raw_TQ, raw_TC, *raw_TD = fused_linears(x_TD, self._readers_of_input())
        key = None
        if self.indexer is not None:
            stored_SD, _ = step.kv_cache.storage_and_slots(self.layer, "index")
            key = self.indexer.index_key_input(raw_TD[0], stored_SD)
        q_norm, kv_norm = self.q_norm, self.kv_norm
        latent_TQ = mla_prepare.norm_rope_and_cache(
            mla_prepare.QueryLatentInput(raw_TQ, q_norm.weight, q_norm.eps),
            mla_prepare.KVLatentInput(
                raw_TC, kv_norm.weight, kv_norm.eps, self.interleaved, stored_SC
            ),
            key,
            angles,
            slot_T,
        )
        return latent_TQ, stored_SC, None if key is None else key.stored_SD

    def _readers_of_input(self) -> tuple[nn.Module, ...]:
        own = (self.q_a, self.kv_a)
        return own if self.indexer is None else (*own, self.indexer.key)

    def _readers_of_latent(self, indexer: Indexer | None) -> tuple[nn.Module, ...]:
        return (self.q_b,) if indexer is None else (self.q_b, indexer.query)

    def fuse_weights(self) -> None:
        """Weights that decoding reads with the same input, one behind the other in memory."""
        if self.mla.q_rank is not None:
            fuse_weights(self._readers_of_input())
            fuse_weights(self._readers_of_latent(self.indexer))

    def attend_dense(self, query_THD: Tensor, row_SC: Tensor, spans: Sequence[Span]) -> Tensor:
        """Attention to everything, in whichever form costs less. Queries in span order."""
        if self.expanding_is_cheaper(spans):
            return self.attend_expanded(query_THD, row_SC, spans)
        absorbed_THC = self.absorb(query_THD)
        out_THL = mla_decode(absorbed_THC, row_SC, spans, scale=self.scale, value=self.mla.kv_rank)
        return self.project_values(out_THL)

    def attend_dense_decode(
        self, absorbed_THC: Tensor, stored_SC: Tensor, layout: AttentionMetadata
    ) -> Tensor:
        """Attention to everything, for the queries of a batch."""
        assert layout.decode_batch is not None
        query_BQHC = absorbed_THC.unflatten(0, (-1, layout.decode_batch.queries))
        out_BQHL = mla_paged_decode(
            query_BQHC,
            stored_SC,
            layout.decode_batch.block_table,
            layout.decode_batch.visible_BQ,
            scale=self.scale,
            value=self.mla.kv_rank,
        )
        return self.project_values(out_BQHL.flatten(0, 1))

    def attend_expanded(self, query_THD: Tensor, row_SC: Tensor, spans: Sequence[Span]) -> Tensor:
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
        expanded = keys * up + pairs * (mla.qk_head_dim + mla.value)
        absorbed = queries * up + pairs * (mla.kv_cache_dim + mla.kv_rank)
        return expanded <= absorbed

    def absorb(self, query_THD: Tensor) -> Tensor:
        """Queries that can be compared with rows as they are."""
        nope_THN, rope_THR = query_THD.split((self.mla.nope, self.mla.rope), dim=-1)
        key_up_HNL, _ = self.up_projections()
        latent_HTL = torch.bmm(nope_THN.transpose(0, 1), key_up_HNL)
        return torch.cat((latent_HTL.transpose(0, 1), rope_THR), dim=-1)

    def project_values(self, out_THL: Tensor) -> Tensor:
        """Values of a weighted sum of latents: the sum of the values, weighted."""
        _, value_up_HVL = self.up_projections()
        return torch.bmm(out_THL.transpose(0, 1), value_up_HVL.mT).transpose(0, 1)

    def up_projections(self) -> tuple[Tensor, Tensor]:
        """kv_b as its key part [H, N, L] and its value part [H, V, L]."""
        mla = self.mla
        up = self.kv_b.weight.view(mla.heads, mla.nope + mla.value, mla.kv_rank)
        return up[:, : mla.nope], up[:, mla.nope :]
