"""DeepSeek Sparse Attention (DSA): MLA over the top-k keys that the lightning indexer selects.

A query that sees at most top-k keys attends to all of them: selection would change nothing. The
others attend to the selected top-k tokens in absorbed form. A layer without its own indexer reuses
the selection of the last layer below that has one. With `mtp.share_index` the MTP layer reuses its
depth-1 selection at later depths.

T tokens, S keys or KV slots, H heads, C latent KV width, V value dims, Q sparse queries, K selected
keys; N queries of a decode batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from paddock.kernels.dense_attention import topk_masked_attention
from paddock.kernels.index_kl import IndexerInputs, IndexerTarget, index_kl, index_kl_topk
from paddock.kernels.index_scores import IndexKeys
from paddock.kernels.mla_decode import mla_sparse_decode
from paddock.kernels.spans import Span
from paddock.kernels.sparse_mla import sparse_mla
from paddock.kernels.topk import index_topk_paged, index_topk_varlen
from paddock.model.attention.indexer import Indexer
from paddock.model.attention.mla import MLA, MLAProjections
from paddock.model.attention_metadata import AttentionMetadata
from paddock.model.config import ModelConfig
from paddock.model.forward_context import AuxOutputs, ForwardContext, TopKSelection
from paddock.model.kv_cache import NoCache
from paddock.parallel import is_fsdp_module

# In multiples of top-k. Forward and backward, masked / gathered: on a CPU (nano, one core)
# 38 / 62 ms at 4 times top-k, 99 / 142 at 8, 234 / 240 at 16, 735 / 587 at 32; on an H200 (small,
# one layer) 6.6 / 8.9 ms at 4 times and 41 / 12 at 32. Nano's whole forward on a CPU, at 8 times,
# without gradients: 2.1 / 3.0 s with one thread, 1.3 / 1.9 with two. Inference on a GPU gathers.
MASKED_UP_TO_TOPKS = 8


class DSA(MLA):
    """Sparse MLA. Layers without an indexer of their own attend to the selection passed in."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        assert config.indexer is not None
        self.topk = config.indexer.topk
        self.is_mtp = layer == config.mtp_layer  # the selection passed in is its own from depth 1
        if config.has_indexer(layer):
            self.indexer = Indexer(config)

    def forward(
        self, x_TD: Tensor, ctx: ForwardContext, selection: TopKSelection | None
    ) -> tuple[Tensor, TopKSelection | None, AuxOutputs]:
        if self.can_fuse_decode(x_TD, ctx):
            return self.decode(x_TD, ctx, selection)
        projected, metadata = self.project(x_TD, ctx), ctx.attn_metadata
        stored_SC = ctx.kv_cache.update(self.layer, "row", projected.row_TC)
        spans = metadata.prefill_spans
        dense_spans, sparse_spans = (
            (spans, ()) if ctx.aux.dense else split_dense_sparse(spans, self.topk)
        )
        reuse = self.is_mtp and selection is not None
        new_index = self.index_new_tokens(
            x_TD,
            projected,
            ctx,
            need_scores=not reuse and self.needs_index_scores(sparse_spans, ctx),
        )
        index = self.prefill_index(new_index, metadata)
        if new_index is not None:
            prefill = None if index is None else select_topk(index, sparse_spans, self.topk)
            selection = self.add_decode_selection(prefill, new_index, ctx)
        elif self.indexer is not None and not reuse:
            selection = _empty_selection(self.topk, x_TD.device)
        prefill_THD, decode_THD = metadata.split_prefill_decode(projected.query_THD)
        outputs, loss = [], None
        if prefill_THD is not None:
            row_SC = metadata.gather_keys(stored_SC)
            if self.masking_is_cheaper(prefill_THD, spans, sparse_spans):
                outputs.append(self.attend_masked(prefill_THD, row_SC, spans, selection))
            else:
                outputs.append(self.attend(prefill_THD, row_SC, dense_spans, selection))
            if ctx.aux.indexer_loss and index is not None:
                loss = self.indexer_loss(index, prefill_THD, row_SC, dense_spans, selection)
        if decode_THD is not None:
            absorbed_THC = self.absorb(decode_THD)
            outputs.append(self.attend_decode(absorbed_THC, stored_SC, metadata, selection))
        out_THV = metadata.select_own(outputs[0] if len(outputs) == 1 else torch.cat(outputs))
        aux = AuxOutputs(
            indexer_loss=loss, selection=selection if ctx.aux.routing_and_topk else None
        )
        return self.o(out_THV.flatten(1)), selection, aux

    def decode(
        self, x_TD: Tensor, ctx: ForwardContext, selection: TopKSelection | None
    ) -> tuple[Tensor, TopKSelection | None, AuxOutputs]:
        """`forward` for a step with decode queries only, with fewer kernel launches."""
        ready = self.prepare_decode(x_TD, ctx, need_scores=self.needs_index_scores((), ctx))
        if ready.index is not None:
            selection = self.add_decode_selection(None, ready.index, ctx)
        elif self.indexer is not None:
            selection = _empty_selection(self.topk, x_TD.device)
        out_THV = self.attend_decode(
            ready.absorbed_THC, ready.stored_SC, ctx.attn_metadata, selection
        )
        aux = AuxOutputs(selection=selection if ctx.aux.routing_and_topk else None)
        return self.o(out_THV.flatten(1)), selection, aux

    def needs_index_scores(self, sparse_spans: Sequence[Span], ctx: ForwardContext) -> bool:
        """Whether the step needs index scores. Where ranks gather index keys or weights
        collectively, the answer must be the same on all ranks whatever their documents."""
        if ctx.aux.dense:
            return ctx.aux.indexer_loss
        batch = ctx.attn_metadata.decode_batch
        exceeds_topk = batch is not None and batch.max_keys > self.topk
        collective = ctx.attn_metadata.context_shard is not None or self._gathers_weights
        return bool(sparse_spans) or exceeds_topk or ctx.aux.indexer_loss or collective

    @property
    def _gathers_weights(self) -> bool:
        return self.indexer is not None and is_fsdp_module(self.indexer.weights)

    def index_new_tokens(
        self,
        x_TD: Tensor,
        projected: MLAProjections,
        ctx: ForwardContext,
        *,
        need_scores: bool = True,
    ) -> IndexerInputs | None:
        """Index queries and weights of the new tokens, with the storage of all index keys. The KV
        cache stores keys even if scores are not needed yet: later tokens select among them."""
        if self.indexer is None or (not need_scores and isinstance(ctx.kv_cache, NoCache)):
            return None
        key_TD = self.indexer.compute_keys(x_TD, ctx)
        stored_SD = ctx.kv_cache.update(self.layer, "index", key_TD)
        if not need_scores:
            return None
        assert projected.latent_TQ is not None
        query_THD, weight_TH = self.indexer.compute_queries(x_TD, projected.latent_TQ, ctx)
        return IndexerInputs(query_THD, stored_SD, weight_TH)

    def prefill_index(
        self, new_index: IndexerInputs | None, metadata: AttentionMetadata
    ) -> IndexerInputs | None:
        """The same for the prefill spans, with keys in span order."""
        if new_index is None or not metadata.prefill_spans:
            return None
        query_THD, weight_TH = (
            metadata.expand_queries(new_index.query_THD),
            metadata.expand_queries(new_index.weight_TH),
        )
        return IndexerInputs(query_THD, metadata.gather_keys(new_index.key_SD), weight_TH)

    def index_inputs(
        self, x_TD: Tensor, projected: MLAProjections, ctx: ForwardContext
    ) -> IndexerInputs | None:
        """Indexer inputs of the prefill spans, cached keys included."""
        return self.prefill_index(self.index_new_tokens(x_TD, projected, ctx), ctx.attn_metadata)

    def add_decode_selection(
        self, prefill: TopKSelection | None, new_index: IndexerInputs, ctx: ForwardContext
    ) -> TopKSelection:
        """The prefill selection, plus that of the decode batch if it may exceed top-k keys."""
        selection = (
            prefill if prefill is not None else _empty_selection(self.topk, new_index.key_SD.device)
        )
        batch = ctx.attn_metadata.decode_batch
        if batch is None or ctx.aux.dense or batch.max_keys <= self.topk:
            return selection
        return replace(
            selection, batch_NK=select_topk_decode(new_index, ctx.attn_metadata, self.topk)
        )

    def attend(
        self,
        query_THD: Tensor,
        row_SC: Tensor,
        dense_spans: Sequence[Span],
        selection: TopKSelection | None,
    ) -> Tensor:
        if selection is None or not len(selection.query_Q):
            return self.attend_dense(query_THD, row_SC, dense_spans)
        sparse_QHV = self.attend_sparse(query_THD[selection.query_Q], row_SC, selection.index_QK)
        if not dense_spans:
            return sparse_QHV
        dense_NHV = self.attend_dense(query_THD, row_SC, dense_spans)
        dense_N = torch.cat([_query_indices(span, row_SC.device) for span in dense_spans])
        order_T = torch.cat((dense_N, selection.query_Q)).argsort()
        return torch.cat((dense_NHV, sparse_QHV))[order_T]

    def attend_decode(
        self,
        absorbed_THC: Tensor,
        stored_SC: Tensor,
        metadata: AttentionMetadata,
        selection: TopKSelection | None,
    ) -> Tensor:
        if selection is None or selection.batch_NK is None:
            return self.attend_dense_decode(absorbed_THC, stored_SC, metadata)
        assert metadata.decode_batch is not None
        out_NHL = mla_sparse_decode(
            absorbed_THC,
            stored_SC,
            metadata.decode_batch.block_table,
            selection.batch_NK,
            scale=self.scale,
            value=self.mla.kv_rank,
        )
        return self.project_values(out_NHL)

    def masking_is_cheaper(
        self, query_THD: Tensor, spans: Sequence[Span], sparse_spans: Sequence[Span]
    ) -> bool:
        """Whether dense attention under a mask beats gathering KV entries for every query: for
        documents at most a few times longer than top-k, with gradients or on a CPU."""
        masked_is_faster = query_THD.requires_grad or query_THD.device.type == "cpu"
        return (
            masked_is_faster
            and bool(sparse_spans)
            and all(
                span.past == 0 and span.keys <= MASKED_UP_TO_TOPKS * self.topk for span in spans
            )
        )

    def attend_masked(
        self,
        query_THD: Tensor,
        row_SC: Tensor,
        spans: Sequence[Span],
        selection: TopKSelection | None,
    ) -> Tensor:
        assert selection is not None
        index_TK = selection.index_QK.new_full((len(query_THD), self.topk), -1)
        index_TK[selection.query_Q] = selection.index_QK
        return topk_masked_attention(
            query_THD, *self.expand(row_SC), spans, index_TK, scale=self.scale
        )

    def attend_sparse(self, query_QHD: Tensor, row_SC: Tensor, index_QK: Tensor) -> Tensor:
        absorbed_QHC = self.absorb(query_QHD)
        out_QHL = sparse_mla(
            absorbed_QHC, row_SC, index_QK, scale=self.scale, value=self.mla.kv_rank
        )
        return self.project_values(out_QHL)

    def indexer_loss(
        self,
        index: IndexerInputs,
        query_THD: Tensor,
        row_SC: Tensor,
        dense_spans: Sequence[Span],
        selection: TopKSelection | None,
    ) -> Tensor:
        """Sum over queries of KL(attention distribution || index score distribution), over the
        keys that attention could see."""
        with torch.no_grad():
            absorbed_THC = self.absorb(query_THD)
        loss = index_kl(index, IndexerTarget(absorbed_THC, row_SC, self.scale), dense_spans)
        if selection is not None and len(selection.query_Q):
            query_Q = selection.query_Q
            selected = IndexerInputs(
                index.query_THD[query_Q], index.key_SD, index.weight_TH[query_Q]
            )
            target = IndexerTarget(absorbed_THC[query_Q], row_SC, self.scale)
            loss = loss + index_kl_topk(selected, target, selection.index_QK)
        return loss


