"""Grouped-query attention (GQA), full or sliding-window.

T tokens, S keys or KV slots, H query heads, G key heads, D head dim; of a decode batch B sequences
with Q queries each.
"""

import torch
from torch import Tensor, nn

from paddock.kernels.gqa_decode import gqa_chunked_prefill, gqa_paged_decode
from paddock.model.attention_metadata import AttentionMetadata
from paddock.model.config import ModelConfig
from paddock.model.forward_context import AuxOutputs, ForwardContext, TopKSelection
from paddock.model.linear import Linear
from paddock.model.norm import RMSNorm
from paddock.model.rope import APPLY_ROPE


class GQA(nn.Module):
    window: int | None = None

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.gqa is not None
        self.gqa, self.layer = config.gqa, layer
        self.rotate = APPLY_ROPE[config.rope.layout]
        self.interleaved = config.rope.layout == "interleaved"
        gqa, hidden = self.gqa, config.hidden
        self.q = Linear(hidden, gqa.heads * gqa.dim, bias=gqa.bias != "none")
        self.k = Linear(hidden, gqa.kv_heads * gqa.dim, bias=gqa.bias != "none")
        self.v = Linear(hidden, gqa.kv_heads * gqa.dim, bias=gqa.bias != "none")
        self.o = Linear(gqa.heads * gqa.dim, hidden, bias=gqa.bias == "all")
        if gqa.qk_norm:
            self.q_norm = RMSNorm(gqa.dim, config.norm_eps)
            self.k_norm = RMSNorm(gqa.dim, config.norm_eps)

    def forward(
        self, x_TD: Tensor, ctx: ForwardContext, selection: TopKSelection | None
    ) -> tuple[Tensor, TopKSelection | None, AuxOutputs]:
        metadata = ctx.attn_metadata
        query_THD, key_SGD, value_SGD = self.project_and_cache(x_TD, ctx)
        prefill_THD, decode_THD = metadata.split_prefill_decode(query_THD)
        outputs = []
        if prefill_THD is not None:
            # A KV cache is read through its slots; ranks and shared prefixes need a copy.
            in_place = metadata.context_shard is None and metadata.query_T is None
            outputs.append(
                gqa_chunked_prefill(
                    prefill_THD,
                    key_SGD if in_place else metadata.gather_keys(key_SGD),
                    value_SGD if in_place else metadata.gather_keys(value_SGD),
                    metadata.prefill_spans,
                    scale=self.gqa.dim**-0.5,
                    window=self.window,
                    slot_S=metadata.kv_slot_S if in_place else None,
                )
            )
        if decode_THD is not None:
            outputs.append(self.attend_decode(decode_THD, key_SGD, value_SGD, metadata))
        out_THD = metadata.select_own(outputs[0] if len(outputs) == 1 else torch.cat(outputs))
        return self.o(out_THD.flatten(1)), selection, AuxOutputs()

    def attend_decode(
        self, query_THD: Tensor, key_SGD: Tensor, value_SGD: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Paged attention of the decode batch."""
        assert metadata.decode_batch is not None
        out_BQHD = gqa_paged_decode(
            query_THD.unflatten(0, metadata.decode_batch.visible_BQ.shape),
            key_SGD,
            value_SGD,
            metadata.decode_batch.block_table,
            metadata.decode_batch.visible_BQ,
            scale=self.gqa.dim**-0.5,
            window=self.window,
        )
        return out_BQHD.flatten(0, 1)

    def project_and_cache(self, x_TD: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries, and the storage of keys and values with the new tokens in it."""
        query_THD, key_TGD, value_TGD = self.project(x_TD, ctx)
        key_SGD = ctx.kv_cache.update(self.layer, "key", key_TGD)
        return query_THD, key_SGD, ctx.kv_cache.update(self.layer, "value", value_TGD)

    def project(self, x_TD: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, per head."""
        gqa = self.gqa
        query_THD = self.q(x_TD).unflatten(1, (gqa.heads, gqa.dim))
        key_TGD = self.k(x_TD).unflatten(1, (gqa.kv_heads, gqa.dim))
        value_TGD = self.v(x_TD).unflatten(1, (gqa.kv_heads, gqa.dim))
        if gqa.qk_norm:
            query_THD, key_TGD = self.q_norm(query_THD), self.k_norm(key_TGD)
        return (
            self.rotate(query_THD, ctx.cos_TP, ctx.sin_TP),
            self.rotate(key_TGD, ctx.cos_TP, ctx.sin_TP),
            value_TGD,
        )


class SlidingWindowAttention(GQA):
    """GQA in which a query attends to the last `gqa.window` tokens."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.window = self.gqa.window
