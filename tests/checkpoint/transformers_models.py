"""Tiny transformers models with fully random weights."""

from pathlib import Path

import torch
import transformers
from torch import Tensor

from paddock.model import Transformer

TOLERANCE = 1e-5  # relative L2 of float32 logits
VOCAB = 61
TOKENS: list[int] = torch.randint(VOCAB, (24,), generator=torch.Generator().manual_seed(3)).tolist()

DENSE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-6,
}
LATENT = DENSE | {
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
# Sixteen index heads: transformers selects with torch.topk, whose order among equal scores is
# undefined, and a ReLU over few heads makes scores exactly zero (with eight, two in one row here).
SPARSE = LATENT | {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 6}


def random_model(family: str, settings: dict[str, object]) -> transformers.PreTrainedModel:
    """A transformers model whose vectors are random too, so that a swapped norm or router bias
    changes the logits."""
    model_class = getattr(transformers, f"{family}ForCausalLM")
    model = model_class(model_class.config_class(**settings)).eval()
    generator = torch.Generator().manual_seed(7)
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        is_norm = tensor.ndim == 1 and name.endswith("weight")
        tensor.copy_(1 + 0.3 * noise if is_norm else 0.2 * noise)
    return model


def load_with_transformers(
    family: str, folder: Path
) -> tuple[transformers.PreTrainedModel, set[str]]:
    """The transformers model of a folder, and its unexpected tensors. None may be missing."""
    model_class = getattr(transformers, f"{family}ForCausalLM")
    model, info = model_class.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    return model.eval(), set(info["unexpected_keys"])


@torch.no_grad()
def transformers_logits(model: transformers.PreTrainedModel) -> Tensor:
    return model(torch.tensor([TOKENS])).logits[0].float()


@torch.no_grad()
def our_logits(network: Transformer) -> Tensor:
    return network.logits(TOKENS)


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Relative L2."""
    return float((ours - theirs).norm() / theirs.norm())
