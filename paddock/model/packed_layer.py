"""Packed decoder layer: latent attention and MLP or experts of a step in one call, on a CPU.

Used for steps of the engine in which attention in absorbed form costs little: decoding, with few
prompt tokens beside it. In other steps the modules run one by one.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from paddock.kernels import cpu, mla_layer
from paddock.kernels.packed_linear import PackedExpertWeights, PrepackedWeight
from paddock.model.attention.dsa import DSA
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

    def __init__(self, layer: DecoderLayer, weights: mla_layer.LayerWeights) -> None:
        nn.Module.__init__(self)
        for name, child in layer.named_children():
            self.add_module(name, child)
        assert isinstance(layer.attention, MLA)
        mla, self.number = layer.attention.mla, layer.attention.layer
        self.weights, self.has_indexer = weights, layer.attention.indexer is not None
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
        entry_SC, _ = cache.storage_and_slots(self.number, "row")
        index_SD = cache.storage_and_slots(self.number, "index")[0] if self.has_indexer else None
        address = step.address(ctx.cos_TP, ctx.sin_TP, self.weights.topk)
        return mla_layer.run(self.weights, address, entry_SC, index_SD, x_TD), None, AuxOutputs()


def fuse_layers(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Layers whose modules are packed, each as one; unchanged if any cannot be, because they share
    the selected keys of a step."""
    found = [_layer_weights(layer) for layer in layers]
    if None in found:
        return list(layers)
    return [PackedDecoderLayer(layer, weights) for layer, weights in zip(layers, found, strict=True)]


def _layer_weights(layer: nn.Module) -> mla_layer.LayerWeights | None:
    """The weights of a layer whose modules are packed; None if one call does not support it."""
    if type(layer) is not DecoderLayer or not isinstance(layer.attention, MLA):
        return None
    attention, mlp = layer.attention, layer.mlp
    if attention.mla.q_rank is None or (isinstance(mlp, MoE) and mlp.router.moe.groups > 1):
        return None
    parts: Parts = {
        "attention_norm": layer.attention_norm.weight,
        "mlp_norm": layer.mlp_norm.weight,
        **_attention_parts(attention),
        **(_moe_parts(mlp) if isinstance(mlp, MoE) else _mlp_parts(mlp)),
    }
    sizes = _attention_sizes(attention) | _mlp_sizes(mlp)
    sizes |= {"hidden": len(layer.mlp_norm.weight), "eps": layer.mlp_norm.eps}
    tensors = {name: tensor for name, tensor in parts.items() if tensor is not None}
    if len(tensors) < len(parts):
        return None
    weights = mla_layer.LayerWeights(sizes, tensors)
    return weights if weights.is_supported else None


def _attention_parts(attention: MLA) -> Parts:
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


def _attention_sizes(attention: MLA) -> dict[str, float]:
    mla, indexer = attention.mla, attention.indexer
    sizes = {
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
    both = getattr(mlp, "both", None)
    is_packed = type(both) is PrepackedWeight
    return {"gate_up": both.panels if is_packed else None, "down": _panels(mlp.down)}


def _moe_parts(moe: MoE) -> Parts:
    stacks = getattr(moe.experts, "stacks", None)
    is_packed = type(stacks) is PackedExpertWeights
    return {
        "router": moe.router.weight,
        "router_bias": moe.router.bias,
        "expert_gate_up": stacks.gate_up if is_packed else None,
        "expert_down": stacks.down if is_packed else None,
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


def _panels(linear: nn.Module) -> Tensor | None:
    """Of a packed linear layer without bias."""
    packed, bias = getattr(linear, "packed", None), getattr(linear, "bias", None)
    return packed.panels if type(packed) is PrepackedWeight and bias is None else None
