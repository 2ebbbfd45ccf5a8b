"""Save a network as a checkpoint folder in the Hugging Face layout, atomically."""

import ctypes
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from paddock.checkpoint.checksum import checksum_header
from paddock.checkpoint.config_json import config_to_json
from paddock.checkpoint.load import meta_model, parse_dtype
from paddock.checkpoint.safetensors_folder import (
    CONFIG,
    INDEX,
    SHARD,
    SINGLE,
    CheckpointError,
    check_finite,
    is_checkpoint_file,
    is_plain_filename,
    read_json,
)
from paddock.checkpoint.tensor_names import map_tensor, slice_tensor
from paddock.model import Transformer

SHARD_BYTES = 5_000_000_000


def save_pretrained(
    network: Transformer,
    folder: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    extra_files: Mapping[str, bytes] | None = None,
) -> None:
    """Write `folder` in the Hugging Face layout, readable by transformers, SGLang and vLLM.

    The save is atomic: everything is written to a temporary folder next to it, synced, and renamed.
    An existing checkpoint is replaced and its other files (tokenizer, template) are kept. Raises
    CheckpointError if the folder holds anything else or the network holds a non-finite value.
    `dtype` defaults to the network's own; `extra_files` are written next to the weights, by name.
    """
    extra = dict(extra_files or {})
    for name in extra:
        if not is_plain_filename(name) or is_checkpoint_file(name) or name.endswith(".safetensors"):
            raise ValueError(f"{name!r} cannot be the name of an extra file")
    stored = None if dtype is None else parse_dtype(dtype)
    _check_unmodified(network)
    target = Path(folder).resolve()  # follow a link to the actual folder
    _check_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _temporary_folder(target) as fresh:
        _write(network, fresh, stored, shard_bytes)
        for name, content in extra.items():
            (fresh / name).write_bytes(content)
        _copy_other_files(target, fresh)
        fsync_folder(fresh)
        _replace(target, fresh)
        _fsync(target.parent)


def _check_unmodified(network: Transformer) -> None:
    """Raise CheckpointError for a quantized or rotated network, which its configuration does not
    describe: loaded again, it would be a different network."""
    expected = set(meta_model(network.config).state_dict())
    present = set(network.state_dict())
    present |= {name for name, _ in network.named_buffers()}
    if differing := sorted(expected ^ present):
        raise CheckpointError(
            f"a quantized or rotated network cannot be saved in this layout: "
            f"'{differing[0]}'{'' if differing[0] in present else ' is missing'}"
        )


def _check_replaceable(target: Path) -> None:
    """Raise CheckpointError unless the target is absent, empty or a checkpoint."""
    if target.is_file():
        raise CheckpointError(f"{target}: is a file, not a folder")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not (target / CONFIG).is_file() or "model_type" not in read_json(target / CONFIG):
        raise CheckpointError(f"{target}: is not empty and not a checkpoint; not replaced")
    for file in target.glob("*.safetensors"):
        if not is_checkpoint_file(file.name):
            raise CheckpointError(
                f"{target}: holds {file.name}, which would be lost or taken for a shard; "
                "not replaced"
            )


