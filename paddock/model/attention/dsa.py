"""DeepSeek Sparse Attention: latent attention to the keys an indexer chose.

A query that sees no more than top-k keys attends to all of them; choosing would change nothing.
The others attend to their choice in absorbed form. A layer without an indexer of its own reuses
the choice of the last layer below that has one.

T tokens, S keys, H heads, C row width, V value dims, Q sparse queries, K kept keys.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paddock.kernels.dense_attention import kept_attention
from paddock.kernels.index_kl import AttentionSide, IndexSide, index_kl, index_kl_kept
from paddock.kernels.spans import Span
from paddock.kernels.sparse_mla import sparse_mla
from paddock.kernels.topk import index_topk
from paddock.model.attention.indexer import Indexer
from paddock.model.attention.mla import MLA, Projected
from paddock.model.config import ModelConfig
from paddock.model.step import LayerNotes, Selection, Step

# In multiples of top-k. On a CPU, nano, one core, forward and backward, masked against gathered:
# 38 / 62 ms at 4 times top-k, 99 / 142 at 8, 234 / 240 at 16, 735 / 587 at 32. On an H200, small:
# 26,000 / 6,800 tokens/s at 16 times. The forward alone is never slower gathered on a CPU.
MASKED_UP_TO_ON_CPU, MASKED_UP_TO = 8, 64


class DSA(MLA):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        assert config.indexer is not None
        self.topk = config.indexer.topk
        self.indexer = Indexer(config) if config.has_indexer(layer) else None

    def forward(
        self, x_TD: Tensor, step: Step, selection: Selection | None
    ) -> tuple[Tensor, Selection | None, LayerNotes]:
        projected = self.project(x_TD, step)
        row_SC = self.look_back(projected, step)
        spans = step.layout.spans
        short, long = (spans, ()) if step.ask.dense else split_by_reach(spans, self.topk)
        index = self.index(x_TD, projected, step)
        if index is not None:
            selection = choose(index, long, self.topk)
        query_THD = projected.query_THD
        if query_THD.requires_grad and self.masking_is_cheaper(spans, long, query_THD.device):
            out_THV = self.masked(projected.query_THD, row_SC, spans, selection)
        else:
            out_THV = self.attend(projected.query_THD, row_SC, short, selection)
        loss = None
        if step.ask.indexer_loss and index is not None:
            loss = self.indexer_loss(index, projected.query_THD, row_SC, short, selection)
        notes = LayerNotes(indexer_loss=loss, selection=selection if step.ask.choices else None)
        return self.o(out_THV.flatten(1)), selection, notes

    def index(self, x_TD: Tensor, projected: Projected, step: Step) -> IndexSide | None:
        """The indexer's view of this step, keys of the past included."""
        if self.indexer is None:
            return None
        assert projected.latent_TQ is not None
        new = self.indexer(x_TD, projected.latent_TQ, step)
        key_SD = step.layout.keys(step.memory.extend(self.layer, "index", new.key_SD))
        return IndexSide(new.query_THD, key_SD, new.weight_TH)

    def attend(
        self,
        query_THD: Tensor,
        row_SC: Tensor,
        short: Sequence[Span],
        selection: Selection | None,
    ) -> Tensor:
        if selection is None or not len(selection.query_Q):
            return self.dense(query_THD, row_SC, short)
        sparse_QHV = self.sparse(query_THD[selection.query_Q], row_SC, selection.index_QK)
        if not short:
            return sparse_QHV
        dense_NHV = self.dense(query_THD, row_SC, short)
        dense_N = torch.cat([_queries(span, row_SC.device) for span in short])
        order_T = torch.cat((dense_N, selection.query_Q)).argsort()
        return torch.cat((dense_NHV, sparse_QHV))[order_T]

    def masking_is_cheaper(
        self, spans: Sequence[Span], long: Sequence[Span], device: torch.device
    ) -> bool:
        """Documents only a few times longer than top-k: the backward of a dense product under a
        mask beats that of gathering top-k rows for every query."""
        reach = MASKED_UP_TO_ON_CPU if device.type == "cpu" else MASKED_UP_TO
        return bool(long) and all(
            span.past == 0 and span.keys <= reach * self.topk for span in spans
        )

    def masked(
        self,
        query_THD: Tensor,
        row_SC: Tensor,
        spans: Sequence[Span],
        selection: Selection | None,
    ) -> Tensor:
        assert selection is not None
        index_TK = selection.index_QK.new_full((len(query_THD), self.topk), -1)
        index_TK[selection.query_Q] = selection.index_QK
        return kept_attention(query_THD, *self.expand(row_SC), spans, index_TK, scale=self.scale)

    def sparse(self, query_QHD: Tensor, row_SC: Tensor, index_QK: Tensor) -> Tensor:
        absorbed_QHC = self.absorb(query_QHD)
        out_QHL = sparse_mla(
            absorbed_QHC, row_SC, index_QK, scale=self.scale, value=self.mla.kv_rank
        )
        return self.emit(out_QHL)

    def indexer_loss(
        self,
        index: IndexSide,
        query_THD: Tensor,
        row_SC: Tensor,
        short: Sequence[Span],
        selection: Selection | None,
    ) -> Tensor:
        """Sum over queries of KL(where attention looks || the indexer's opinion), over the keys
        attention was allowed to look at."""
        with torch.no_grad():
            absorbed_THC = self.absorb(query_THD)
        loss = index_kl(index, AttentionSide(absorbed_THC, row_SC, self.scale), short)
        if selection is not None and len(selection.query_Q):
            q = selection.query_Q
            chosen = IndexSide(index.query_THD[q], index.key_SD, index.weight_TH[q])
            teacher = AttentionSide(absorbed_THC[q], row_SC, self.scale)
            loss = loss + index_kl_kept(chosen, teacher, selection.index_QK)
        return loss


def split_by_reach(spans: Sequence[Span], topk: int) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """The part of each span whose queries see at most `topk` keys, and the rest."""
    short, long = [], []
    for span in spans:
        within = min(max(topk - span.past, 0), span.queries)
        if within:
            short.append(span.part(0, within))
        if within < span.queries:
            long.append(span.part(within, span.queries))
    return tuple(short), tuple(long)


def choose(index: IndexSide, spans: Sequence[Span], topk: int) -> Selection:
    """The top-k keys of every query in `spans`."""
    device = index.key_SD.device
    query_Q = [_queries(span, device) for span in spans]
    index_QK = [
        _shifted(
            index_topk(
                index.query_THD[span.query_slice],
                index.key_SD[span.key_slice],
                index.weight_TH[span.query_slice],
                past=span.past,
                k=topk,
            ),
            span.key,
        )
        for span in spans
    ]
    if not spans:
        empty = torch.zeros(0, dtype=torch.int64, device=device)
        return Selection(empty, empty.int().view(0, topk))
    return Selection(torch.cat(query_Q), torch.cat(index_QK))


def _queries(span: Span, device: torch.device) -> Tensor:
    return torch.arange(span.query, span.query + span.queries, device=device)


def _shifted(index_QK: Tensor, start: int) -> Tensor:
    """From counting within a span to counting over all keys; padding stays padding."""
    return torch.where(index_QK < 0, index_QK, index_QK + start)
