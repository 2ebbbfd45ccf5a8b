"""Speculative decoding with the MTP layer: draft tokens, verified losslessly by the model.

A draft token costs one layer; verifying k of them costs one forward pass over k + 1 tokens. The
pass samples a token at each of those positions with the noise of that position (sampler.py). The
first is what would have been sampled anyway; the second is, provided that the first equals the
first draft; and so on. So the output is identical, token for token, with and without speculative
decoding, at every temperature and under every logit constraint. Drafts are sampled with the noise
of the position they predict, which maximizes agreement.

The MTP layer has one KV entry per token like every layer: entry p is computed from the hidden state
at p and token p + 1. The model runner writes these entries for all tokens of a step as soon as the
next tokens are known; entries written while drafting lie beyond the end and are overwritten.

T tokens of a step, N sequences, D hidden, K drafts.
"""

from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from paddock.engine.cuda_graphs import CudaGraphRunner, UniformDecodeBatch
from paddock.engine.kv_cache import (
    PagedKVCache,
    PagedKVCacheView,
    PrefillChunks,
    build_attention_metadata,
)
from paddock.engine.request import Sequence
from paddock.engine.sampler import Sampler
from paddock.model import Transformer


class Drafter:
    """Proposes draft tokens by running the MTP layer repeatedly."""

    def __init__(
        self,
        network: Transformer,
        cache: PagedKVCache,
        sampler: Sampler,
        steps: int,
        graphs: CudaGraphRunner | None = None,
    ) -> None:
        self.network, self.cache, self.sampler, self.steps = network, cache, sampler, steps
        self.graphs = graphs

    def propose(self, state_ND: Tensor, sequences: Many[Sequence]) -> None:
        """Set the drafts of each sequence, given the MTP state of its last but one token."""
        slot_N = np.array([s.slot for s in sequences])
        index_N = np.array([s.num_generated for s in sequences])
        past_N = np.array([len(s.tokens) - 1 for s in sequences])
        logits_NV = self.network.head(state_ND)
        drafts = [self.sampler.draft(logits_NV, slot_N, index_N)]
        for step in range(1, self.steps):
            batch = UniformDecodeBatch(slot_N, past_N + step - 1, 1)
            state_ND, logits_NV = self._extend(batch, state_ND, drafts[-1])
            drafts.append(self.sampler.draft(logits_NV, slot_N, index_N + step))
        for sequence, tokens in zip(sequences, torch.stack(drafts, 1).tolist(), strict=True):
            sequence.drafts = tokens

    def _extend(
        self, batch: UniformDecodeBatch, state_ND: Tensor, token_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """MTP states and logits after one more draft token per sequence."""
        if self.graphs is not None:
            return self.graphs.draft(batch, state_ND, token_N)
        layout, kv_slot_T = build_attention_metadata(
            self.cache, PrefillChunks(), batch.slot_B, batch.past_len_B, 1
        )
        step = self.network.make_context(layout, PagedKVCacheView(self.cache, kv_slot_T, []))
        state_ND = self.network.mtp_draft(state_ND, token_N, step)
        return state_ND, self.network.head(state_ND)
