"""Routing capture: routed experts and selected (top-k) tokens of every token in the KV cache.

Stored per KV slot, so that prefix cache hits have it too. A trainer replays it (routing replay).
T tokens, S KV slots, L layers, K experts or selected tokens.
"""

import numpy as np
import torch
from torch import Tensor

from paddock.engine.kv_cache import PagedKVCache
from paddock.engine.request import RoutingReplay
from paddock.model import AttentionMetadata, AuxOutputs, ModelConfig, TopKSelection


class RoutingCapturer:
    """Host-side storage of routing decisions, indexed like the KV cache."""

    def __init__(self, config: ModelConfig, cache: PagedKVCache) -> None:
        self.cache = cache
        self.routed = [i for i in range(config.layers) if config.mlp_kind(i) == "moe"]
        self.indexed = [i for i in range(config.layers) if config.has_indexer(i)]
        self.topk = config.indexer.topk if config.indexer is not None else 0
        kv_slots = cache.capacity.tokens
        active = config.moe.active if config.moe is not None else 0
        self.expert_SLK = torch.zeros(kv_slots, len(self.routed), active, dtype=torch.int16)
        self.index_SLK = torch.zeros(kv_slots, len(self.indexed), self.topk, dtype=torch.int32)

    def capture(
        self, aux: tuple[AuxOutputs, ...], layout: AttentionMetadata, kv_slot_T: Tensor
    ) -> None:
        kv_slot_T = kv_slot_T.cpu()
        if self.routed:
            experts = [aux[layer].experts_TK for layer in self.routed]
            expert_TLK = torch.stack([x for x in experts if x is not None], 1)
            self.expert_SLK[kv_slot_T] = expert_TLK.to(device="cpu", dtype=torch.int16)
        if self.indexed:
            selected = [
                _selected(aux[layer].selection, layout, self.topk) for layer in self.indexed
            ]
            self.index_SLK[kv_slot_T] = torch.stack(selected, 1).cpu()

    def replay_of(self, slot: int, tokens: int) -> RoutingReplay:
        """The decisions for the first tokens of the sequence in this slot."""
        kv_slot_T = torch.from_numpy(self.cache.slot_mapping(slot, 0, tokens).copy())
        return RoutingReplay(
            self.expert_SLK[kv_slot_T].numpy() if self.routed else None,
            self.index_SLK[kv_slot_T].numpy() if self.indexed else None,
        )


def _selected(selection: TopKSelection | None, layout: AttentionMetadata, topk: int) -> Tensor:
    """[T, K] the tokens each new token attends to, as positions in its sequence."""
    key_K = torch.arange(topk, device=layout.position_T.device)
    selected_TK = torch.where(key_K <= layout.position_T.unsqueeze(1), key_K, -1).int()
    if selection is None:
        return selected_TK
    if len(selection.query_Q):
        starts = np.repeat(
            [s.key for s in layout.prefill_spans], [s.queries for s in layout.prefill_spans]
        )
        start_Q1 = torch.from_numpy(starts).to(selected_TK.device)[selection.query_Q].unsqueeze(1)
        index_QK = selection.index_QK
        selected_TK[selection.query_Q] = torch.where(index_QK < 0, -1, index_QK - start_Q1).int()
    if selection.batch_NK is not None:
        selected_TK[layout.num_prefill_tokens :] = selection.batch_NK
    return selected_TK
