"""DeepSeek Sparse Attention: latent attention to the keys an indexer chose.

A query that sees no more than top-k keys attends to all of them; choosing would change nothing.
The others attend to their choice in absorbed form. A layer without an indexer of its own reuses
the choice of the last layer below that has one. The MTP layer reuses its own of depth 1 at later
depths, where it is given it (`mtp.share_index`).

T tokens, S keys or rows of storage, H heads, C row width, V value dims, Q sparse queries, K kept
keys; of a batch N queries.
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
from paddock.model.config import ModelConfig
from paddock.model.forward_context import AuxOutputs, ForwardContext, TopKSelection
from paddock.model.kv_cache import AttentionMetadata, NoCache
from paddock.parallel import is_fsdp_module

# In multiples of top-k. Forward and backward, masked against gathered: on a CPU (nano, one core)
# 38 / 62 ms at 4 times top-k, 99 / 142 at 8, 234 / 240 at 16, 735 / 587 at 32; on an H200 (small,
# one layer) 6.6 / 8.9 ms at 4 times and 41 / 12 at 32. Nano's whole forward on a CPU, at 8 times,
# without gradients: 2.1 / 3.0 s with one thread, 1.3 / 1.9 with two. On a GPU it gathers.
MASKED_UP_TO_TOPKS = 8


class DSA(MLA):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        assert config.indexer is not None
        self.topk = config.indexer.topk
        self.is_mtp = layer == config.mtp_layer  # what it is given is its own choice at depth 1
        if config.has_indexer(layer):
            self.indexer = Indexer(config)

    def forward(
        self, x_TD: Tensor, step: ForwardContext, selection: TopKSelection | None
    ) -> tuple[Tensor, TopKSelection | None, AuxOutputs]:
        if self.can_fuse_decode(x_TD, step):
            return self.decode(x_TD, step, selection)
        projected, layout = self.project(x_TD, step), step.attn_metadata
        stored_SC = step.kv_cache.update(self.layer, "row", projected.row_TC)
        spans = layout.prefill_spans
        short, long = (spans, ()) if step.aux.dense else split_dense_sparse(spans, self.topk)
        reused = self.is_mtp and selection is not None
        new = self.index_new_tokens(
            x_TD, projected, step, wanted=not reused and self.needs_index_scores(long, step)
        )
        index = self.prefill_index(new, layout)
        if new is not None:
            loose = None if index is None else select_topk(index, long, self.topk)
            selection = self.add_decode_selection(loose, new, step)
        elif self.indexer is not None and not reused:
            selection = _nothing(self.topk, x_TD.device)
        loose_THD, batch_THD = layout.split_prefill_decode(projected.query_THD)
        pieces, loss = [], None
        if loose_THD is not None:
            row_SC = layout.gather_keys(stored_SC)
            if self.masking_is_cheaper(loose_THD, spans, long):
                pieces.append(self.attend_masked(loose_THD, row_SC, spans, selection))
            else:
                pieces.append(self.attend(loose_THD, row_SC, short, selection))
            if step.aux.indexer_loss and index is not None:
                loss = self.indexer_loss(index, loose_THD, row_SC, short, selection)
        if batch_THD is not None:
            absorbed_THC = self.absorb(batch_THD)
            pieces.append(self.attend_decode(absorbed_THC, stored_SC, layout, selection))
        out_THV = layout.select_own(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
        notes = AuxOutputs(
            indexer_loss=loss, selection=selection if step.aux.routing_and_topk else None
        )
        return self.o(out_THV.flatten(1)), selection, notes

    def decode(
        self, x_TD: Tensor, step: ForwardContext, selection: TopKSelection | None
    ) -> tuple[Tensor, TopKSelection | None, AuxOutputs]:
        """A step whose queries all stand in a batch: the same with fewer launches."""
        ready = self.prepare_decode(x_TD, step, wanted=self.needs_index_scores((), step))
        if ready.index is not None:
            selection = self.add_decode_selection(None, ready.index, step)
        elif self.indexer is not None:
            selection = _nothing(self.topk, x_TD.device)
        out_THV = self.attend_decode(
            ready.absorbed_THC, ready.stored_SC, step.attn_metadata, selection
        )
        notes = AuxOutputs(selection=selection if step.aux.routing_and_topk else None)
        return self.o(out_THV.flatten(1)), selection, notes

    def needs_index_scores(self, long: Sequence[Span], step: ForwardContext) -> bool:
        """Whether anyone asks the indexer. Ranks that gather its keys or its weights together all
        ask or none does, whatever documents each of them has."""
        if step.aux.dense:
            return step.aux.indexer_loss
        batch = step.attn_metadata.decode_batch
        beyond = batch is not None and batch.max_keys > self.topk
        joint = step.attn_metadata.context_shard is not None or self._gathers_weights
        return bool(long) or beyond or step.aux.indexer_loss or joint

    @property
    def _gathers_weights(self) -> bool:
        return self.indexer is not None and is_fsdp_module(self.indexer.weights)

    def index_new_tokens(
        self, x_TD: Tensor, projected: MLAProjections, step: ForwardContext, *, wanted: bool = True
    ) -> IndexerInputs | None:
        """The indexer's view of the new tokens, its keys being the storage of all of them. Memory
        keeps keys even where no opinion is `wanted` yet: later tokens will choose among them."""
        if self.indexer is None or (not wanted and isinstance(step.kv_cache, NoCache)):
            return None
        key_TD = self.indexer.compute_keys(x_TD, step)
        stored_SD = step.kv_cache.update(self.layer, "index", key_TD)
        if not wanted:
            return None
        assert projected.latent_TQ is not None
        query_THD, weight_TH = self.indexer.compute_queries(x_TD, projected.latent_TQ, step)
        return IndexerInputs(query_THD, stored_SD, weight_TH)

    def prefill_index(
        self, new: IndexerInputs | None, layout: AttentionMetadata
    ) -> IndexerInputs | None:
        """The same with the keys of the loose spans, in their order."""
        if new is None or not layout.prefill_spans:
            return None
        query_THD, weight_TH = (
            layout.expand_queries(new.query_THD),
            layout.expand_queries(new.weight_TH),
        )
        return IndexerInputs(query_THD, layout.gather_keys(new.key_SD), weight_TH)

    def index_inputs(
        self, x_TD: Tensor, projected: MLAProjections, step: ForwardContext
    ) -> IndexerInputs | None:
        """The indexer's view of this step, keys of the past included."""
        return self.prefill_index(self.index_new_tokens(x_TD, projected, step), step.attn_metadata)

    def add_decode_selection(
        self, loose: TopKSelection | None, new: IndexerInputs, step: ForwardContext
    ) -> TopKSelection:
        """The choice of the loose spans and, where any of it sees more than top-k, the batch's."""
        selection = loose if loose is not None else _nothing(self.topk, new.key_SD.device)
        batch = step.attn_metadata.decode_batch
        if batch is None or step.aux.dense or batch.max_keys <= self.topk:
            return selection
        return replace(selection, batch_NK=select_topk_decode(new, step.attn_metadata, self.topk))

    def attend(
        self,
        query_THD: Tensor,
        row_SC: Tensor,
        short: Sequence[Span],
        selection: TopKSelection | None,
    ) -> Tensor:
        if selection is None or not len(selection.query_Q):
            return self.attend_dense(query_THD, row_SC, short)
        sparse_QHV = self.attend_sparse(query_THD[selection.query_Q], row_SC, selection.index_QK)
        if not short:
            return sparse_QHV
        dense_NHV = self.attend_dense(query_THD, row_SC, short)
        dense_N = torch.cat([_queries(span, row_SC.device) for span in short])
        order_T = torch.cat((dense_N, selection.query_Q)).argsort()
        return torch.cat((dense_NHV, sparse_QHV))[order_T]

    def attend_decode(
        self,
        absorbed_THC: Tensor,
        stored_SC: Tensor,
        layout: AttentionMetadata,
        selection: TopKSelection | None,
    ) -> Tensor:
        if selection is None or selection.batch_NK is None:
            return self.attend_dense_decode(absorbed_THC, stored_SC, layout)
        assert layout.decode_batch is not None
        out_NHL = mla_sparse_decode(
            absorbed_THC,
            stored_SC,
            layout.decode_batch.block_table,
            selection.batch_NK,
            scale=self.scale,
            value=self.mla.kv_rank,
        )
        return self.project_values(out_NHL)

    def masking_is_cheaper(
        self, query_THD: Tensor, spans: Sequence[Span], long: Sequence[Span]
    ) -> bool:
        """Documents only a few times longer than top-k: a dense product under a mask beats that of
        rows gathered for every query, backward everywhere, forward on a CPU."""
        wanted = query_THD.requires_grad or query_THD.device.type == "cpu"
        return (
            wanted
            and bool(long)
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
        short: Sequence[Span],
        selection: TopKSelection | None,
    ) -> Tensor:
        """Sum over queries of KL(where attention looks || the indexer's opinion), over the keys
        attention was allowed to look at."""
        with torch.no_grad():
            absorbed_THC = self.absorb(query_THD)
        loss = index_kl(index, IndexerTarget(absorbed_THC, row_SC, self.scale), short)
        if selection is not None and len(selection.query_Q):
            q = selection.query_Q
            chosen = IndexerInputs(index.query_THD[q], index.key_SD, index.weight_TH[q])
            teacher = IndexerTarget(absorbed_THC[q], row_SC, self.scale)
            loss = loss + index_kl_topk(chosen, teacher, selection.index_QK)
        return loss


