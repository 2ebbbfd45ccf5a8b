"""What a network costs, from its configuration alone: parameters, arithmetic, memory.

Nothing is allocated; a test counts a network on the meta device and finds the same numbers.
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
    """Those that one token meets."""
    return _count(config, None if config.moe is None else config.moe.active)


def _count(config: ModelConfig, met: int | None) -> ParameterCounts:
    layers = [_layer(config, i, met) for i in range(config.layers)]
    table = config.vocab * config.hidden
    return ParameterCounts(
        embedding=table,
        head=0 if config.tied else table,
        norms=config.hidden + sum(layer.norms for layer in layers),
        mtp=_mtp(config, met),
        **{
            part: sum(getattr(layer, part) for layer in layers)
            for part in ("attention", "indexer", "dense_mlp", "experts", "shared_experts", "router")
        },
    )


def _mtp(config: ModelConfig, met: int | None) -> int:
    if config.mtp is None:
        return 0
    join_and_norms = 2 * config.hidden**2 + 3 * config.hidden
    return join_and_norms + _layer(config, config.mtp_layer, met).total


def _layer(config: ModelConfig, layer: int, met: int | None) -> ParameterCounts:
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
        assert met is not None
        expert = 3 * config.hidden * config.moe.inner
        experts, shared = met * expert, config.moe.shared * expert
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
    """Matrices and norm weights of one latent attention."""
    query_out = mla.heads * mla.qk_head_dim
    query = hidden * query_out if mla.q_rank is None else mla.q_rank * (hidden + query_out)
    key_value = hidden * mla.kv_cache_dim + mla.kv_rank * mla.heads * (mla.nope + mla.value)
    return query + key_value + mla.heads * mla.value * hidden, (mla.q_rank or 0) + mla.kv_rank


def _indexer(hidden: int, mla: MLASettings, indexer: IndexerSettings) -> int:
    assert mla.q_rank is not None
    matrices = mla.q_rank * indexer.heads * indexer.dim + hidden * (indexer.dim + indexer.heads)
    return matrices + 2 * indexer.dim


def _grouped(hidden: int, gqa: GQASettings, *, gated: bool) -> tuple[int, int]:
    """Matrices with their biases, and norm weights, of one grouped attention."""
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
    """What a layer remembers of each token, by name, with the shape of one token's share."""
    kind = config.attention_kind(layer)
    if kind in LATENT_ATTENTION:
        assert config.mla is not None
        kept: dict[str, tuple[int, ...]] = {"row": (config.mla.kv_cache_dim,)}
        if config.has_indexer(layer):
            assert config.indexer is not None
            kept["index"] = (config.indexer.dim,)
        return kept
    if kind in ("gdn", "simple_gdn"):
        return {}
    assert config.gqa is not None
    head = (config.gqa.kv_heads, config.gqa.dim)
    return {"key": head, "value": head}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheBytes:
    """Bytes remembered of one token by the main network's layers."""

    rows: int  # latents and rotated keys, or keys and values
    index: int

    @property
    def total(self) -> int:
        return self.rows + self.index


def kv_cache_bytes_per_token(config: ModelConfig, itemsize: int = 2) -> KVCacheBytes:
    kept = [kv_cache_shapes(config, layer) for layer in range(config.layers)]
    index = sum(prod(layer.get("index", (0,))) for layer in kept)
    everything = sum(prod(shape) for layer in kept for shape in layer.values())
    return KVCacheBytes(rows=(everything - index) * itemsize, index=index * itemsize)


# --- arithmetic -----------------------------------------------------------------------------------
#
# One definition of the FLOPs that are needed, for estimates and for MFU alike (docs/scaling.md has
# it as a formula). A multiply-add counts as two. Attention counts the query-key pairs that are
# attended, causal and at most top-k a query where it is sparse, at the width of expanded heads. Not
# counted, whatever is executed: pairs behind a mask, the wider dot products of the absorbed form,
# anything computed a second time for the backward pass, norms, softmax, routing, the optimizer.


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardFlops:
    """Forward floating-point operations for one token, a multiply-add counted as two."""

    weights: int  # every active matrix once, the head included, the embedding a mere look-up
    attention: int
    indexer: int

    @property
    def total(self) -> int:
        return self.weights + self.attention + self.indexer


