"""Role of each parameter, so that optimizers and checkpoints need not know the network.

Muon Split uses the splits: each head of an up-projection is orthogonalized separately, and so are
key and value rows, gate and up, and every expert (a stack is a stack of matrices).
"""

from dataclasses import replace

from torch import nn

from paddock.model.attention.gqa import GQA
from paddock.model.attention.indexer import Indexer, IndexerWeightsProjection
from paddock.model.attention.mla import MLA
from paddock.model.config import MLASettings, ModelConfig
from paddock.model.moe import GroupedExperts, TopKRouter
from paddock.model.mtp import MTP
from paddock.records import NamedParameter, ParameterRole
from paddock.records import parameter as roles


def parameter_roles(
    network: nn.Module, config: ModelConfig, *, split_rope_rows: bool = False
) -> list[NamedParameter]:
    """Every parameter with its name and role, in the network's order.

    `split_rope_rows`: the rotary rows of a query head form a separate block.
    """
    special: dict[int, ParameterRole] = {}
    for module in network.modules():
        if isinstance(module, MLA):
            special |= _mla_roles(module, module.mla, split_rope_rows)
        elif isinstance(module, GQA):
            special |= _gqa_roles(module)
        elif isinstance(module, GroupedExperts):
            inner = module.gate_up.shape[1] // 2
            special[id(module.gate_up)] = ParameterRole(
                "matrix", roles.MuonSplit(rows=(inner, inner))
            )
        elif isinstance(module, TopKRouter):
            special[id(module.weight)] = ParameterRole("router")
        elif isinstance(module, IndexerWeightsProjection):
            special[id(module.weight)] = ParameterRole("matrix", keep_fp32=True)
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
                special.get(id(parameter), _default_role(parameter)),
                part=parts.get(id(parameter), "main"),
            ),
        )
        for name, parameter in network.named_parameters()
    ]


def _parts(network: nn.Module) -> dict[int, roles.ModelPart]:
    """The part of every parameter of an indexer or MTP layer, by the parameter's id."""
    found: dict[int, roles.ModelPart] = {}
    for module in network.modules():
        if isinstance(module, MTP):
            found |= dict.fromkeys(map(id, module.parameters()), "mtp")
    for module in network.modules():
        if isinstance(module, Indexer):
            for parameter in map(id, module.parameters()):
                found[parameter] = "mtp_indexer" if parameter in found else "indexer"
    return found


def fp32_tensor_names(network: nn.Module, config: ModelConfig) -> frozenset[str]:
    """Names of the tensors that decide rankings: parameters with a `keep_fp32` role and the router
    biases, which are buffers. Rounding them would change which keys or experts are selected."""
    biases = {
        f"{name}.bias" for name, module in network.named_modules() if isinstance(module, TopKRouter)
    }
    roles = parameter_roles(network, config)
    return frozenset(biases | {name for name, _, role in roles if role.keep_fp32})


def _default_role(parameter: nn.Parameter) -> ParameterRole:
    return ParameterRole("matrix" if parameter.ndim >= 2 else "vector")


def _mla_roles(module: MLA, mla: MLASettings, split_rope_rows: bool) -> dict[int, ParameterRole]:
    query = module.q if mla.q_rank is None else module.q_b
    rows = (mla.nope, mla.rope) if split_rope_rows else (mla.qk_head_dim,)
    return _split_roles(
        (query, roles.MuonSplit(heads=mla.heads, rows=rows)),
        (module.kv_b, roles.MuonSplit(heads=mla.heads, rows=(mla.nope, mla.value))),
    )


def _gqa_roles(module: GQA) -> dict[int, ParameterRole]:
    gqa = module.gqa
    key_value = roles.MuonSplit(heads=gqa.kv_heads, rows=(gqa.dim,))
    return _split_roles(
        (module.q, roles.MuonSplit(heads=gqa.heads, rows=(gqa.dim,))),
        (module.k, key_value),
        (module.v, key_value),
    )


def _split_roles(*splits: tuple[nn.Module, roles.MuonSplit]) -> dict[int, ParameterRole]:
    """Roles by parameter id. Quantized replacements of a linear layer have no parameters."""
    return {
        id(linear.weight): ParameterRole("matrix", split)
        for linear, split in splits
        if isinstance(linear, nn.Linear)
    }
