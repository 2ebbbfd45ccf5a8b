"""What each parameter is for, so that an optimizer need not know the network.

Muon Split reads the splits: every head of an up-projection is orthogonalized on its own, key and
value rows apart, gate and up apart, experts one by one (a stack is a stack of matrices).
"""

from dataclasses import replace

from torch import nn

from paddock.model.attention.gqa import GQA
from paddock.model.attention.indexer import Indexer
from paddock.model.attention.mla import MLA
from paddock.model.config import MLASettings, ModelConfig
from paddock.model.moe import GroupedExperts, TopKRouter
from paddock.records import MuonSplit, NamedParameter, ParameterRole


def parameter_roles(
    network: nn.Module, config: ModelConfig, *, split_rope_rows: bool = False
) -> list[NamedParameter]:
    """Every parameter with its name and role, in the network's order.

    `split_rope_rows`: a query head's rotated rows form a block of their own.
    """
    special: dict[int, ParameterRole] = {}
    for module in network.modules():
        if isinstance(module, MLA):
            special |= _latent_roles(module, module.mla, split_rope_rows)
        elif isinstance(module, GQA):
            special |= _grouped_roles(module)
        elif isinstance(module, GroupedExperts):
            inner = module.gate_up.shape[1] // 2
            special[id(module.gate_up)] = ParameterRole("matrix", MuonSplit(rows=(inner, inner)))
        elif isinstance(module, TopKRouter):
            special[id(module.weight)] = ParameterRole("router")
        elif isinstance(module, nn.Embedding):
            special[id(module.weight)] = ParameterRole("embedding")
    head = getattr(network, "head", None)
    if head is not None and not config.tied:
        special[id(head.weight)] = ParameterRole("head")
    parts = _parts(network)
    return [
        NamedParameter(
            name,
            parameter,
            replace(
                special.get(id(parameter), _plain(parameter)), part=parts.get(id(parameter), "")
            ),
        )
        for name, parameter in network.named_parameters()
    ]


def _parts(network: nn.Module) -> dict[int, str]:
    """Parameters of the MTP layer and of indexers; the MTP layer's own indexer is an indexer."""
    parts: dict[int, str] = {}
    mtp = getattr(network, "mtp", None)
    if mtp is not None:
        parts |= {id(parameter): "mtp" for parameter in mtp.parameters()}
    for module in network.modules():
        if isinstance(module, Indexer):
            parts |= {id(parameter): "indexer" for parameter in module.parameters()}
    return parts


def _plain(parameter: nn.Parameter) -> ParameterRole:
    return ParameterRole("matrix" if parameter.ndim >= 2 else "vector")


def _latent_roles(module: MLA, mla: MLASettings, split_rope_rows: bool) -> dict[int, ParameterRole]:
    query = module.q if mla.q_rank is None else module.q_b
    rows = (mla.nope, mla.rope) if split_rope_rows else (mla.qk_head_dim,)
    return {
        id(query.weight): ParameterRole("matrix", MuonSplit(heads=mla.heads, rows=rows)),
        id(module.kv_b.weight): ParameterRole(
            "matrix", MuonSplit(heads=mla.heads, rows=(mla.nope, mla.value))
        ),
    }


def _grouped_roles(module: GQA) -> dict[int, ParameterRole]:
    gqa = module.gqa
    return {
        id(module.q.weight): ParameterRole("matrix", MuonSplit(heads=gqa.heads, rows=(gqa.dim,))),
        id(module.k.weight): ParameterRole(
            "matrix", MuonSplit(heads=gqa.kv_heads, rows=(gqa.dim,))
        ),
        id(module.v.weight): ParameterRole(
            "matrix", MuonSplit(heads=gqa.kv_heads, rows=(gqa.dim,))
        ),
    }
