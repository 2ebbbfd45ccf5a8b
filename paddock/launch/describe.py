"""Parameters, KV cache, FLOPs and training memory of a network, from its configuration alone."""

from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddock.launch.errors import UserError

if TYPE_CHECKING:
    from paddock.model import ModelConfig, cost

Figures = dict[str, Any]

CONTEXTS = {"4K": 4096, "32K": 32_768, "128K": 131_072, "200K": 200_000, "1M": 1_048_576}
# Training memory in bytes per parameter: weight, gradient and optimizer moments, in float32.
TRAINING_BYTES = {"AdamW": 16, "Muon": 12}


def named_config(name: str) -> "ModelConfig":
    """The configuration of a preset, or of a checkpoint folder."""
    from paddock.checkpoint import read_config
    from paddock.model import PRESETS

    if name in PRESETS:
        return PRESETS[name]
    if Path(name).is_dir():
        return read_config(Path(name))
    near = get_close_matches(name, PRESETS, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise UserError(
        f"'{name}' is neither a preset nor a folder; {hint}presets: {', '.join(PRESETS)}"
    )


def model_figures(config: "ModelConfig") -> Figures:
    """All numbers, exact, as JSON values. No weights are allocated."""
    from paddock.model import cost

    every, cache = cost.count_parameters(config), cost.kv_cache_bytes_per_token(config)
    return {
        "parameters": _with_totals(every),
        "active_parameters": _with_totals(cost.count_active_parameters(config)),
        "bf16_bytes": 2 * every.total,
        "cache_bytes_per_token": asdict(cache) | {"total": cache.total},
        "flops_per_token": {name: _flops(config, n) for name, n in _contexts(config).items()},
        "training_bytes": {name: each * every.total for name, each in TRAINING_BYTES.items()},
    }


def _with_totals(parts: "cost.ParameterCounts") -> Figures:
    return asdict(parts) | {
        "without_embeddings": parts.without_embeddings,
        "with_embeddings_and_head": parts.without_mtp,
        "with_mtp": parts.total,
    }


def _contexts(config: "ModelConfig") -> dict[str, int]:
    """Context lengths up to the network's own, by name."""
    within = {name: tokens for name, tokens in CONTEXTS.items() if tokens <= config.context}
    return within or {f"{config.context:,}": config.context}


def _flops(config: "ModelConfig", context: int) -> Figures:
    from paddock.model import cost

    sparse, dense = (
        cost.forward_flops(config, context),
        cost.forward_flops(config, context, dense=True),
    )
    return asdict(sparse) | {
        "total": sparse.total,
        "dense_attention": dense.attention,
        "dense_total": dense.total,
        "dense_over_sparse": dense.total / sparse.total,
    }
