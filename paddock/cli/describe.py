"""What a network weighs and costs, from its configuration alone."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from paddock.cli.numbers import count, operations, size

if TYPE_CHECKING:
    from paddock.model import ModelConfig
    from paddock.model.cost import Parameters

Figures = dict[str, Any]

CONTEXTS = {"4K": 4096, "32K": 32_768, "128K": 131_072, "200K": 200_000, "1M": 1_048_576}
# Bytes a parameter takes in training: itself, its gradient and the optimizer's moments, in float32.
TRAINING = {"AdamW": 16, "Muon": 12}


def figures(config: "ModelConfig") -> Figures:
    """All numbers, exact, in the shape of JSON. Nothing of the network is built."""
    from paddock.model.cost import active_parameters, cache_bytes, parameters

    every, cache = parameters(config), cache_bytes(config)
    return {
        "parameters": _with_totals(every),
        "active_parameters": _with_totals(active_parameters(config)),
        "bf16_bytes": 2 * every.total,
        "cache_bytes_per_token": asdict(cache) | {"total": cache.total},
        "flops_per_token": {name: _flops(config, n) for name, n in _contexts(config).items()},
        "training_bytes": {name: each * every.total for name, each in TRAINING.items()},
    }


def _with_totals(parts: "Parameters") -> Figures:
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
    from paddock.model.cost import flops

    sparse, dense = flops(config, context), flops(config, context, dense=True)
    return asdict(sparse) | {
        "total": sparse.total,
        "dense_attention": dense.attention,
        "dense_total": dense.total,
        "dense_over_sparse": dense.total / sparse.total,
    }


def print_tables(console: Console, name: str, config: "ModelConfig") -> None:
    """The same for the eye, within 80 columns."""
    numbers = figures(config)
    shape = f"{config.layers} layers, hidden {config.hidden:,}, vocabulary {config.vocab:,}"
    console.print(f"{name}: {config.family}, {shape}, context {config.context:,}", soft_wrap=True)
    console.print(_parameter_table(numbers))
    console.print(_cache_table(numbers, config))
    console.print(_flops_table(numbers, sparse="dsa" in config.attention))
    console.print(_training_table(numbers))


def _parameter_table(numbers: Figures) -> Table:
    table = _table("parameters", "all", "active", "in bfloat16")
    for part, total in numbers["parameters"].items():
        if part == "without_embeddings":
            table.add_section()
        if total:
            name = part.replace("_", " ").replace("mlp", "MLP").replace("mtp", "MTP")
            active = numbers["active_parameters"][part]
            table.add_row(name, count(total), count(active), size(2 * total))
    return table


def _cache_table(numbers: Figures, config: "ModelConfig") -> Table:
    tokens = min(config.context, CONTEXTS["128K"])
    names = {"rows": "keys and values" if config.mla is None else "latent rows"}
    names |= {"index": "index keys", "total": "total"}
    table = _table("cache in bfloat16", "a token", f"{tokens:,} tokens")
    for part, each in numbers["cache_bytes_per_token"].items():
        if each:
            table.add_row(names[part], f"{each:,} B", size(each * tokens))
    return table


def _flops_table(numbers: Figures, *, sparse: bool) -> Table:
    columns = ["weights", "attention", *(["indexer"] if sparse else []), "total"]
    compared = ["dense attention", "dense total", "dense / sparse"] if sparse else []
    table = _table("FLOPs a token at", *columns, *compared)
    for context, row in numbers["flops_per_token"].items():
        cells = [operations(row[column.replace(" ", "_")]) for column in (*columns, *compared[:2])]
        ratio = [f"{row['dense_over_sparse']:.2f}"] if sparse else []
        table.add_row(context, *cells, *ratio)
    return table


def _training_table(numbers: Figures) -> Table:
    table = _table("training in float32", "a parameter", "without activations")
    for optimizer, total in numbers["training_bytes"].items():
        table.add_row(optimizer, f"{TRAINING[optimizer]} B", size(total))
    return table


def _table(first: str, *others: str) -> Table:
    """The first column holds names, the others numbers."""
    table = Table(first, box=SIMPLE_HEAD, pad_edge=False)
    for name in others:
        table.add_column(name, justify="right")
    return table
