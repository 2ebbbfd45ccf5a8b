"""What a network costs, from its configuration alone: parameters, arithmetic, memory.

Nothing is allocated; a test counts a network on the meta device and finds the same numbers.
"""

from dataclasses import dataclass, fields
from math import prod

from paddock.model.config import (
    LATENT,
    GroupedSettings,
    IndexerSettings,
    LatentSettings,
    ModelConfig,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
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


def parameters(config: ModelConfig) -> Parameters:
    """All parameters."""
    return _count(config, None if config.moe is None else config.moe.experts)


def layer_parameters(config: ModelConfig, layer: int) -> Parameters:
    """All parameters of one layer."""
    return _layer(config, layer, None if config.moe is None else config.moe.experts)


def active_parameters(config: ModelConfig) -> Parameters:
    """Those that one token meets."""
    return _count(config, None if config.moe is None else config.moe.active)


def _count(config: ModelConfig, met: int | None) -> Parameters:
    layers = [_layer(config, i, met) for i in range(config.layers)]
    table = config.vocab * config.hidden
    return Parameters(
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


def _layer(config: ModelConfig, layer: int, met: int | None) -> Parameters:
    kind = config.attention_of(layer)
    if kind in LATENT:
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
    if config.mlp_of(layer) == "dense":
        dense = 3 * config.hidden * config.dense_inner
    else:
        assert config.moe is not None
        assert met is not None
        expert = 3 * config.hidden * config.moe.inner
        experts, shared = met * expert, config.moe.shared * expert
        router = config.moe.experts * (config.hidden + 1)
    return Parameters(
        attention=attention,
        indexer=indexer,
        dense_mlp=dense,
        experts=experts,
        shared_experts=shared,
        router=router,
        norms=norms + 2 * config.hidden,
    )


def _latent(hidden: int, mla: LatentSettings) -> tuple[int, int]:
    """Matrices and norm weights of one latent attention."""
    query_out = mla.heads * mla.qk
    query = hidden * query_out if mla.q_rank is None else mla.q_rank * (hidden + query_out)
    key_value = hidden * mla.row + mla.kv_rank * mla.heads * (mla.nope + mla.value)
    return query + key_value + mla.heads * mla.value * hidden, (mla.q_rank or 0) + mla.kv_rank


def _indexer(hidden: int, mla: LatentSettings, indexer: IndexerSettings) -> int:
    assert mla.q_rank is not None
    matrices = mla.q_rank * indexer.heads * indexer.dim + hidden * (indexer.dim + indexer.heads)
    return matrices + 2 * indexer.dim


def _grouped(hidden: int, gqa: GroupedSettings, *, gated: bool) -> tuple[int, int]:
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


def streams(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """What a layer remembers of each token, by name, with the shape of one token's share."""
    kind = config.attention_of(layer)
    if kind in LATENT:
        assert config.mla is not None
        kept: dict[str, tuple[int, ...]] = {"row": (config.mla.row,)}
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
class CacheBytes:
    """Bytes remembered of one token by the main network's layers."""

    rows: int  # latents and rotated keys, or keys and values
    index: int

    @property
    def total(self) -> int:
        return self.rows + self.index


def cache_bytes(config: ModelConfig, itemsize: int = 2) -> CacheBytes:
    kept = [streams(config, layer) for layer in range(config.layers)]
    index = sum(prod(layer.get("index", (0,))) for layer in kept)
    everything = sum(prod(shape) for layer in kept for shape in layer.values())
    return CacheBytes(rows=(everything - index) * itemsize, index=index * itemsize)


# --- arithmetic -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """Forward floating-point operations for one token, a multiply-add counted as two."""

    weights: int  # every active matrix once, the head included, the embedding a mere look-up
    attention: int
    indexer: int

    @property
    def total(self) -> int:
        return self.weights + self.attention + self.indexer


def flops(config: ModelConfig, context: int, *, dense: bool = False) -> Flops:
    """Of a token that sees `context` keys, without MTP.

    Latent attention to everything is counted in its expanded form, attention to a choice in the
    absorbed form, since those are the forms that run. `dense`: as if no indexer left anything out.
    """
    active = active_parameters(config)
    router_bias = 0 if config.moe is None else config.moe.experts * config.mlp.count("moe")
    head = config.vocab * config.hidden
    weights = 2 * (active.without_embeddings - active.norms - router_bias + head)
    layers = [_attention_flops(config, i, context, dense) for i in range(config.layers)]
    return Flops(
        weights=weights,
        attention=sum(attention for attention, _ in layers),
        indexer=sum(indexer for _, indexer in layers),
    )


def _attention_flops(config: ModelConfig, layer: int, context: int, dense: bool) -> tuple[int, int]:
    kind = config.attention_of(layer)
    if kind in LATENT:
        mla, indexer = config.mla, config.indexer
        assert mla is not None
        if kind == "mla" or dense or indexer is None or context <= indexer.topk:
            return 2 * mla.heads * (mla.qk + mla.value) * context, 0
        kept = 2 * mla.heads * (mla.row + mla.kv_rank) * indexer.topk
        scored = 2 * indexer.heads * indexer.dim * context if config.has_indexer(layer) else 0
        return kept, scored
    gqa = config.gqa
    assert gqa is not None
    if kind in ("gdn", "simple_gdn"):
        return 6 * gqa.heads * gqa.dim**2, 0
    seen = min(context, gqa.window) if kind == "swa" and gqa.window else context
    return 4 * gqa.heads * gqa.dim * seen, 0
