"""What a network weighs and costs, from its configuration alone."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from paddock.cli.tables import print_parts, table
from paddock.cli.units import format_bytes, format_count, unit_for

if TYPE_CHECKING:
    from paddock.model import ModelConfig, cost

Figures = dict[str, Any]

CONTEXTS = {"4K": 4096, "32K": 32_768, "128K": 131_072, "200K": 200_000, "1M": 1_048_576}
# Bytes a parameter takes in training: itself, its gradient and the optimizer's moments, in float32.
TRAINING = {"AdamW": 16, "Muon": 12}


def model_figures(config: "ModelConfig") -> Figures:
    """All numbers, exact, in the shape of JSON. Nothing of the network is built."""
    from paddock.model import cost

    every, cache = cost.count_parameters(config), cost.kv_cache_bytes_per_token(config)
    return {
        "parameters": _with_totals(every),
        "active_parameters": _with_totals(cost.count_active_parameters(config)),
        "bf16_bytes": 2 * every.total,
        "cache_bytes_per_token": asdict(cache) | {"total": cache.total},
        "flops_per_token": {name: _flops(config, n) for name, n in _contexts(config).items()},
        "training_bytes": {name: each * every.total for name, each in TRAINING.items()},
    }


def _with_totals(parts: "cost.ParameterCounts") -> Figures:
    return asdict(parts) | {
        "without_embeddings": parts.without_embeddings,
        "with_embeddings_and_head": parts.without_mtp,
        "with_mtp": parts.total,
    }


def _contexts(config: "ModelConfig") -> dict[str, int]:
    """Lengths within the network's reach, by name."""
    reached = {name: tokens for name, tokens in CONTEXTS.items() if tokens <= config.context}
    return reached or {f"{config.context:,}": config.context}


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


def print_tables(name: str, config: "ModelConfig") -> None:
    """The same for the eye, within 80 columns."""
    numbers = model_figures(config)
    shape = f"{config.layers} layers, hidden {config.hidden:,}, vocabulary {config.vocab:,}"
    print_parts(
        f"{name}: {config.family}, {shape}, context {config.context:,}",
        _parameter_table(numbers),
        _cache_table(numbers, config),
        _flops_table(numbers, sparse="dsa" in config.attention),
        _training_table(numbers),
    )


def _parameter_table(numbers: Figures) -> Table:
    every, active = numbers["parameters"], numbers["active_parameters"]
    rows = table("parameters", numbers=("all", "active", "in bfloat16"))
    for part, total in every.items():
        if part == "without_embeddings":
            rows.add_section()
        if every["mtp"] if part == "with_mtp" else total:  # no row for a part that is not there
            name = part.replace("_", " ").replace("mlp", "MLP").replace("mtp", "MTP")
            rows.add_row(
                name, format_count(total), format_count(active[part]), format_bytes(2 * total)
            )
    return rows


def _cache_table(numbers: Figures, config: "ModelConfig") -> Table:
    tokens = min(config.context, CONTEXTS["128K"])
    names = {"rows": "keys and values" if config.mla is None else "latent rows"}
    names |= {"index": "index keys", "total": "total"}
    rows = table("cache in bfloat16", numbers=("a token", f"{tokens:,} tokens"))
    for part, each in numbers["cache_bytes_per_token"].items():
        if each:
            rows.add_row(names[part], f"{each:,} B", format_bytes(each * tokens))
    return rows


def _flops_table(numbers: Figures, *, sparse: bool) -> Table:
    contexts = numbers["flops_per_token"]
    letter, unit = unit_for(next(iter(contexts.values()))["weights"])
    columns = ["weights", "attention", "total"]
    if sparse:
        columns = ["weights", "attention", "indexer", "total", "dense_attention", "dense_total"]
    names = [name.replace("_", "\n") for name in columns] + ["dense /\nsparse"] * sparse
    rows = table(f"{letter}FLOPs\na token at", numbers=tuple(names))
    for context, row in contexts.items():
        cells = [f"{row[column] / unit:,.2f}" for column in columns]
        rows.add_row(context, *cells, *[f"{row['dense_over_sparse']:.2f}"] * sparse)
    return rows


def _training_table(numbers: Figures) -> Table:
    rows = table("training in float32", numbers=("a parameter", "without activations"))
    for optimizer, total in numbers["training_bytes"].items():
        rows.add_row(optimizer, f"{TRAINING[optimizer]} B", format_bytes(total))
    return rows
