"""Model definition shared by trainer and engine: config, layers, attention, MoE, MTP.

attention/   MLA, DSA, GQA, sliding-window and linear attention, and the table of them
attention_metadata.py  positions, spans, KV slots and decode batch of a packed step
decoder_layer.py  one decoder layer
config.py    model configuration, validated
cost.py      parameter counts, FLOPs and KV cache bytes from the configuration alone
transformer.py  embedding, layers, norm, head and MTP in one module
weight_init.py  random weight initialisation from a seed
linear.py    linear module
kv_cache.py  KV cache protocol, no cache for training, a growing cache for one sequence
moe.py       gated MLP, top-k router, routed experts and their balance loss
mtp.py       multi-token prediction, one layer for all depths
norm.py      RMSNorm and LayerNorm modules
packed.py    weights packed for serving on a CPU
packed_layer.py  packed decoder layers that run in one call
presets.py   named configurations, nano to GLM-5
roles.py     role of each parameter: optimizer group, Muon split, float32 storage
rope.py      rotary position embeddings and their context scaling
forward_context.py  inputs shared by all layers of a forward pass, and auxiliary outputs
surgery.py   change the attention, indexer or vocabulary of trained weights
fuse.py      linear layers with the same input as one matrix product
"""

from paddock.model import attention, config, cost, packed
from paddock.model.attention_metadata import AttentionMetadata, DecodeBatch
from paddock.model.config import ModelConfig
from paddock.model.decoder_layer import DecoderLayer
from paddock.model.forward_context import AuxOutputs, AuxRequest, ForwardContext, TopKSelection
from paddock.model.kv_cache import GrowingCache, KVCache
from paddock.model.moe import GatedMLP, GroupedExperts, MoE, Routing, TopKRouter
from paddock.model.mtp import MTP
from paddock.model.norm import RMSNorm
from paddock.model.presets import PRESETS, preset
from paddock.model.roles import parameter_roles
from paddock.model.rope import inv_freq, rotary_cos_sin
from paddock.model.surgery import add_indexer, add_indexer_config, resize_token_embeddings
from paddock.model.transformer import Transformer

__all__ = [
    "MTP",
    "PRESETS",
    "AttentionMetadata",
    "AuxOutputs",
    "AuxRequest",
    "DecodeBatch",
    "DecoderLayer",
    "ForwardContext",
    "GatedMLP",
    "GroupedExperts",
    "GrowingCache",
    "KVCache",
    "MoE",
    "ModelConfig",
    "RMSNorm",
    "Routing",
    "TopKRouter",
    "TopKSelection",
    "Transformer",
    "add_indexer",
    "add_indexer_config",
    "attention",
    "config",
    "cost",
    "inv_freq",
    "packed",
    "parameter_roles",
    "preset",
    "resize_token_embeddings",
    "rotary_cos_sin",
]