def split_dense_sparse(
    spans: Sequence[Span], topk: int
) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Split each span: the queries that see at most `topk` keys, and the others."""
    dense_spans, sparse_spans = [], []
    for span in spans:
        num_dense = min(max(topk - span.past, 0), span.queries)
        if num_dense:
            dense_spans.append(span.part(0, num_dense))
        if num_dense < span.queries:
            sparse_spans.append(span.part(num_dense, span.queries))
    return tuple(dense_spans), tuple(sparse_spans)


def select_topk(index: IndexerInputs, spans: Sequence[Span], topk: int) -> TopKSelection:
    """The selected top-k keys of every query in `spans`."""
    device = index.key_SD.device
    if not spans:
        return _empty_selection(topk, device)
    query_Q = torch.cat([_query_indices(span, device) for span in spans])
    keys = IndexKeys(index.key_SD)
    return TopKSelection(
        query_Q,
        index_topk_varlen(index.query_THD, keys, index.weight_TH, spans, topk),
    )


@cache
def _empty_selection(topk: int, device: torch.device) -> TopKSelection:
    """The selection of a step without sparse prefill queries."""
    with torch.inference_mode(False):  # cached: later calls may need gradients
        empty = torch.zeros(0, dtype=torch.int64, device=device)
        return TopKSelection(empty, empty.int().view(0, topk))


def select_topk_decode(new_index: IndexerInputs, metadata: AttentionMetadata, k: int) -> Tensor:
    """[N, K] selected top-k keys of every decode query, numbered within its sequence."""
    batch, num_prefill = metadata.decode_batch, metadata.num_prefill_tokens
    assert batch is not None
    return index_topk_paged(
        new_index.query_THD[num_prefill:],
        IndexKeys(new_index.key_SD),
        new_index.weight_TH[num_prefill:],
        batch.block_table,
        batch.visible_BQ,
        k,
    )


def _query_indices(span: Span, device: torch.device) -> Tensor:
    return torch.arange(span.query, span.query + span.queries, device=device)
