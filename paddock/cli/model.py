"""The verb that describes, checks and converts models."""

import json
from collections import Counter
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import track

from paddock.cli.describe import figures, print_tables
from paddock.cli.errors import UserError
from paddock.cli.numbers import parse_size, size

if TYPE_CHECKING:
    from paddock.model import ModelConfig, Network

OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")

app = typer.Typer(no_args_is_help=True, help="Describe, check and convert models.")


@app.command()
def describe(
    model: Annotated[str, typer.Argument(metavar="PRESET|FOLDER", help="What to describe.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the exact numbers.")] = False,
) -> None:
    """What a network weighs and costs, from its configuration alone."""
    config = _configuration(model)
    if as_json:
        typer.echo(json.dumps({"name": model, "family": config.family} | figures(config), indent=2))
    else:
        print_tables(Console(), model, config)


def _configuration(name: str) -> "ModelConfig":
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


@app.command()
def check(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A released checkpoint.")],
) -> None:
    """Read a checkpoint tensor by tensor: names, shapes, and that every number is finite."""
    from paddock.checkpoint.folder import TensorFolder
    from paddock.checkpoint.load import (
        blueprint,
        check_names,
        read_config,
        read_pieces,
        without_absent_mtp,
    )

    promised = read_config(folder)
    tensors = TensorFolder(folder)
    config = without_absent_mtp(promised, tensors)
    plan = check_names(blueprint(config), tensors)
    dtypes: Counter[str] = Counter()
    stderr = Console(stderr=True)
    read = read_pieces(tensors, plan)
    quiet = not stderr.is_terminal
    for piece, tensor in track(read, "checking", len(plan), console=stderr, disable=quiet):
        scaled = f"{piece.released}_scale_inv" in tensors.names
        dtypes["float8" if scaled else str(tensor.dtype).removeprefix("torch.")] += 1
    mtp = "present" if config.mtp else "promised, but absent" if promised.mtp else "none"
    typer.echo(f"family   {config.family}")
    typer.echo(f"tensors  {len(plan):,}")
    typer.echo(f"size     {size(_bytes_of_weights(folder))}")
    typer.echo(f"dtypes   {', '.join(f'{name} ({n:,})' for name, n in dtypes.most_common())}")
    typer.echo(f"MTP      {mtp}")
    typer.echo("ok")


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A checkpoint folder or a .gguf file.")],
    target: Annotated[Path, typer.Argument(help="The folder to write; must not exist yet.")],
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="What to store; by default what SOURCE does, float32 for GGUF."),
    ] = None,
    shard_bytes: Annotated[
        int,
        typer.Option("--shard-size", parser=parse_size, metavar="SIZE", help="Of one file."),
    ] = "5GB",  # type: ignore[assignment]
) -> None:
    """Write a model in the released layout, its tokenizer beside it: all of it, or nothing."""
    from paddock.checkpoint import save_pretrained

    _refuse_target(source, target)
    with Console(stderr=True).status(f"reading {source}"):
        beside = _beside(source)
        network = _network(source, dtype)
    with Console(stderr=True).status(f"writing {target}"):
        save_pretrained(network, target, shard_bytes=shard_bytes, beside=beside)
    ...
