"""Multi-head latent attention (MLA): the KV cache holds one narrow latent entry per token.

A latent KV entry (a row) is the normed latent followed by one rotated key that all heads share.
Expanded form: every entry becomes per-head keys and values. Absorbed form: the up-projections are
applied to the query and the output instead, so that cached entries are never expanded. Both compute
the same function.

T tokens, S keys or KV slots, H heads, N nope dims, R rope dims, V value dims, C latent KV width,
L latent rank, B sequences of a decode batch with Q queries each.
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
from paddock.model.attention_metadata import AttentionMetadata
from paddock.model.config import ModelConfig
from paddock.model.forward_context import AuxOutputs, ForwardContext, TopKSelection
from paddock.model.fuse import fuse_weights, fused_linears
from paddock.model.linear import Linear
from paddock.model.norm import RMSNorm
from paddock.model.rope import APPLY_ROPE, softmax_scale


@dataclass(frozen=True, slots=True, eq=False)
class MLAProjections:
    """Queries and latent KV entries of the new tokens."""

    latent_TQ: Tensor | None  # the normed query latent, an input of the indexer too
    query_THD: Tensor  # nope dims, then rotated rope dims
    row_TC: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class MLADecodeInputs:
    """Absorbed queries, latent KV storage and indexer inputs of a decode step."""

    absorbed_THC: Tensor
    stored_SC: Tensor
    index: IndexerInputs | None  # None where index scores are not needed


@runtime_checkable
class SlotMappedCache(Protocol):
    """A KV cache whose storage a fused kernel may write directly."""

    def storage_and_slots(self, layer: int, stream: str) -> tuple[Tensor, Tensor]:
        """The storage, and the slots of the new tokens in it."""


class MLA(nn.Module):
    """Dense MLA; the base class of DSA."""

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
            self.q = Linear(hidden, mla.heads * mla.qk_head_dim, bias=False)
        else:
            self.q_a = Linear(hidden, mla.q_rank, bias=False)
            self.q_norm = RMSNorm(mla.q_rank, mla.norm_eps)
            self.q_b = Linear(mla.q_rank, mla.heads * mla.qk_head_dim, bias=False)
        self.kv_a = Linear(hidden, mla.kv_cache_dim, bias=False)
        self.kv_norm = RMSNorm(mla.kv_rank, mla.norm_eps)
        self.kv_b = Linear(mla.kv_rank, mla.heads * (mla.nope + mla.value), bias=False)
        self.o = Linear(mla.heads * mla.value, hidden, bias=False)

    def forward(
        self, x_TD: Tensor, ctx: ForwardContext, selection: TopKSelection | None
    ) -> tuple[Tensor, TopKSelection | None, AuxOutputs]:
        if self.can_fuse_decode(x_TD, ctx):
            decode_inputs = self.prepare_decode(x_TD, ctx, need_scores=False)
            out_THV = self.attend_dense_decode(
                decode_inputs.absorbed_THC, decode_inputs.stored_SC, ctx.attn_metadata
            )
            return self.o(out_THV.flatten(1)), selection, AuxOutputs()
        projected, metadata = self.project(x_TD, ctx), ctx.attn_metadata
        stored_SC = ctx.kv_cache.update(self.layer, "row", projected.row_TC)
        prefill_THD, decode_THD = metadata.split_prefill_decode(projected.query_THD)
        outputs = []
        if prefill_THD is not None:
            outputs.append(
                self.attend_dense(
                    prefill_THD, metadata.gather_keys(stored_SC), metadata.prefill_spans
                )
            )
        if decode_THD is not None:
            outputs.append(self.attend_dense_decode(self.absorb(decode_THD), stored_SC, metadata))
        out_THV = metadata.select_own(outputs[0] if len(outputs) == 1 else torch.cat(outputs))
        return self.o(out_THV.flatten(1)), selection, AuxOutputs()

    def project(self, x_TD: Tensor, ctx: ForwardContext) -> MLAProjections:
        mla = self.mla
        if mla.q_rank is None:
            latent_TQ, query = None, self.q(x_TD)
        else:
            latent_TQ = self.q_norm(self.q_a(x_TD))
            query = self.q_b(latent_TQ)
        query_THD = query.view(-1, mla.heads, mla.qk_head_dim)
        query_THD = self.rotate(query_THD, ctx.cos_TP, ctx.sin_TP, mla.nope)
        latent_TL, key_TR = self.kv_a(x_TD).split((mla.kv_rank, mla.rope), -1)
        key_TR = self.rotate(key_TR.unsqueeze(1), ctx.cos_TP, ctx.sin_TP).squeeze(1)
        row_TC = torch.cat((self.kv_norm(latent_TL), key_TR), dim=-1)
        return MLAProjections(latent_TQ, query_THD, row_TC)

    def can_fuse_decode(self, x_TD: Tensor, ctx: ForwardContext) -> bool:
        """Whether a pure decode step can run its small operations as two fused kernels."""
        metadata = ctx.attn_metadata
        return (
            metadata.decode_batch is not None
            and not metadata.prefill_spans
            and self.mla.q_rank is not None
            and mla_prepare.suits(x_TD, self.q_norm.weight, self.kv_norm.weight)
            and isinstance(ctx.kv_cache, SlotMappedCache)
        )

    def prepare_decode(
        self, x_TD: Tensor, ctx: ForwardContext, *, need_scores: bool
    ) -> MLADecodeInputs:
        """`project`, the KV cache update and `absorb` fused, and index queries if `need_scores`.
        Index keys are stored in any case: later tokens select among them."""
        mla, indexer = self.mla, self.indexer
        angles = mla_prepare.RotaryCosSin(ctx.cos_TP, ctx.sin_TP)
        latent_TQ, stored_SC, stored_SD = self._store_new_tokens(x_TD, ctx, angles)
        scoring = indexer if need_scores else None
        query_TF, *index_TF = fused_linears(latent_TQ, self._latent_projections(scoring))
        query_THD = query_TF.unflatten(1, (mla.heads, mla.qk_head_dim))
        absorbed_THC = query_THD.new_empty(len(x_TD), mla.heads, mla.kv_cache_dim)
        index_queries = mla_prepare.rotate_queries(
            mla_prepare.QueryRopeInput(query_THD, self.interleaved, absorbed_THC),
            angles,
            None if scoring is None else scoring.index_query_input(index_TF[0], x_TD),
        )
        torch.bmm(
            query_THD[..., : mla.nope].transpose(0, 1),
            self.up_projections()[0],
            out=absorbed_THC[..., : mla.kv_rank].transpose(0, 1),
        )
        if index_queries is None:
            return MLADecodeInputs(absorbed_THC, stored_SC, None)
        assert stored_SD is not None
        return MLADecodeInputs(
            absorbed_THC, stored_SC, IndexerInputs(index_queries[0], stored_SD, index_queries[1])
        )

    def _store_new_tokens(
        self, x_TD: Tensor, ctx: ForwardContext, angles: mla_prepare.RotaryCosSin
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The normed query latent, and the updated storage of KV entries and of index keys."""
        assert isinstance(ctx.kv_cache, SlotMappedCache)
        stored_SC, slot_T = ctx.kv_cache.storage_and_slots(self.layer, "row")
        raw_TQ, raw_TC, *raw_TD = fused_linears(x_TD, self._input_projections())
        key = None
        if self.indexer is not None:
            stored_SD, _ = ctx.kv_cache.storage_and_slots(self.layer, "index")
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

    def _input_projections(self) -> tuple[nn.Module, ...]:
        own = (self.q_a, self.kv_a)
        return own if self.indexer is None else (*own, self.indexer.key)

    def _latent_projections(self, indexer: Indexer | None) -> tuple[nn.Module, ...]:
        return (self.q_b,) if indexer is None else (self.q_b, indexer.query)

    def fuse_weights(self) -> None:
        """Lay out weights that decoding multiplies with the same input contiguously in memory."""
        if self.mla.q_rank is not None:
            fuse_weights(self._input_projections())
            fuse_weights(self._latent_projections(self.indexer))

    def attend_dense(self, query_THD: Tensor, row_SC: Tensor, spans: Sequence[Span]) -> Tensor:
        """Attention to all visible keys in the cheaper form. Queries in span order."""
        if self.expanding_is_cheaper(spans):
            return self.attend_expanded(query_THD, row_SC, spans)
        absorbed_THC = self.absorb(query_THD)
        out_THL = mla_decode(absorbed_THC, row_SC, spans, scale=self.scale, value=self.mla.kv_rank)
        return self.project_values(out_THL)

    def attend_dense_decode(
        self, absorbed_THC: Tensor, stored_SC: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Attention of the decode batch to all its keys."""
        assert metadata.decode_batch is not None
        query_BQHC = absorbed_THC.unflatten(0, (-1, metadata.decode_batch.queries))
        out_BQHL = mla_paged_decode(
            query_BQHC,
            stored_SC,
            metadata.decode_batch.block_table,
            metadata.decode_batch.visible_BQ,
            scale=self.scale,
            value=self.mla.kv_rank,
        )
        return self.project_values(out_BQHL.flatten(0, 1))

    def attend_expanded(self, query_THD: Tensor, row_SC: Tensor, spans: Sequence[Span]) -> Tensor:
        return dense_attention(query_THD, *self.expand(row_SC), spans, scale=self.scale)

    def expand(self, row_SC: Tensor) -> tuple[Tensor, Tensor]:
        """Per-head keys and values of every latent KV entry."""
        mla = self.mla
        latent_SL, key_SR = row_SC.split((mla.kv_rank, mla.rope), dim=-1)
        both = self.kv_b(latent_SL).unflatten(1, (mla.heads, mla.nope + mla.value))
        nope_SHN, value_SHV = both.split((mla.nope, mla.value), dim=-1)
        rope_SHR = key_SR.unsqueeze(1).expand(-1, mla.heads, -1)
        return torch.cat((nope_SHN, rope_SHR), dim=-1), value_SHV

    def expanding_is_cheaper(self, spans: Sequence[Span]) -> bool:
        """Expanding costs once per key; absorbing costs once per query and more per pair."""
        mla = self.mla
        up = mla.kv_rank * (mla.nope + mla.value)
        pairs = sum(span.queries * span.keys for span in spans)
        keys, queries = sum(s.keys for s in spans), sum(s.queries for s in spans)
        expanded = keys * up + pairs * (mla.qk_head_dim + mla.value)
        absorbed = queries * up + pairs * (mla.kv_cache_dim + mla.kv_rank)
        return expanded <= absorbed

    def absorb(self, query_THD: Tensor) -> Tensor:
        """Queries in latent space, comparable with latent KV entries directly."""
        nope_THN, rope_THR = query_THD.split((self.mla.nope, self.mla.rope), dim=-1)
        absorb = getattr(self.kv_b, "absorb", None)  # a packed up-projection
        if absorb is not None:
            return torch.cat((absorb(nope_THN), rope_THR), dim=-1)
        key_up_HNL, _ = self.up_projections()
        latent_HTL = torch.bmm(nope_THN.transpose(0, 1), key_up_HNL)
        return torch.cat((latent_HTL.transpose(0, 1), rope_THR), dim=-1)

    def project_values(self, out_THL: Tensor) -> Tensor:
        """Up-project attention outputs from latent space to values."""
        project_values = getattr(self.kv_b, "project_values", None)  # a packed up-projection
        if project_values is not None:
            return project_values(out_THL)  # type: ignore[no-any-return]
        _, value_up_HVL = self.up_projections()
        return torch.bmm(out_THL.transpose(0, 1), value_up_HVL.mT).transpose(0, 1)

    def up_projections(self) -> tuple[Tensor, Tensor]:
        """kv_b as its key part [H, N, L] and its value part [H, V, L]."""
        mla = self.mla
        up = self.kv_b.weight.view(mla.heads, mla.nope + mla.value, mla.kv_rank)
        return up[:, : mla.nope], up[:, mla.nope :]
