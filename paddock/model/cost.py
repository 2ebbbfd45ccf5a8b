"""Cost of a network from its configuration alone: parameter counts, FLOPs, KV cache bytes.

Nothing is allocated; a test compares the counts with a network on the meta device.
"""

from dataclasses import dataclass, fields, replace
from math import prod

from paddock.model.config import (
    LATENT_ATTENTION,
    GQASettings,
    IndexerSettings,
    MLASettings,
    ModelConfig,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """Parameter counts by part. Router biases count: they are weights of the checkpoint."""

    embedding: int = 0
    head: int = 0
    attention: int = 0
    indexer: int = 0
    dense_mlp: int = 0
    experts: int = 0
    shared_experts: int = 0
    router: int = 0
    norms: int = 0
    mtp: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def without_mtp(self) -> int:
        return self.total - self.mtp

    @property
    def without_embeddings(self) -> int:
        """The main network's layers: no MTP, no embedding, no head."""
        return self.without_mtp - self.embedding - self.head


def count_parameters(config: ModelConfig) -> ParameterCounts:
    """All parameters."""
    return _count(config, None if config.moe is None else config.moe.experts)


def count_layer_parameters(config: ModelConfig, layer: int) -> ParameterCounts:
    """All parameters of one layer."""
    return _layer(config, layer, None if config.moe is None else config.moe.experts)


def count_active_parameters(config: ModelConfig) -> ParameterCounts:
    """Parameters active for one token."""
    return _count(config, None if config.moe is None else config.moe.active)


def _count(config: ModelConfig, active_experts: int | None) -> ParameterCounts:
    layers = [_layer(config, i, active_experts) for i in range(config.layers)]
    table = config.vocab * config.hidden
    return ParameterCounts(
        embedding=table,
        head=0 if config.tied else table,
        norms=config.hidden + sum(layer.norms for layer in layers),
        mtp=_mtp(config, active_experts),
        **{
            part: sum(getattr(layer, part) for layer in layers)
            for part in ("attention", "indexer", "dense_mlp", "experts", "shared_experts", "router")
        },
    )


def _mtp(config: ModelConfig, active_experts: int | None) -> int:
    if config.mtp is None:
        return 0
    join_and_norms = 2 * config.hidden**2 + 3 * config.hidden
    return join_and_norms + _layer(config, config.mtp_layer, active_experts).total


def _layer(config: ModelConfig, layer: int, active_experts: int | None) -> ParameterCounts:
    kind = config.attention_kind(layer)
    if kind in LATENT_ATTENTION:
        assert config.mla is not None
        attention, norms = _latent(config.hidden, config.mla)
    else:
        assert config.gqa is not None
        attention, norms = _grouped(config.hidden, config.gqa, gated=kind == "gdn")
    indexer = dense = experts = shared = router = 0
    if config.has_indexer(layer):
        assert config.indexer is not None
        assert config.mla is not None
        indexer = _indexer(config.hidden, config.mla, config.indexer)
    if config.mlp_kind(layer) == "dense":
        dense = 3 * config.hidden * config.dense_inner
    else:
        assert config.moe is not None
        assert active_experts is not None
        expert = 3 * config.hidden * config.moe.inner
        experts, shared = active_experts * expert, config.moe.shared * expert
        router = config.moe.experts * (config.hidden + 1)
    return ParameterCounts(
        attention=attention,
        indexer=indexer,
        dense_mlp=dense,
        experts=experts,
        shared_experts=shared,
        router=router,
        norms=norms + 2 * config.hidden,
    )


def _latent(hidden: int, mla: MLASettings) -> tuple[int, int]:
    """Parameters of the matrices and of the norms of one MLA."""
    query_out = mla.heads * mla.qk_head_dim
    query = hidden * query_out if mla.q_rank is None else mla.q_rank * (hidden + query_out)
    key_value = hidden * mla.kv_cache_dim + mla.kv_rank * mla.heads * (mla.nope + mla.value)
    return query + key_value + mla.heads * mla.value * hidden, (mla.q_rank or 0) + mla.kv_rank


def _indexer(hidden: int, mla: MLASettings, indexer: IndexerSettings) -> int:
    assert mla.q_rank is not None
    matrices = mla.q_rank * indexer.heads * indexer.dim + hidden * (indexer.dim + indexer.heads)
    return matrices + 2 * indexer.dim


def _grouped(hidden: int, gqa: GQASettings, *, gated: bool) -> tuple[int, int]:
    """Parameters of the matrices with their biases, and of the norms, of one GQA."""
    wide, narrow = gqa.heads * gqa.dim, gqa.kv_heads * gqa.dim
    count = hidden * (2 * wide + 2 * narrow)
    if gqa.bias != "none":
        count += wide + 2 * narrow
    if gqa.bias == "all":
        count += hidden
    norms = 2 * gqa.dim if gqa.qk_norm else 0
    if gated:
        count += gqa.conv * (wide + 2 * narrow) + hidden * (wide + 2 * gqa.heads) + 2 * gqa.heads
        norms += gqa.dim
    return count, norms


# --- memory ---------------------------------------------------------------------------------------


def kv_cache_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """KV cache streams of a layer, with the shape of one token's entry."""
    kind = config.attention_kind(layer)
    if kind in LATENT_ATTENTION:
        assert config.mla is not None
        shapes: dict[str, tuple[int, ...]] = {"row": (config.mla.kv_cache_dim,)}
        if config.has_indexer(layer):
            assert config.indexer is not None
            shapes["index"] = (config.indexer.dim,)
        return shapes
    if kind in ("gdn", "simple_gdn"):
        return {}
    assert config.gqa is not None
    head = (config.gqa.kv_heads, config.gqa.dim)
    return {"key": head, "value": head}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheBytes:
    """KV cache bytes per token, over the layers of the main network."""

    rows: int  # latents and rotated keys, or keys and values
    index: int

    @property
    def total(self) -> int:
        return self.rows + self.index


def kv_cache_bytes_per_token(config: ModelConfig, itemsize: int = 2) -> KVCacheBytes:
    shapes = [kv_cache_shapes(config, layer) for layer in range(config.layers)]
    index = sum(prod(layer.get("index", (0,))) for layer in shapes)
    everything = sum(prod(shape) for layer in shapes for shape in layer.values())
    return KVCacheBytes(rows=(everything - index) * itemsize, index=index * itemsize)


# --- arithmetic -----------------------------------------------------------------------------------
#
# One definition of required FLOPs for estimates and for MFU (docs/scaling.md has the formula). A
# multiply-add counts as two. Attention counts the attended query-key pairs, causal and at most
# top-k per query where it is sparse, at the width of expanded heads. Not counted, even if executed:
# masked pairs, the wider dot products of the absorbed form, recomputation by activation
# checkpointing, norms, softmax, routing, the optimizer.


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardFlops:
    """Forward FLOPs of one token; a multiply-add counts as two."""

    weights: int  # every active matrix once, including the head; the embedding is a look-up
    attention: int
    indexer: int

    @property
    def total(self) -> int:
        return self.weights + self.attention + self.indexer


def forward_flops(config: ModelConfig, context: int, *, dense: bool = False) -> ForwardFlops:
    """Forward FLOPs of a token that sees `context` keys, without MTP. `dense`: sparse layers attend
    to all keys."""
    layers = [_layer_pairs(config, i, dense) for i in range(config.layers)]
    return ForwardFlops(
        weights=2 * (sum(_matrices(config, i).total for i in range(config.layers)) + _head(config)),
        attention=sum(p.attention * min(context, p.max_keys or context) + p.state for p in layers),
        indexer=sum(p.index * context for p in layers if p.max_keys and context > p.max_keys),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingWorkload:
    """What a training step computes besides the forward pass of the main network."""

    dense: bool = False  # sparse layers attend to every key
    language: bool = True  # language loss, with gradients of everything but the indexer
    indexer: bool = False  # indexer loss, with gradients of the indexer
    mtp_depths: int = 0


def training_flops(config: ModelConfig, length: int, workload: TrainingWorkload) -> float:
    """Forward and backward FLOPs per token, averaged over a document of `length` tokens.

    A backward pass costs twice the forward. The indexer has none without its own loss; with it, its
    projections need no gradient of their inputs, and only candidate keys are differentiated.
    """
    passes = 3 if workload.language else 1
    layers = [*range(config.layers), *[config.mtp_layer] * workload.mtp_depths]
    total = sum(_layer_training_flops(config, i, length, workload) for i in layers)
    if config.mtp is not None and config.mtp.share_index and workload.mtp_depths:
        per_depth = _index_training_flops(config, config.mtp_layer, length, workload)
        total -= (workload.mtp_depths - 1) * per_depth
    total += 2 * passes * 2 * config.hidden**2 * workload.mtp_depths  # the MTP projection
    if workload.language:
        total += 3 * 2 * _head(config) * (1 + workload.mtp_depths)
    return total


def mfu(flops_token: float, tokens_a_second: float, peak: float) -> float:
    """Model FLOPs utilisation: required FLOP/s as a fraction of the hardware's `peak` FLOP/s."""
    return flops_token * tokens_a_second / peak


def causal_pairs(length: int, max_keys: int | None = None) -> int:
    """Query-key pairs of a document under causal attention, at most `max_keys` keys per query.

    >>> causal_pairs(4), causal_pairs(4, 2)
    (10, 7)
    """
    within = length if max_keys is None else min(length, max_keys)
    return within * (within + 1) // 2 + (length - within) * within


def _layer_training_flops(
    config: ModelConfig, layer: int, length: int, workload: TrainingWorkload
) -> float:
    passes = 3 if workload.language else 1
    pairs, matrices = _layer_pairs(config, layer, workload.dense), _matrices(config, layer)
    attended = causal_pairs(length, pairs.max_keys)
    total = float(passes * (2 * (matrices.total - matrices.indexer) + pairs.state))
    total += passes * pairs.attention * attended / length
    return total + _index_training_flops(config, layer, length, workload)


def _index_training_flops(
    config: ModelConfig, layer: int, length: int, workload: TrainingWorkload
) -> float:
    pairs, matrices = _layer_pairs(config, layer, workload.dense), _matrices(config, layer)
    if not pairs.index or (workload.dense and not workload.indexer):
        return 0.0
    # Queries that see more than top-k keys score all of them to select.
    max_keys = length if pairs.max_keys is None else min(length, pairs.max_keys)
    scored = causal_pairs(length) - causal_pairs(max_keys)
    if workload.indexer:  # scores of the other queries, and gradients of all attended keys
        scored += causal_pairs(max_keys) + 2 * causal_pairs(length, pairs.max_keys)
    elif length <= max_keys:
        return 0.0  # no query selects
    projected = 2 * matrices.indexer * (2 if workload.indexer else 1)
    return projected + pairs.index * scored / length


def _head(config: ModelConfig) -> int:
    return config.vocab * config.hidden


def _matrices(config: ModelConfig, layer: int) -> ParameterCounts:
    """Matrix parameters of a layer that are active for one token."""
    active = _layer(config, layer, None if config.moe is None else config.moe.active)
    experts = 0 if config.moe is None or config.mlp_kind(layer) == "dense" else config.moe.experts
    norm = 2 * config.indexer.dim if config.indexer and active.indexer else 0
    return replace(active, norms=0, router=active.router - experts, indexer=active.indexer - norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pairs:
    """Forward FLOPs of a layer's attention: per attended pair, per pair scored by the indexer, per
    recurrent state update; and the maximal number of keys a query attends to."""

    attention: int = 0
    index: int = 0
    state: int = 0
    max_keys: int | None = None


def _layer_pairs(config: ModelConfig, layer: int, dense: bool) -> _Pairs:
    kind, gqa = config.attention_kind(layer), config.gqa
    if kind in LATENT_ATTENTION:
        mla, indexer = config.mla, config.indexer
        assert mla is not None
        attention = 2 * mla.heads * (mla.qk_head_dim + mla.value)
        if kind == "mla" or indexer is None:
            return _Pairs(attention=attention)
        index = 2 * indexer.heads * indexer.dim if config.has_indexer(layer) else 0
        return _Pairs(attention=attention, index=index, max_keys=None if dense else indexer.topk)
    assert gqa is not None
    if kind in ("gdn", "simple_gdn"):
        return _Pairs(state=6 * gqa.heads * gqa.dim**2)
    return _Pairs(attention=4 * gqa.heads * gqa.dim, max_keys=gqa.window if kind == "swa" else None)
