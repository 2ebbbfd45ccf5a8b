"""What every layer of one forward pass is told, and what it may report back.

T tokens, P rotated pairs, K kept keys or chosen experts, E experts, Q sparse queries, N queries of
a batch.
"""

from dataclasses import dataclass

from torch import Tensor

from paddock.model.kv_cache import AttentionMetadata, KVCache


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxRequest:
    """What the caller wants besides hidden states. The default is plain inference."""

    dense: bool = False  # sparse layers look at everything (the indexer's warm-up)
    indexer_loss: bool = False
    balance_loss: bool = False
    routing_and_topk: bool = False  # report routed experts and kept keys, for replay


@dataclass(frozen=True, slots=True, eq=False)
class ForwardContext:
    """Positions, visibility and memory: the same for all layers."""

    attn_metadata: AttentionMetadata
    kv_cache: KVCache
    cos_TP: Tensor
    sin_TP: Tensor
    aux: AuxRequest


@dataclass(frozen=True, slots=True, eq=False)
class TopKSelection:
    """The keys sparse queries keep. Queries that see no more than top-k keys are not listed.

    `index_QK` counts keys as the layout's spans do, ascending, -1 where there is none. Queries of a
    batch stand apart and are listed all or none; `batch_NK` counts keys from the beginning of each
    sequence.
    """

    query_Q: Tensor
    index_QK: Tensor
    batch_NK: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AuxOutputs:
    """What a layer reports; None where it was not asked or has nothing to say.

    Losses are sums over the step's tokens, for the caller to divide.
    """

    indexer_loss: Tensor | None = None
    balance_loss: Tensor | None = None
    expert_load_E: Tensor | None = None  # how many tokens each expert received
    experts_TK: Tensor | None = None
    selection: TopKSelection | None = None
