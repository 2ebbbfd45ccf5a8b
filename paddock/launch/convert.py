"""Checkpoints checked tensor by tensor, and converted to the released layout."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paddock.launch.errors import UserError
from paddock.launch.settings import StrPath
from paddock.launch.units import parse_size

if TYPE_CHECKING:
    from paddock.model import Transformer
    from paddock.text import GlmVersion

TOKENIZER = "tokenizer.json"

# The same weights in other formats, and indexes of them, are not copied.
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".gguf", ".h5", ".onnx", ".index.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """What a checkpoint contains."""

    family: str
    tensors: int
    size_bytes: int
    dtypes: dict[str, int]  # number of tensors by dtype, most frequent first
    mtp: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedModel:
    """A checkpoint that was written."""

    family: str
    dtype: str
    size_bytes: int
    extra_files: tuple[str, ...]


def check_model(
    folder: StrPath, on_tensor: Callable[[int, int], None] | None = None
) -> CheckpointReport:
    """Read a checkpoint and check names, shapes, and that every number is finite.

    `on_tensor` gets the number of tensors read and their total. Raises CheckpointError.
    """
    from paddock.checkpoint import (
        drop_missing_mtp,
        match_tensors,
        meta_model,
        open_checkpoint,
        read_tensors,
    )

    promised, tensors = open_checkpoint(Path(folder))
    config = drop_missing_mtp(promised, tensors)
    plan = match_tensors(meta_model(config), tensors)
    dtypes: Counter[str] = Counter()
    for number, (piece, tensor) in enumerate(read_tensors(tensors, plan), start=1):
        scaled = f"{piece.released_name}_scale_inv" in tensors.names  # float8, dequantized on read
        dtypes["float8" if scaled else str(tensor.dtype).removeprefix("torch.")] += 1
        if on_tensor is not None:
            on_tensor(number, len(plan))
    missing = "in config.json, but not in the files" if promised.mtp else "none"
    return CheckpointReport(
        family=config.family,
        tensors=len(plan),
        size_bytes=_weight_bytes(Path(folder)),
        dtypes=dict(dtypes.most_common()),
        mtp="present" if config.mtp else missing,
    )


def convert_model(
    source: StrPath,
    target: StrPath,
    *,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    chat_template: "GlmVersion | None" = None,
    on_message: Callable[[str], None] | None = None,
) -> ConvertedModel:
    """Write a checkpoint folder or .gguf file in the released layout: complete, or not at all.

    By default numbers are stored as config.json says, those of GGUF as float32. `chat_template`
    adds GLM-5's template of that version and its special tokens. Raises UserError if `target`
    exists.
    """
    from paddock.checkpoint import save_pretrained

    say = on_message or (lambda _: None)
    read_from, write_to = Path(source), Path(target)
    shard_bytes = parse_size(max_shard_size)
    _check_target(read_from, write_to)
    say(f"reading {source}")
    network, extra_files = _read(read_from, dtype)
    if chat_template is not None:
        network, extra_files = _add_chat_template(network, extra_files, chat_template, read_from)
    say(f"writing {target}")
    save_pretrained(network, write_to, shard_bytes=shard_bytes, extra_files=extra_files)
    return ConvertedModel(
        family=network.config.family,
        dtype=str(network.embed.weight.dtype).removeprefix("torch."),
        size_bytes=_weight_bytes(write_to),
        extra_files=tuple(sorted(extra_files)),
    )


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _check_target(source: Path, target: Path) -> None:
    if target.resolve() == source.resolve():
        raise UserError(f"{target}: source and target are the same")
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise UserError(f"{target}: already exists; convert writes a new folder")


def _read(source: Path, dtype: str | None) -> tuple["Transformer", dict[str, bytes]]:
    """A model, and the files to store next to its weights."""
    from paddock.checkpoint import load_gguf, load_pretrained, safetensors_folder
    from paddock.text import tokenizer_from_gguf

    if source.suffix.lower() == ".gguf":
        extra_files = tokenizer_from_gguf(source).files()
        return load_gguf(source, dtype or "float32"), extra_files
    if not source.is_dir():
        raise UserError(f"{source}: neither a checkpoint folder nor a .gguf file")
    config = safetensors_folder.read_json(source / safetensors_folder.CONFIG)
    stored = config.get("dtype", config.get("torch_dtype"))
    exact = "bfloat16" if stored == "bfloat16" else "float32"  # float16 does not fit bfloat16
    network = load_pretrained(source, dtype or exact)
    extra_files = {
        file.name: file.read_bytes()
        for file in safetensors_folder.list_extra_files(source)
        if not file.name.startswith(".") and not file.name.endswith(OTHER_WEIGHTS)
    }
    return network, extra_files


def _add_chat_template(
    network: "Transformer", extra_files: dict[str, bytes], version: "GlmVersion", source: Path
) -> tuple["Transformer", dict[str, bytes]]:
    """GLM-5's special tokens in the vocabulary and its template next to the weights.

    A new token's embedding starts as the mean of those that spelled it before; it must be trained.
    """
    from paddock.model import resize_token_embeddings
    from paddock.text import SpecialToken, Tokenizer, with_chat_template

    if TOKENIZER not in extra_files:
        raise UserError(f"{source}: no {TOKENIZER} to add GLM-5's tokens to")
    old = Tokenizer(extra_files, name=str(source))
    if old.vocab_size > network.config.vocab:
        raise UserError(
            f"{source}: the tokenizer has {old.vocab_size} tokens, but the network only "
            f"{network.config.vocab} embedding rows"
        )
    new = with_chat_template(old.with_special_tokens(), version)
    spellings = {
        new.special_token_ids[token]: old.encode(token, specials=False)
        for token in SpecialToken
        if token not in old.special_token_ids
    }
    return resize_token_embeddings(network, spellings, new.special_token_ids.stop_token_ids), {
        **extra_files,
        **new.files,
    }
