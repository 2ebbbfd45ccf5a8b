"""What the network decided for every token in the cache: its experts and the keys it kept.

Kept slot by slot beside the cache, so that a request answered from the prefix cache knows it too.
T tokens, S slots, L layers, K experts or keys.
"""

import numpy as np
import torch
from torch import Tensor

from paddock.engine.kv_cache import PagedKVCache
from paddock.engine.request import RoutingReplay
from paddock.model import AttentionMetadata, AuxOutputs, ModelConfig, TopKSelection


class RoutingCapturer:
    def __init__(self, config: ModelConfig, cache: PagedKVCache) -> None:
        self.cache = cache
        self.routed = [i for i in range(config.layers) if config.mlp_kind(i) == "moe"]
        self.indexed = [i for i in range(config.layers) if config.has_indexer(i)]
        self.topk = config.indexer.topk if config.indexer is not None else 0
        slots = cache.capacity.tokens
        active = config.moe.active if config.moe is not None else 0
        self.expert_SLK = torch.zeros(slots, len(self.routed), active, dtype=torch.int16)
        self.index_SLK = torch.zeros(slots, len(self.indexed), self.topk, dtype=torch.int32)

    def capture(
        self, notes: tuple[AuxOutputs, ...], layout: AttentionMetadata, slot_T: Tensor
    ) -> None:
        slot_T = slot_T.cpu()
        if self.routed:
            experts = [notes[layer].experts_TK for layer in self.routed]
            expert_TLK = torch.stack([x for x in experts if x is not None], 1)
            self.expert_SLK[slot_T] = expert_TLK.to(device="cpu", dtype=torch.int16)
        if self.indexed:
            kept = [_kept(notes[layer].selection, layout, self.topk) for layer in self.indexed]
            self.index_SLK[slot_T] = torch.stack(kept, 1).cpu()

    def replay_of(self, seat: int, tokens: int) -> RoutingReplay:
        """The decisions for a sequence's first tokens."""
        slot_T = torch.from_numpy(self.cache.slot_mapping(seat, 0, tokens).copy())
        return RoutingReplay(
            self.expert_SLK[slot_T].numpy() if self.routed else None,
            self.index_SLK[slot_T].numpy() if self.indexed else None,
        )


def _kept(selection: TopKSelection | None, layout: AttentionMetadata, topk: int) -> Tensor:
    """[T, K] the keys each new token attended to, counted from its sequence's beginning."""
    key_K = torch.arange(topk, device=layout.position_T.device)
    kept_TK = torch.where(key_K <= layout.position_T.unsqueeze(1), key_K, -1).int()
    if selection is None:
        return kept_TK
    if len(selection.query_Q):
        starts = np.repeat(
            [s.key for s in layout.prefill_spans], [s.queries for s in layout.prefill_spans]
        )
        start_Q1 = torch.from_numpy(starts).to(kept_TK.device)[selection.query_Q].unsqueeze(1)
        index_QK = selection.index_QK
        kept_TK[selection.query_Q] = torch.where(index_QK < 0, -1, index_QK - start_Q1).int()
    if selection.batch_NK is not None:
        kept_TK[layout.num_prefill_tokens :] = selection.batch_NK
    return kept_TK
