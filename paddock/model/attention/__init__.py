"""Which attention a layer has, as a table.

dsa.py       latent attention to the keys an indexer chose
gdn.py       Gated DeltaNet and its simplified form: a state instead of a past
gqa.py       grouped-query attention, full or through a window
indexer.py   the cheap heads that choose
mla.py       latent attention, expanded and absorbed
"""

from torch import nn

from paddock.model.attention.dsa import DSA
from paddock.model.attention.gdn import GatedDeltaNet, SimpleGatedDeltaNet
from paddock.model.attention.gqa import GQA, SlidingWindowAttention
from paddock.model.attention.mla import MLA
from paddock.model.config import AttentionKind, ModelConfig

ATTENTION: dict[AttentionKind, type[nn.Module]] = {
    "mla": MLA,
    "dsa": DSA,
    "gqa": GQA,
    "swa": SlidingWindowAttention,
    "gdn": GatedDeltaNet,
    "simple_gdn": SimpleGatedDeltaNet,
}


def build_attention(config: ModelConfig, layer: int) -> nn.Module:
    """The attention of one layer; the MTP layer's index is the number of layers."""
    return ATTENTION[config.attention_kind(layer)](config, layer)


from paddock.model.attention.dsa import select_topk, split_dense_sparse
from paddock.model.attention.indexer import Indexer
from paddock.model.attention.mla import MLAProjections

__all__ = [
    "DSA",
    "GQA",
    "MLA",
    "AttentionKind",
    "GatedDeltaNet",
    "Indexer",
    "MLAProjections",
    "ModelConfig",
    "SimpleGatedDeltaNet",
    "SlidingWindowAttention",
    "nn",
    "select_topk",
    "split_dense_sparse",
]
