"""The network, one definition for trainer and engine alike.

attention/   latent, sparse, grouped, windowed and linear attention, and the table of them
decoder_layer.py  one decoder layer
config.py    the shape of a network, checked when it is built
cost.py      parameters, arithmetic and memory, from the configuration alone
transformer.py  embedding, layers, norm, head and MTP in one module
weight_init.py  how a network is born
kv_cache.py  what a layer may look back on
moe.py       dense feed-forward, router, experts and their balance
mtp.py       multi-token prediction, one layer for all depths
norm.py      norms with their weights
presets.py   networks with a name
roles.py     what each parameter is for
rope.py      rotation angles, stretched or not
forward_context.py  what all layers are told, and what they report
surgery.py   a new attention from an old one's weights
fuse.py      linear maps of one input as one product
"""

from paddock.model import attention, config, cost
from paddock.model.config import ModelConfig
from paddock.model.decoder_layer import DecoderLayer
from paddock.model.forward_context import AuxOutputs, AuxRequest, ForwardContext, TopKSelection
from paddock.model.kv_cache import AttentionMetadata, DecodeBatch
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
    "parameter_roles",
    "preset",
    "resize_token_embeddings",
    "rotary_cos_sin",
]