def forward_flops(config: ModelConfig, context: int, *, dense: bool = False) -> ForwardFlops:
    """Of a token that sees `context` keys, without MTP. `dense`: as if no indexer left anything
    out."""
    layers = [_layer_pairs(config, i, dense) for i in range(config.layers)]
    return ForwardFlops(
        weights=2 * (sum(_matrices(config, i).total for i in range(config.layers)) + _head(config)),
        attention=sum(p.attention * min(context, p.most or context) + p.state for p in layers),
        indexer=sum(p.index * context for p in layers if p.most and context > p.most),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingWorkload:
    """What a training step computes besides the forward pass of the main network."""

    dense: bool = False  # sparse layers attend to every key
    language: bool = True  # the language loss, and gradients of everything but the indexer
    indexer: bool = False  # the indexer's own loss, and its gradients
    mtp_depths: int = 0


def training_flops(config: ModelConfig, length: int, learning: TrainingWorkload) -> float:
    """Forward and backward for a token, on average over a document of `length` tokens.

    A backward pass costs twice the forward. The indexer has none without its own loss; with it, its
    projections need no gradient of their inputs, and only candidate keys are differentiated.
    """
    times = 3 if learning.language else 1
    layers = [*range(config.layers), *[config.mtp_layer] * learning.mtp_depths]
    total = sum(_layer_training_flops(config, i, length, learning) for i in layers)
    if config.mtp is not None and config.mtp.share_index and learning.mtp_depths:
        once = _index_training_flops(config, config.mtp_layer, length, learning)
        total -= (learning.mtp_depths - 1) * once
    total += 2 * times * 2 * config.hidden**2 * learning.mtp_depths  # of the join
    if learning.language:
        total += 3 * 2 * _head(config) * (1 + learning.mtp_depths)
    return total


def mfu(flops_token: float, tokens_a_second: float, peak: float) -> float:
    """Model FLOPs utilisation: the share of the chips' `peak` (FLOP/s) that needed work takes."""
    return flops_token * tokens_a_second / peak


def causal_pairs(length: int, most: int | None = None) -> int:
    """Query-key pairs of a document in which a query sees itself and what is before it, at most
    `most` keys.

    >>> causal_pairs(4), causal_pairs(4, 2)
    (10, 7)
    """
    within = length if most is None else min(length, most)
    return within * (within + 1) // 2 + (length - within) * within


def _layer_training_flops(
    config: ModelConfig, layer: int, length: int, learning: TrainingWorkload
) -> float:
    times = 3 if learning.language else 1
    pairs, matrices = _layer_pairs(config, layer, learning.dense), _matrices(config, layer)
    attended = causal_pairs(length, pairs.most)
    total = float(times * (2 * (matrices.total - matrices.indexer) + pairs.state))
    total += times * pairs.attention * attended / length
    return total + _index_training_flops(config, layer, length, learning)


def _index_training_flops(
    config: ModelConfig, layer: int, length: int, learning: TrainingWorkload
) -> float:
    pairs, matrices = _layer_pairs(config, layer, learning.dense), _matrices(config, layer)
    if not pairs.index or (learning.dense and not learning.indexer):
        return 0.0
    # To choose keys, queries that see more than top-k score all of them.
    most = length if pairs.most is None else min(length, pairs.most)
    scored = causal_pairs(length) - causal_pairs(most)
    if learning.indexer:  # scores of the others, and gradients of every candidate's
        scored += causal_pairs(most) + 2 * causal_pairs(length, pairs.most)
    elif length <= most:
        return 0.0  # nobody chooses
    projected = 2 * matrices.indexer * (2 if learning.indexer else 1)
    return projected + pairs.index * scored / length


def _head(config: ModelConfig) -> int:
    return config.vocab * config.hidden


def _matrices(config: ModelConfig, layer: int) -> ParameterCounts:
    """What one token is multiplied with in a layer."""
    met = _layer(config, layer, None if config.moe is None else config.moe.active)
    experts = 0 if config.moe is None or config.mlp_kind(layer) == "dense" else config.moe.experts
    norm = 2 * config.indexer.dim if config.indexer and met.indexer else 0
    return replace(met, norms=0, router=met.router - experts, indexer=met.indexer - norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pairs:
    """Forward FLOPs of a layer's attention: of a pair that is attended, of one that the indexer
    scores, of a state that stands for a past; and how many keys a query attends to at most."""

    attention: int = 0
    index: int = 0
    state: int = 0
    most: int | None = None


def _layer_pairs(config: ModelConfig, layer: int, dense: bool) -> _Pairs:
    kind, gqa = config.attention_kind(layer), config.gqa
    if kind in LATENT_ATTENTION:
        mla, indexer = config.mla, config.indexer
        assert mla is not None
        attention = 2 * mla.heads * (mla.qk_head_dim + mla.value)
        if kind == "mla" or indexer is None:
            return _Pairs(attention=attention)
        index = 2 * indexer.heads * indexer.dim if config.has_indexer(layer) else 0
        return _Pairs(attention=attention, index=index, most=None if dense else indexer.topk)
    assert gqa is not None
    if kind in ("gdn", "simple_gdn"):
        return _Pairs(state=6 * gqa.heads * gqa.dim**2)
    return _Pairs(attention=4 * gqa.heads * gqa.dim, most=gqa.window if kind == "swa" else None)
