"""Mapping between our tensor names and the released ones.

Released checkpoints store experts one by one; in memory they are two stacks per layer. So a
released tensor is a `TensorMapping`: a slice of one of ours.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from paddock.model import ModelConfig
from paddock.model import config as model_config

# Modules of a decoder layer, ours -> released.
LATENT_MODULES = {
    "attention.q": "self_attn.q_proj",
    "attention.q_a": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.q_b": "self_attn.q_b_proj",
    "attention.kv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_b": "self_attn.kv_b_proj",
    "attention.o": "self_attn.o_proj",
    "attention.indexer.query": "self_attn.indexer.wq_b",
    "attention.indexer.key": "self_attn.indexer.wk",
    "attention.indexer.key_norm": "self_attn.indexer.k_norm",
    "attention.indexer.weights": "self_attn.indexer.weights_proj",
}
GROUPED_MODULES = {
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
}
COMMON_MODULES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp.shared.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
}
# Full tensor names, where not only the module name differs.
LAYER_TENSORS = {
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.bias": "mlp.gate.e_score_correction_bias",
}
TOP_TENSORS = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
MTP_MODULES = {
    "embed_norm": "enorm",
    "hidden_norm": "hnorm",
    "join": "eh_proj",
    "norm": "shared_head.norm",
}


@dataclass(frozen=True, slots=True)
class TensorMapping:
    """One released tensor as a slice of our tensor: an expert and a range of its rows."""

    released_name: str
    model_name: str
    expert: int | None = None
    rows: tuple[int, int] | None = None


def slice_tensor(tensor: Tensor, piece: TensorMapping) -> Tensor:
    """The slice of our tensor that a mapping describes."""
    if piece.expert is None:
        return tensor
    return tensor[piece.expert] if piece.rows is None else tensor[piece.expert][slice(*piece.rows)]


def map_tensor(name: str, shape: tuple[int, ...], config: ModelConfig) -> Iterator[TensorMapping]:
    """The released tensors that make up our tensor `name`."""
    if config.tied and name == "head.weight":
        return
    if config.family == "paddock":
        yield TensorMapping(name, name)
    elif name in TOP_TENSORS:
        yield TensorMapping(TOP_TENSORS[name], name)
    elif name.startswith("layers."):
        _, layer, inside = name.split(".", 2)
        yield from _layer_pieces(f"model.layers.{layer}.", inside, name, shape, config)
    else:
        prefix = f"model.layers.{config.mtp_layer}."
        inside = name.removeprefix("mtp.")
        if inside.startswith("block."):
            yield from _layer_pieces(prefix, inside.removeprefix("block."), name, shape, config)
        else:
            module, tensor = inside.rsplit(".", 1)
            yield TensorMapping(f"{prefix}{MTP_MODULES[module]}.{tensor}", name)


def _layer_pieces(
    prefix: str, inside: str, name: str, shape: tuple[int, ...], config: ModelConfig
) -> Iterator[TensorMapping]:
    if inside == "mlp.experts.gate_up":
        inner = shape[1] // 2
        for e in range(shape[0]):
            yield TensorMapping(f"{prefix}mlp.experts.{e}.gate_proj.weight", name, e, (0, inner))
            yield TensorMapping(
                f"{prefix}mlp.experts.{e}.up_proj.weight", name, e, (inner, 2 * inner)
            )
    elif inside == "mlp.experts.down":
        for e in range(shape[0]):
            yield TensorMapping(f"{prefix}mlp.experts.{e}.down_proj.weight", name, e)
    elif inside in LAYER_TENSORS:
        yield TensorMapping(prefix + LAYER_TENSORS[inside], name)
    else:
        latent = config.attention[0] in model_config.LATENT_ATTENTION
        modules = COMMON_MODULES | (LATENT_MODULES if latent else GROUPED_MODULES)
        module, tensor = inside.rsplit(".", 1)
        yield TensorMapping(f"{prefix}{modules[module]}.{tensor}", name)


def is_mtp(released: str, config: ModelConfig) -> bool:
    """Whether a released name belongs to the MTP layer, which follows the last layer."""
    is_paddock = config.family == "paddock"
    return released.startswith("mtp." if is_paddock else f"model.layers.{config.mtp_layer}.")


def is_redundant(released: str, config: ModelConfig) -> bool:
    """Whether a tensor repeats others: the MTP layer's copies of embedding and head, the head of a
    tied network, rotary frequencies."""
    mtp = f"model.layers.{config.mtp_layer}."
    return (
        released in (f"{mtp}embed_tokens.weight", f"{mtp}shared_head.head.weight")
        or (config.tied and released == "lm_head.weight")
        or released.endswith("rotary_emb.inv_freq")
    )
