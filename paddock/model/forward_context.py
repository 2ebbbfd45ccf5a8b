"""Inputs shared by all layers of a forward pass, and the auxiliary outputs of a layer.

T tokens, P rotated pairs, K selected keys or experts, E experts, Q sparse queries, N queries of a
decode batch.
"""

from dataclasses import dataclass

from torch import Tensor

from paddock.model.attention_metadata import AttentionMetadata
from paddock.model.kv_cache import KVCache


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxRequest:
    """Auxiliary outputs requested besides hidden states. The default is plain inference."""

    dense: bool = False  # sparse layers attend to all keys (indexer warm-up)
    indexer_loss: bool = False
    balance_loss: bool = False
    routing_and_topk: bool = False  # return routed experts and selected keys, for replay


@dataclass(frozen=True, slots=True, eq=False)
class ForwardContext:
    """Attention metadata, KV cache and rotary angles: the same for all layers."""

    attn_metadata: AttentionMetadata
    kv_cache: KVCache
    cos_TP: Tensor
    sin_TP: Tensor
    aux: AuxRequest


@dataclass(frozen=True, slots=True, eq=False)
class TopKSelection:
    """Selected top-k keys of sparse queries. Queries that see at most top-k keys are not listed.

    `index_QK` numbers keys as the metadata's spans do, ascending, padded with -1. Queries of a
    decode batch are listed in `batch_NK`, all or none of them, with keys numbered from the start
    of each sequence.
    """

    query_Q: Tensor
    index_QK: Tensor
    batch_NK: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AuxOutputs:
    """Auxiliary outputs of a layer; None where not requested or not applicable.

    Losses are sums over the tokens of the step; the caller divides.
    """

    indexer_loss: Tensor | None = None
    balance_loss: Tensor | None = None
    expert_load_E: Tensor | None = None  # number of tokens routed to each expert
    experts_TK: Tensor | None = None
    selection: TopKSelection | None = None
