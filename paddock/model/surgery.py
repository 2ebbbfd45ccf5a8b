"""A new network from an old one's weights.

Two operations the paper performs: replacing grouped attention by a cheaper kind that starts from
the same projections, and giving a dense latent network an indexer it never had. And one for models
of other families: further tokens.
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
    """The same network with other kinds of grouped attention: "swa", "gdn", "simple_gdn".

    Every weight both networks have is copied; what is new (GDN's convolutions, decay and gates) is
    drawn from `seed`, the convolutions as the identity.
    """
    config = network.config
    if config.gqa is None or any(
        kind in LATENT_ATTENTION for kind in (*config.attention, *attention)
    ):
        raise ValueError("only grouped attention can be replaced by another grouped kind")
    changed = config.model_dump() | {"family": "paddock", "attention": attention}
    if window is not None:
        changed["gqa"] = changed["gqa"] | {"window": window}
    return _transplant(network, ModelConfig.model_validate(changed), seed)


def add_indexer(network: Transformer, indexer: IndexerSettings, *, seed: int = 0) -> Transformer:
    """A dense latent network made sparse: all weights kept, the indexers drawn from `seed`."""
    return _transplant(network, add_indexer_config(network.config, indexer), seed)


def add_indexer_config(config: ModelConfig, indexer: IndexerSettings) -> ModelConfig:
    """What the configuration of a dense latent network becomes with an indexer."""
    if set(config.attention) != {"mla"}:
        raise ValueError(
            f"an indexer is given to dense latent layers, not to {set(config.attention)}"
        )
    if config.rope.layout != "interleaved":
        raise ValueError("the glm_moe_dsa family rotates interleaved pairs; this network does not")
    return ModelConfig.model_validate(
        config.model_dump()
        | {
            "family": "glm_moe_dsa",
            "attention": ("dsa",) * config.layers,
            "indexer": indexer.model_dump(),
        }
    )


VOCAB_MULTIPLE = 64  # a vocabulary of a multiple of it: what matrix products on an accelerator like


@torch.no_grad()
def resize_token_embeddings(
    network: Transformer, spellings: Mapping[int, Sequence[int]], stops: Sequence[int]
) -> Transformer:
    """The network with new tokens, by their ids, and `stops` as what ends a reply.

    A new token starts as the mean of the tokens that spelled it before, so that no two are alike
    and each means something. Rows that fill up the vocabulary are the mean of all; no text has
    them.
    """
    needed = max([network.config.vocab, *(token + 1 for token in spellings)])
    rows = -(-needed // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    changed = {"vocab": rows, "eos": tuple(stops), "bos": None, "pad": stops[0]}
    config = ModelConfig.model_validate(network.config.model_dump() | changed)

    def longer(old_VD: Tensor) -> Tensor:
        exact_VD = old_VD.float()
        new_VD = exact_VD.mean(0).repeat(rows, 1)
        new_VD[: len(old_VD)] = exact_VD
        for token, spelled in spellings.items():
            new_VD[token] = exact_VD[list(spelled)].mean(0)
        return new_VD.to(old_VD.dtype)

    state = dict(network.state_dict())
    for name in ("embed.weight", "head.weight"):
        state[name] = longer(state[name])
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
    donor = dict(old.state_dict())
    for name, tensor in new.state_dict().items():
        if name in donor:
            tensor.copy_(donor.pop(name))
    if donor:
        raise ValueError(f"the new network has no place for {sorted(donor)[:3]}")
    return new.train(old.training)
