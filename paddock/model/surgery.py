"""Model surgery: derive a network with another attention, an indexer or more tokens from weights.

Replace grouped-query attention by a cheaper kind initialised from the same projections, add a DSA
indexer to a dense MLA network, and resize the token embeddings.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paddock.model.config import (
    LATENT_ATTENTION,
    AttentionKind,
    IndexerSettings,
    ModelConfig,
)
from paddock.model.transformer import Transformer


def replace_attention(
    network: Transformer,
    attention: tuple[AttentionKind, ...],
    *,
    seed: int = 0,
    window: int | None = None,
) -> Transformer:
    """The network with other kinds of grouped attention: "swa", "gdn", "simple_gdn".

    Weights that both networks have are copied; new ones (GDN's convolutions, decay and gates) are
    initialised from `seed`, the convolutions as the identity.
    """
    config = network.config
    if config.gqa is None or any(
        kind in LATENT_ATTENTION for kind in (*config.attention, *attention)
    ):
        raise ValueError("only grouped attention can be replaced, and only by another grouped kind")
    changed = config.model_dump() | {"family": "paddock", "attention": attention}
    if window is not None:
        changed["gqa"] = changed["gqa"] | {"window": window}
    return _transplant(network, ModelConfig.model_validate(changed), seed)


def add_indexer(network: Transformer, indexer: IndexerSettings, *, seed: int = 0) -> Transformer:
    """A DSA network from a dense MLA one: weights copied, indexers initialised from `seed`."""
    return _transplant(network, add_indexer_config(network.config, indexer), seed)


def add_indexer_config(config: ModelConfig, indexer: IndexerSettings) -> ModelConfig:
    """The configuration of a dense MLA network with an indexer added."""
    if set(config.attention) != {"mla"}:
        raise ValueError(
            f"an indexer can be added to 'mla' layers only, got {sorted(set(config.attention))}"
        )
    if config.rope.layout != "interleaved":
        raise ValueError(
            f"the glm_moe_dsa family needs rope.layout 'interleaved', got '{config.rope.layout}'"
        )
    return ModelConfig.model_validate(
        config.model_dump()
        | {
            "family": "glm_moe_dsa",
            "attention": ("dsa",) * config.layers,
            "indexer": indexer.model_dump(),
        }
    )


VOCAB_MULTIPLE = 64  # the vocabulary is padded to a multiple: tile size of GPU matrix products


@torch.no_grad()
def resize_token_embeddings(
    network: Transformer, spellings: Mapping[int, Sequence[int]], stops: Sequence[int]
) -> Transformer:
    """The network with new tokens, by id, and `stops` as its EOS tokens.

    A new token starts as the mean of the tokens that spelled it before, so that new tokens differ
    and start with a meaning. Padding rows of the vocabulary are the mean of all; no text has them.
    """
    needed = max([network.config.vocab, *(token + 1 for token in spellings)])
    rows = -(-needed // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    changed = {"vocab": rows, "eos": tuple(stops), "bos": None, "pad": stops[0]}
    config = ModelConfig.model_validate(network.config.model_dump() | changed)

    def extend_rows(old_VD: Tensor) -> Tensor:
        float_VD = old_VD.float()
        new_VD = float_VD.mean(0).repeat(rows, 1)
        new_VD[: len(old_VD)] = float_VD
        for token, pieces in spellings.items():
            new_VD[token] = float_VD[list(pieces)].mean(0)
        return new_VD.to(old_VD.dtype)

    state = dict(network.state_dict())
    for name in ("embed.weight", "head.weight"):
        state[name] = extend_rows(state[name])
    with torch.device("meta"):
        larger = Transformer(config)
    larger.load_state_dict(state, assign=True)
    if config.tied:
        larger.head.weight = larger.embed.weight
    return larger.train(network.training)


@torch.no_grad()
def _transplant(old: Transformer, config: ModelConfig, seed: int) -> Transformer:
    new = Transformer.from_config(config, seed)
    new = new.to(old.embed.weight.device).cast(old.embed.weight.dtype)
    remaining = dict(old.state_dict())
    for name, tensor in new.state_dict().items():
        if name in remaining:
            tensor.copy_(remaining.pop(name))
    if remaining:
        raise ValueError(f"the new network lacks tensors of the old one: {sorted(remaining)[:3]}")
    return new.train(old.training)
