"""Tables of `paddock model describe`."""

from typing import TYPE_CHECKING, Any

from rich.table import Table

from paddock import launch
from paddock.cli.tables import print_parts, table
from paddock.launch import units

if TYPE_CHECKING:
    from paddock.model import ModelConfig


def print_tables(name: str, config: "ModelConfig") -> None:
    """The figures as tables of at most 80 columns."""
    numbers = launch.describe.model_figures(config)
    shape = f"{config.layers} layers, hidden {config.hidden:,}, vocabulary {config.vocab:,}"
    print_parts(
        f"{name}: {config.family}, {shape}, context {config.context:,}",
        _parameter_table(numbers),
        _cache_table(numbers, config),
        _flops_table(numbers, sparse="dsa" in config.attention),
        _training_table(numbers),
    )


def _parameter_table(numbers: dict[str, Any]) -> Table:
    every, active = numbers["parameters"], numbers["active_parameters"]
    rows = table("parameters", numbers=("total", "active", "in bfloat16"))
    for part, total in every.items():
        if part == "without_embeddings":
            rows.add_section()
        if every["mtp"] if part == "with_mtp" else total:  # no row for a part that is missing
            name = part.replace("_", " ").replace("mlp", "MLP").replace("mtp", "MTP")
            rows.add_row(
                name,
                units.format_count(total),
                units.format_count(active[part]),
                units.format_bytes(2 * total),
            )
    return rows


def _cache_table(numbers: dict[str, Any], config: "ModelConfig") -> Table:
    tokens = min(config.context, launch.describe.CONTEXTS["128K"])
    names = {"rows": "keys and values" if config.mla is None else "latent KV"}
    names |= {"index": "index keys", "total": "total"}
    rows = table("KV cache in bfloat16", numbers=("per token", f"{tokens:,} tokens"))
    for part, each in numbers["cache_bytes_per_token"].items():
        if each:
            rows.add_row(names[part], f"{each:,} B", units.format_bytes(each * tokens))
    return rows


def _flops_table(numbers: dict[str, Any], *, sparse: bool) -> Table:
    contexts = numbers["flops_per_token"]
    letter, unit = units.unit_for(next(iter(contexts.values()))["weights"])
    columns = ["weights", "attention", "total"]
    if sparse:
        columns = ["weights", "attention", "indexer", "total", "dense_attention", "dense_total"]
    names = [name.replace("_", "\n") for name in columns] + ["dense /\nsparse"] * sparse
    rows = table(f"{letter}FLOPs\nper token at", numbers=tuple(names))
    for context, row in contexts.items():
        cells = [f"{row[column] / unit:,.2f}" for column in columns]
        rows.add_row(context, *cells, *[f"{row['dense_over_sparse']:.2f}"] * sparse)
    return rows


def _training_table(numbers: dict[str, Any]) -> Table:
    rows = table(
        "training state in float32", numbers=("per parameter", "total without activations")
    )
    for optimizer, total in numbers["training_bytes"].items():
        rows.add_row(
            optimizer, f"{launch.describe.TRAINING_BYTES[optimizer]} B", units.format_bytes(total)
        )
    return rows
