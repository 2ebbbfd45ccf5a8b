"""Packed decoder layer: attention and MLP or experts of a step of the engine in one call, on a CPU.

Latent attention runs in absorbed form, so only steps in which that costs little take it: decoding,
with few prompt tokens beside it. In other steps the modules run one by one.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from paddock.kernels import cpu, decoder_layer
from paddock.kernels.packed_linear import PackedExpertWeights, PrepackedWeight
from paddock.model.attention.dsa import DSA
from paddock.model.attention.gqa import GQA
from paddock.model.attention.indexer import Indexer
from paddock.model.attention.mla import MLA, SlotMappedCache
from paddock.model.decoder_layer import DecoderLayer
from paddock.model.forward_context import AuxOutputs, AuxRequest, ForwardContext, TopKSelection
from paddock.model.moe import MoE

# Multiplications of absorbed attention in a layer above which the modules, which expand keys for
# many queries, are faster.
MAX_ABSORBED_WORK = 1e9
PLAIN = AuxRequest()
Parts = dict[str, Tensor | None]  # None: not packed as one call needs it


class PackedDecoderLayer(DecoderLayer):
    """A decoder layer whose modules are packed."""

    def __init__(self, layer: DecoderLayer, weights: decoder_layer.LayerWeights) -> None:
        nn.Module.__init__(self)
        for name, child in layer.named_children():
            self.add_module(name, child)
        attention = layer.attention
        assert isinstance(attention, MLA | GQA)
        self.weights, self.number = weights, attention.layer
        self.caches: tuple[str, str | None] = ("key", "value")
        self.pair_work = 0
        if isinstance(attention, MLA):
            self.caches = ("row", None if attention.indexer is None else "index")
            mla = attention.mla
            self.pair_work = mla.heads * (mla.kv_cache_dim + mla.kv_rank)

    def forward(
        self, x_TD: Tensor, ctx: ForwardContext, selection: TopKSelection | None
    ) -> tuple[Tensor, TopKSelection | None, AuxOutputs]:
        step, cache = ctx.attn_metadata.paged_step, ctx.kv_cache
        if (
            step is None
            or ctx.aux != PLAIN
            or selection is not None  # of an earlier depth of the MTP layer
            or step.pairs * self.pair_work > MAX_ABSORBED_WORK
            or x_TD.dtype != self.weights.dtype
            or not cpu.suits(x_TD)
        ):
            return super().forward(x_TD, ctx, selection)
        assert isinstance(cache, SlotMappedCache)
        first, second = (
            None if name is None else cache.storage_and_slots(self.number, name)[0]
            for name in self.caches
        )
        address = step.address(ctx.cos_TP, ctx.sin_TP, self.weights.topk)
        assert first is not None
        out_TD = decoder_layer.run(self.weights, address, (first, second), x_TD)
        return out_TD, None, AuxOutputs()


def fuse_layers(layers: Sequence[DecoderLayer]) -> list[DecoderLayer]:
    """Layers whose modules are packed, each as one; unchanged if any cannot be, because they share
    the selected keys of a step."""
    packed: list[DecoderLayer] = []
    for layer in layers:
        weights = _layer_weights(layer)
        if weights is None:
            return list(layers)
        packed.append(PackedDecoderLayer(layer, weights))
    return packed


def _layer_weights(layer: DecoderLayer) -> decoder_layer.LayerWeights | None:
    """The weights of a layer whose modules are packed; None if one call does not support it."""
    if type(layer) is not DecoderLayer:
        return None
    attention, mlp = layer.attention, layer.mlp
    if isinstance(mlp, MoE) and mlp.router.moe.groups > 1:
        return None
    if isinstance(attention, GQA):
        attention_parts, sizes = _gqa_parts(attention), _gqa_sizes(attention)
    elif isinstance(attention, MLA) and attention.mla.q_rank is not None:
        attention_parts, sizes = _mla_parts(attention), _mla_sizes(attention)
    else:
        return None
    parts: Parts = {
        "attention_norm": layer.attention_norm.weight,
        "mlp_norm": layer.mlp_norm.weight,
        **attention_parts,
        **(_moe_parts(mlp) if isinstance(mlp, MoE) else _mlp_parts(mlp)),
    }
    sizes |= _mlp_sizes(mlp)
    sizes |= {"hidden": len(layer.mlp_norm.weight), "eps": layer.mlp_norm.eps}
    tensors = {name: tensor for name, tensor in parts.items() if tensor is not None}
    if len(tensors) < len(parts):
        return None
    weights = decoder_layer.LayerWeights(sizes, tensors)
    return weights if weights.is_supported else None


def _gqa_parts(attention: GQA) -> Parts:
    qkv, o = getattr(attention, "qkv", None), getattr(attention.o, "packed", None)
    parts: Parts = {"qkv": _weight_panels(qkv), "o": _weight_panels(o)}
    biases = {"qkv_bias": getattr(attention, "qkv_bias", None), "o_bias": attention.o.bias}
    return parts | {name: bias for name, bias in biases.items() if bias is not None}


def _gqa_sizes(attention: GQA) -> dict[str, float]:
    gqa = attention.gqa
    return {
        **{"heads": gqa.heads, "kv_heads": gqa.kv_heads, "head_dim": gqa.dim},
        **{"window": attention.window or 0, "scale": gqa.dim**-0.5},
        "interleaved": attention.interleaved,
    }


def _mla_parts(attention: MLA) -> Parts:
    parts: Parts = {name: _panels(getattr(attention, name)) for name in ("q_a", "q_b", "kv_a", "o")}
    stacks = {name: getattr(attention.kv_b, name, None) for name in ("key_up", "value_up")}
    parts |= {name: None if stack is None else stack.panels for name, stack in stacks.items()}
    parts |= {"q_norm": attention.q_norm.weight, "kv_norm": attention.kv_norm.weight}
    return parts if attention.indexer is None else parts | _indexer_parts(attention.indexer)


def _indexer_parts(indexer: Indexer) -> Parts:
    return {
        "index_query": _panels(indexer.query),
        "index_key": _panels(indexer.key),
        "index_norm": indexer.key_norm.weight,
        "index_bias": indexer.key_norm.bias,
        "index_weights": indexer.weights.weight,
    }


def _mla_sizes(attention: MLA) -> dict[str, float]:
    mla, indexer = attention.mla, attention.indexer
    assert mla.q_rank is not None
    sizes: dict[str, float] = {
        **{"heads": mla.heads, "nope": mla.nope, "rope": mla.rope, "value": mla.value},
        **{"q_rank": mla.q_rank, "kv_rank": mla.kv_rank},
        **{"q_eps": attention.q_norm.eps, "kv_eps": attention.kv_norm.eps},
        **{"scale": attention.scale, "interleaved": attention.interleaved},
        "topk": attention.topk if isinstance(attention, DSA) else 0,
    }
    if indexer is not None:
        sizes |= {"index_heads": indexer.settings.heads, "index_dim": indexer.settings.dim}
        sizes |= {"index_eps": indexer.key_norm.eps, "index_scale": indexer.scale}
        sizes |= {"index_interleaved": indexer.interleaved}
    return sizes


def _mlp_parts(mlp: nn.Module) -> Parts:
    both, down = getattr(mlp, "both", None), getattr(mlp, "down", None)
    return {"gate_up": _weight_panels(both), "down": _panels(down)}


def _moe_parts(moe: MoE) -> Parts:
    stacks: object = getattr(moe.experts, "stacks", None)
    packed = stacks if type(stacks) is PackedExpertWeights else None
    return {
        "router": moe.router.weight,
        "router_bias": moe.router.bias,
        "expert_gate_up": None if packed is None else packed.gate_up,
        "expert_down": None if packed is None else packed.down,
        **({} if moe.shared is None else _mlp_parts(moe.shared)),
    }


def _mlp_sizes(mlp: nn.Module) -> dict[str, float]:
    if not isinstance(mlp, MoE):
        return {"inner": getattr(mlp, "inner", 0)}
    moe = mlp.router.moe
    return {
        **{"experts": moe.experts, "active": moe.active, "expert_inner": moe.inner},
        **{"inner": moe.inner * moe.shared, "normalize": moe.normalize, "router_scale": moe.scale},
    }


def _panels(linear: nn.Module | None) -> Tensor | None:
    """Of a packed linear layer without bias."""
    packed, bias = getattr(linear, "packed", None), getattr(linear, "bias", None)
    return None if bias is not None else _weight_panels(packed)


def _weight_panels(weight: object) -> Tensor | None:
    return weight.panels if type(weight) is PrepackedWeight else None
