"""Small networks of every kind, for tests."""

from typing import Any

import torch

from paddock.model import ModelConfig, Transformer
from paddock.model.config import (
    GQASettings,
    IndexerSettings,
    MLASettings,
    MoESettings,
    MTPSettings,
    RopeSettings,
    WeightInitSettings,
)

VOCAB = 50


def latent_config(**changes: Any) -> ModelConfig:
    """Four sparse layers that keep 8 keys, experts in three of them, and an MTP layer."""
    defaults: dict[str, Any] = {
        "family": "glm_moe_dsa",
        "vocab": VOCAB,
        "hidden": 32,
        "context": 256,
        "attention": ("dsa",) * 4,
        "mlp": ("dense", "moe", "moe", "moe"),
        "dense_inner": 48,
        "rope": RopeSettings(theta=100.0),
        "mla": MLASettings(heads=4, q_rank=24, kv_rank=16, nope=8, rope=4, value=10),
        "indexer": IndexerSettings(heads=2, dim=8, topk=8, layers=("full",) * 4),
        "moe": MoESettings(experts=6, active=2, inner=16),
        "mtp": MTPSettings(depths=3),
        "init": WeightInitSettings(std=0.2),
    }
    return ModelConfig(**(defaults | changes))


def grouped_config(*kinds: str, **changes: Any) -> ModelConfig:
    defaults: dict[str, Any] = {
        "family": "paddock",
        "vocab": VOCAB,
        "hidden": 32,
        "context": 256,
        "attention": kinds,
        "mlp": ("dense",) * len(kinds),
        "dense_inner": 48,
        "rope": RopeSettings(theta=100.0, layout="halves"),
        "gqa": GQASettings(heads=4, kv_heads=2, dim=8, window=6),
        "init": WeightInitSettings(std=0.2),
    }
    return ModelConfig(**(defaults | changes))


def build_network(config: ModelConfig, seed: int = 0) -> Transformer:
    """A network with random norms and biases too, so that a missing one changes the result."""
    network = Transformer.from_config(config, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for tensor in network.state_dict().values():
            if tensor.ndim == 1:
                tensor += 0.2 * torch.randn(tensor.shape, generator=generator)
    return network.eval()


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))
