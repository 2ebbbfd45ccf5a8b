"""`paddock model`: describe, check and convert models."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from paddock import launch
from paddock.cli.describe import print_tables
from paddock.launch import units

app = typer.Typer(no_args_is_help=True, help="Describe, check and convert models.")


@app.command()
def describe(
    model: Annotated[str, typer.Argument(metavar="PRESET|FOLDER", help="What to describe.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the exact numbers.")] = False,
) -> None:
    """Parameters, memory and FLOPs of a network, from its configuration alone."""
    config = launch.describe.named_config(model)
    if as_json:
        shape = {"layers": config.layers, "context": config.context}
        figures = launch.describe.model_figures(config)
        named = {"name": model, "family": config.family, **shape, **figures}
        typer.echo(json.dumps(named, indent=2))
    else:
        print_tables(model, config)


@app.command()
def check(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A checkpoint.")],
) -> None:
    """Read a checkpoint tensor by tensor: names, shapes, and that every number is finite."""
    stderr = Console(stderr=True)
    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        bar = progress.add_task("checking", total=None)
        found = launch.convert.check_model(
            folder, lambda done, total: progress.update(bar, completed=done, total=total)
        )
    typer.echo(f"family   {found.family}")
    typer.echo(f"tensors  {found.tensors:,}")
    typer.echo(f"size     {units.format_bytes(found.size_bytes)}")
    typer.echo(f"dtypes   {', '.join(f'{dtype} ({n:,})' for dtype, n in found.dtypes.items())}")
    typer.echo(f"MTP      {found.mtp}")
    typer.echo("ok")


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A folder or a .gguf file.")],
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="A folder that does not exist yet.")
    ],
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Default: as config.json says; GGUF as float32."),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Max size of a file.")] = "5GB",
    chat_template: Annotated[
        Literal["5", "5.1", "5.2", "5.3"] | None,
        typer.Option(
            help="Add GLM-5's chat template of this version, and its special tokens, to a model of"
            " another family that is to learn thinking and tools. Default: unchanged."
        ),
    ] = None,
) -> None:
    """Write a model in the released layout, tokenizer included: complete, or not at all."""
    with Console(stderr=True).status(Text("")) as status:
        made = launch.convert.convert_model(
            source,
            target,
            dtype=dtype,
            max_shard_size=max_shard_size,
            chat_template=chat_template,
            on_message=lambda text: status.update(Text(text)),
        )
    typer.echo(f"{target}: {made.family}, {made.dtype}, {units.format_bytes(made.size_bytes)}")
    typer.echo(f"extra files: {', '.join(made.extra_files) or 'none'}")
