"""The network, one definition for trainer and engine alike.

attention/   latent, sparse, grouped, windowed and linear attention, and the table of them
block.py     one decoder layer
config.py    the shape of a network, checked when it is built
cost.py      parameters, arithmetic and memory, from the configuration alone
glm.py       embedding, layers, norm, head and MTP in one module
init.py      how a network is born
memory.py    what a layer may look back on
moe.py       dense feed-forward, router, experts and their balance
mtp.py       multi-token prediction, one layer for all depths
norm.py      norms with their weights
presets.py   networks with a name
roles.py     what each parameter is for
rope.py      rotation angles, stretched or not
step.py      what all layers are told, and what they report
surgery.py   a new attention from an old one's weights
together.py  linear maps of one input as one product
"""

from paddock.model.config import RECURRENT, ModelConfig
from paddock.model.glm import Network, Output
from paddock.model.memory import Batch, GrowingMemory, Layout, Memory, NoMemory
from paddock.model.presets import PRESETS, preset
from paddock.model.step import Ask, LayerNotes, Selection, Step

__all__ = [
    "PRESETS",
    "RECURRENT",
    "Ask",
    "Batch",
    "GrowingMemory",
    "LayerNotes",
    "Layout",
    "Memory",
    "ModelConfig",
    "Network",
    "NoMemory",
    "Output",
    "Selection",
    "Step",
    "preset",
]
