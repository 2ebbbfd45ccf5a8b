"""The verb that describes, checks and converts models."""

import json
from collections import Counter
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import track
from rich.text import Text

from paddock.cli.describe import model_figures, print_tables
from paddock.cli.errors import UserError
from paddock.cli.units import format_bytes, parse_size

if TYPE_CHECKING:
    from paddock.model import ModelConfig, Transformer
    from paddock.text import GlmVersion

TOKENIZER = "tokenizer.json"

# The same weights in other formats, and lists of them, are not worth carrying along.
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".gguf", ".h5", ".onnx", ".index.json")

app = typer.Typer(no_args_is_help=True, help="Describe, check and convert models.")


@app.command()
def describe(
    model: Annotated[str, typer.Argument(metavar="PRESET|FOLDER", help="What to describe.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the exact numbers.")] = False,
) -> None:
    """What a network weighs and costs, from its configuration alone."""
    config = _configuration(model)
    if as_json:
        shape = {"layers": config.layers, "context": config.context}
        named = {"name": model, "family": config.family, **shape, **model_figures(config)}
        typer.echo(json.dumps(named, indent=2))
    else:
        print_tables(model, config)


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
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A checkpoint.")],
) -> None:
    """Read a checkpoint tensor by tensor: names, shapes, and that every number is finite."""
    from paddock.checkpoint import (
        drop_missing_mtp,
        match_tensors,
        meta_model,
        open_checkpoint,
        read_tensors,
    )

    promised, tensors = open_checkpoint(folder)
    config = drop_missing_mtp(promised, tensors)
    plan = match_tensors(meta_model(config), tensors)
    stderr = Console(stderr=True)
    dtypes: Counter[str] = Counter()
    for piece, tensor in track(
        read_tensors(tensors, plan),
        "checking",
        total=len(plan),
        console=stderr,
        transient=True,
        disable=not stderr.is_terminal,
    ):
        scaled = f"{piece.released_name}_scale_inv" in tensors.names  # float8, multiplied out
        dtypes["float8" if scaled else str(tensor.dtype).removeprefix("torch.")] += 1
    absent = "in config.json, but not in the files" if promised.mtp else "none"
    typer.echo(f"family   {config.family}")
    typer.echo(f"tensors  {len(plan):,}")
    typer.echo(f"size     {_size_of_weights(folder)}")
    typer.echo(f"dtypes   {', '.join(f'{dtype} ({n:,})' for dtype, n in dtypes.most_common())}")
    typer.echo(f"MTP      {'present' if config.mtp else absent}")
    typer.echo("ok")


def _size_of_weights(folder: Path) -> str:
    return format_bytes(sum(file.stat().st_size for file in folder.glob("*.safetensors")))


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A folder or a .gguf file.")],
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="A folder that is not there yet.")
    ],
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="How to store numbers. Default: as config.json says; GGUF as float32."),
    ] = None,
    shard_size: Annotated[str, typer.Option(help="The largest a file may be.")] = "5GB",
    chat: Annotated[
        Literal["5", "5.1", "5.2", "5.3"] | None,
        typer.Option(
            help="Give it GLM-5's chat template of this version, and the tokens that it needs:"
            " for a model of another family that is to learn thinking and tools. Default: as it is."
        ),
    ] = None,
) -> None:
    """Write a model in the released layout, tokenizer included: all of it, or nothing."""
    from paddock.checkpoint import save_pretrained

    shard_bytes = parse_size(shard_size)
    _refuse_target(source, target)
    stderr = Console(stderr=True)
    with stderr.status(Text(f"reading {source}")):
        network, beside = _read(source, dtype)
    if chat is not None:
        network, beside = _with_chat(network, beside, chat, source)
    with stderr.status(Text(f"writing {target}")):
        save_pretrained(network, target, shard_bytes=shard_bytes, extra_files=beside)
    stored = str(network.embed.weight.dtype).removeprefix("torch.")
    typer.echo(f"{target}: {network.config.family}, {stored}, {_size_of_weights(target)}")
    typer.echo(f"beside the weights: {', '.join(sorted(beside)) or 'nothing'}")


def _refuse_target(source: Path, target: Path) -> None:
    if target.resolve() == source.resolve():
        raise UserError(f"{target}: source and target are the same")
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise UserError(f"{target}: already there; convert writes a new folder")


def _read(source: Path, dtype: str | None) -> tuple["Transformer", dict[str, bytes]]:
    """A model, and the files that belong beside its weights."""
    from paddock.checkpoint import load_gguf, load_pretrained, safetensors_folder
    from paddock.text import tokenizer_from_gguf

    if source.suffix.lower() == ".gguf":
        beside = tokenizer_from_gguf(source).files()
        return load_gguf(source, dtype or "float32"), beside
    if not source.is_dir():
        raise UserError(f"{source}: neither a checkpoint folder nor a .gguf file")
    config = safetensors_folder.read_json(source / safetensors_folder.CONFIG)
    stored = config.get("dtype", config.get("torch_dtype"))
    exact = "bfloat16" if stored == "bfloat16" else "float32"  # float16 does not fit bfloat16
    network = load_pretrained(source, dtype or exact)
    beside = {
        file.name: file.read_bytes()
        for file in safetensors_folder.list_extra_files(source)
        if not file.name.startswith(".") and not file.name.endswith(OTHER_WEIGHTS)
    }
    return network, beside


def _with_chat(
    network: "Transformer", beside: dict[str, bytes], version: "GlmVersion", source: Path
) -> tuple["Transformer", dict[str, bytes]]:
    """GLM-5's markers in the vocabulary, at first in the sense of the tokens that spelled them, and
    its template beside the weights. What was not in the vocabulary has to be learnt."""
    from paddock.model import resize_token_embeddings
    from paddock.text import SpecialToken, Tokenizer, with_chat_template

    if TOKENIZER not in beside:
        raise UserError(f"{source}: there is no {TOKENIZER} to add GLM-5's tokens to")
    old = Tokenizer(beside, name=str(source))
    if old.vocab_size > network.config.vocab:
        raise UserError(
            f"{source}: {old.vocab_size} tokens, but {network.config.vocab} rows of weights"
        )
    new = with_chat_template(old.with_special_tokens(), version)
    spellings = {
        new.special_token_ids[token]: old.encode(token, specials=False)
        for token in SpecialToken
        if token not in old.special_token_ids
    }
    return resize_token_embeddings(network, spellings, new.special_token_ids.stop_token_ids), {
        **beside,
        **new.files,
    }