def split_dense_sparse(
    spans: Sequence[Span], topk: int
) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """The part of each span whose queries see at most `topk` keys, and the rest."""
    short, long = [], []
    for span in spans:
        within = min(max(topk - span.past, 0), span.queries)
        if within:
            short.append(span.part(0, within))
        if within < span.queries:
            long.append(span.part(within, span.queries))
    return tuple(short), tuple(long)


def select_topk(index: IndexerInputs, spans: Sequence[Span], topk: int) -> TopKSelection:
    """The top-k keys of every query in `spans`."""
    device = index.key_SD.device
    if not spans:
        return _nothing(topk, device)
    query_Q = torch.cat([_queries(span, device) for span in spans])
    keys = IndexKeys(index.key_SD)
    return TopKSelection(
        query_Q, index_topk_varlen(index.query_THD, keys, index.weight_TH, spans, topk)
    )


@cache
def _nothing(topk: int, device: torch.device) -> TopKSelection:
    """Of a step whose queries all stand in a batch, or see no more than top-k keys."""
    with torch.inference_mode(False):  # it may be met again where gradients are wanted
        empty = torch.zeros(0, dtype=torch.int64, device=device)
        return TopKSelection(empty, empty.int().view(0, topk))


def select_topk_decode(new: IndexerInputs, layout: AttentionMetadata, k: int) -> Tensor:
    """[N, K] the top-k keys of every query of a batch, counted within its sequence."""
    batch, first = layout.decode_batch, layout.num_prefill_tokens
    assert batch is not None
    return index_topk_paged(
        new.query_THD[first:],
        IndexKeys(new.key_SD),
        new.weight_TH[first:],
        batch.block_table,
        batch.visible_BQ,
        k,
    )


def _queries(span: Span, device: torch.device) -> Tensor:
    return torch.arange(span.query, span.query + span.queries, device=device)
