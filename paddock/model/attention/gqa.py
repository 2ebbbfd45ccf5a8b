"""Grouped-query attention, over everything or through a window.

T tokens, S keys or rows of storage, H query heads, G key heads, D head dim; of a batch B sequences,
Q queries each.
"""

import torch
from torch import Tensor, nn

from paddock.kernels.gqa_decode import gqa_chunked_prefill, gqa_paged_decode
from paddock.model.config import ModelConfig
from paddock.model.forward_context import AuxOutputs, ForwardContext, TopKSelection
from paddock.model.kv_cache import AttentionMetadata
from paddock.model.norm import RMSNorm
from paddock.model.rope import APPLY_ROPE


class GQA(nn.Module):
    window: int | None = None

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.gqa is not None
        self.gqa, self.layer = config.gqa, layer
        self.rotate = APPLY_ROPE[config.rope.layout]
        gqa, hidden = self.gqa, config.hidden
        self.q = nn.Linear(hidden, gqa.heads * gqa.dim, bias=gqa.bias != "none")
        self.k = nn.Linear(hidden, gqa.kv_heads * gqa.dim, bias=gqa.bias != "none")
        self.v = nn.Linear(hidden, gqa.kv_heads * gqa.dim, bias=gqa.bias != "none")
        self.o = nn.Linear(gqa.heads * gqa.dim, hidden, bias=gqa.bias == "all")
        if gqa.qk_norm:
            self.q_norm = RMSNorm(gqa.dim, config.norm_eps)
            self.k_norm = RMSNorm(gqa.dim, config.norm_eps)

    def forward(
        self, x_TD: Tensor, step: ForwardContext, selection: TopKSelection | None
    ) -> tuple[Tensor, TopKSelection | None, AuxOutputs]:
        query_THD, key_TGD, value_TGD = self.project(x_TD, step)
        layout, memory = step.attn_metadata, step.kv_cache
        key_SGD = memory.update(self.layer, "key", key_TGD)
        value_SGD = memory.update(self.layer, "value", value_TGD)
        loose_THD, batch_THD = layout.split_prefill_decode(query_THD)
        pieces = []
        if loose_THD is not None:
            pieces.append(
                gqa_chunked_prefill(
                    loose_THD,
                    layout.gather_keys(key_SGD),
                    layout.gather_keys(value_SGD),
                    layout.prefill_spans,
                    scale=self.gqa.dim**-0.5,
                    window=self.window,
                )
            )
        if batch_THD is not None:
            pieces.append(self.attend_decode(batch_THD, key_SGD, value_SGD, layout))
        out_THD = layout.select_own(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
        return self.o(out_THD.flatten(1)), selection, AuxOutputs()

    def attend_decode(
        self, query_THD: Tensor, key_SGD: Tensor, value_SGD: Tensor, layout: AttentionMetadata
    ) -> Tensor:
        """All sequences of a batch at once, each looking at its own pages."""
        assert layout.decode_batch is not None
        out_BQHD = gqa_paged_decode(
            query_THD.unflatten(0, layout.decode_batch.visible_BQ.shape),
            key_SGD,
            value_SGD,
            layout.decode_batch.block_table,
            layout.decode_batch.visible_BQ,
            scale=self.gqa.dim**-0.5,
            window=self.window,
        )
        return out_BQHD.flatten(0, 1)

    def project(self, x_TD: Tensor, step: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, by head."""
        gqa = self.gqa
        query_THD = self.q(x_TD).unflatten(1, (gqa.heads, gqa.dim))
        key_TGD = self.k(x_TD).unflatten(1, (gqa.kv_heads, gqa.dim))
        value_TGD = self.v(x_TD).unflatten(1, (gqa.kv_heads, gqa.dim))
        if gqa.qk_norm:
            query_THD, key_TGD = self.q_norm(query_THD), self.k_norm(key_TGD)
        return (
            self.rotate(query_THD, step.cos_TP, step.sin_TP),
            self.rotate(key_TGD, step.cos_TP, step.sin_TP),
            value_TGD,
        )


class SlidingWindowAttention(GQA):
    """The same weights, looking back `gqa.window` tokens and no further."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.window = self.gqa.window
