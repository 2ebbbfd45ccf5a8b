"""Drafts: guesses at the next tokens, made by the MTP layer, kept only where they prove right.

A draft costs one layer, and checking k of them costs one pass of the whole network over k + 1
tokens. The pass samples a token at every one of those places, each with the chance that belongs to
its place (sampler.py). The first is what would have been sampled anyway; the second is, provided
that the first equals the first draft; and so on. So the reply is the same, token for token, with
and without drafts, at every temperature and under every wish; drafts only make it sooner. Drafts
are drawn with the chance of the place they guess at, hence they agree with it as often as two
draws that share their noise can.

The MTP layer remembers one row a token, as every layer does: row p is made of the network's state
at p and of token p + 1. The runner has these rows written for all tokens of a step as soon as the
next ones are known; rows written while guessing stand beyond the end and are overwritten.

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
        """Give each sequence its drafts, starting from the state behind its last token but one."""
        seat_N = np.array([s.slot for s in sequences])
        index_N = np.array([s.num_generated for s in sequences])
        past_N = np.array([len(s.tokens) - 1 for s in sequences])
        logits_NV = self.network.head(state_ND)
        drafts = [self.sampler.draft(logits_NV, seat_N, index_N)]
        for step in range(1, self.steps):
            asked = UniformDecodeBatch(seat_N, past_N + step - 1, 1)
            state_ND, logits_NV = self._further(asked, state_ND, drafts[-1])
            drafts.append(self.sampler.draft(logits_NV, seat_N, index_N + step))
        for sequence, guessed in zip(sequences, torch.stack(drafts, 1).tolist(), strict=True):
            sequence.drafts = guessed

    def _further(
        self, asked: UniformDecodeBatch, state_ND: Tensor, token_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The states and scores behind one more guessed token."""
        if self.graphs is not None:
            return self.graphs.draft(asked, state_ND, token_N)
        layout, slot_T = build_attention_metadata(
            self.cache, PrefillChunks(), asked.slot_B, asked.past_len_B, 1
        )
        step = self.network.make_context(layout, PagedKVCacheView(self.cache, slot_T, []))
        state_ND = self.network.mtp_draft(state_ND, token_N, step)
        return state_ND, self.network.head(state_ND)