@contextmanager
def _temporary_folder(target: Path) -> Iterator[Path]:
    """An empty folder that is removed after the block or, if the process is killed, by the next
    save to this target. A file lock, released when its process exits, marks folders in use."""
    mark = f".{target.name}.saving-"
    for path in target.parent.iterdir():
        if path.name.startswith(mark) and _is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)
    unmarked = Path(tempfile.mkdtemp(prefix=f".{target.name}.new-", dir=target.parent))
    unmarked.chmod(0o755)  # mkdtemp creates private folders; a checkpoint has normal permissions
    fresh = target.parent / (mark + unmarked.name.rpartition("-")[2])
    handle = os.open(unmarked, os.O_RDONLY)  # holds the lock until it is closed
    try:
        with suppress(OSError):  # without file locks, leftovers of killed processes stay
            fcntl.flock(handle, fcntl.LOCK_EX)
        unmarked.rename(fresh)  # marked only once locked
        yield fresh
    finally:
        os.close(handle)
        for path in (unmarked, fresh):
            shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def _write(network: Transformer, folder: Path, dtype: torch.dtype | None, shard_bytes: int) -> None:
    config = config_to_json(network.config)
    weight_map: dict[str, str] = {}
    total = 0
    shards = list(_shards(network, dtype, shard_bytes))
    for i, shard in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else SHARD.format(i, len(shards))
        # Cloned: safetensors refuses tensors that share storage, as the experts of a stack do.
        tensors = {name: part.to("cpu", stored).clone() for name, part, stored in shard}
        for name, tensor in tensors.items():
            check_finite(tensor, name, "the network")
        write_tensors(tensors, folder / file)
        total += sum(tensor.nbytes for tensor in tensors.values())
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    config["dtype"] = str(dtype or network.embed.weight.dtype).removeprefix("torch.")
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def write_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file with checksums; the same tensors give the same bytes. Raises
    CheckpointError with the file name, for example when the disk is full."""
    file.touch()
    mode = file.stat().st_mode  # default permissions; the library creates private files
    try:
        save_file(tensors, file, metadata={"format": "pt", **checksum_header(tensors)})
        _sort_header(file)
    except SafetensorError as error:
        raise CheckpointError(f"{file}: cannot be written: {error}") from None
    file.chmod(mode)


def _sort_header(file: Path) -> None:
    """Sort the header's metadata, which the library writes in random order."""
    with file.open("r+b") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= size, "the sorted header has the same length"
        opened.seek(8)
        opened.write(text.ljust(size))


# Released name, tensor, and the dtype it is stored in.
Entry = tuple[str, Tensor, torch.dtype]


def _shards(network: Transformer, dtype: torch.dtype | None, limit: int) -> Iterator[list[Entry]]:
    """All released tensors in shards of at most `limit` bytes, at least one tensor each."""
    group: list[Entry] = []
    size, fp32 = 0, network.fp32_tensor_names()
    for name, tensor in network.state_dict().items():
        # Tensors that decide rankings keep their dtype whatever the rest is stored in.
        stored = tensor.dtype if dtype is None or name in fp32 else dtype
        for piece in map_tensor(name, tuple(tensor.shape), network.config):
            part = slice_tensor(tensor.detach(), piece)
            nbytes = part.numel() * stored.itemsize
            if group and size + nbytes > limit:
                yield group
                group, size = [], 0
            group.append((piece.released_name, part, stored))
            size += nbytes
    yield group


def _copy_other_files(target: Path, fresh: Path) -> None:
    for path in target.iterdir() if target.is_dir() else ():
        if is_checkpoint_file(path.name) or (fresh / path.name).exists():
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, fresh / path.name, symlinks=True)
        else:
            shutil.copy2(path, fresh / path.name, follow_symlinks=False)


def fsync_folder(folder: Path) -> None:
    """fsync a folder and everything in it."""
    for path in (*folder.rglob("*"), folder):
        if not path.is_symlink():
            _fsync(path)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(target: Path, fresh: Path) -> None:
    """Replace `target` by `fresh`; the old content ends up at `fresh`."""
    if not target.exists() or not any(target.iterdir()):
        os.replace(fresh, target)  # rename may replace an empty folder
    elif not _swap(fresh, target):
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old-", dir=target.parent))
        os.replace(target, old)
        try:
            os.replace(fresh, target)
        except BaseException:
            os.replace(old, target)
            raise
        os.replace(old, fresh)


def _swap(one: Path, other: Path) -> bool:
    """Swap two folders atomically, so that a reader always finds the old or the new checkpoint.
    Returns False where the system lacks Linux's renameat2."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(renameat2(cwd, os.fsencode(one), cwd, os.fsencode(other), exchange) == 0)
