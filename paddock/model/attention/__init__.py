"""Attention variants of a layer, by the name the configuration uses.

dsa.py       DeepSeek Sparse Attention: MLA over the keys that an indexer selects
gdn.py       Gated DeltaNet and a simplified form: linear attention with a recurrent state
gqa.py       grouped-query attention, full or sliding-window
indexer.py   the lightning indexer that computes index scores
mla.py       multi-head latent attention, expanded and absorbed
"""

from torch import nn

from paddock.model.attention.dsa import DSA, select_topk, split_dense_sparse
from paddock.model.attention.gdn import GatedDeltaNet, SimpleGatedDeltaNet
from paddock.model.attention.gqa import GQA, SlidingWindowAttention
from paddock.model.attention.indexer import Indexer
from paddock.model.attention.mla import MLA, MLAProjections
from paddock.model.config import AttentionKind, ModelConfig

__all__ = [
    "ATTENTION",
    "DSA",
    "GQA",
    "MLA",
    "GatedDeltaNet",
    "Indexer",
    "MLAProjections",
    "SimpleGatedDeltaNet",
    "SlidingWindowAttention",
    "build_attention",
    "select_topk",
    "split_dense_sparse",
]

ATTENTION: dict[AttentionKind, type[nn.Module]] = {
    "mla": MLA,
    "dsa": DSA,
    "gqa": GQA,
    "swa": SlidingWindowAttention,
    "gdn": GatedDeltaNet,
    "simple_gdn": SimpleGatedDeltaNet,
}


def build_attention(config: ModelConfig, layer: int) -> nn.Module:
    """The attention module of one layer; the MTP layer's index is `config.mtp_layer`."""
    return ATTENTION[config.attention_kind(layer)](config, layer)
