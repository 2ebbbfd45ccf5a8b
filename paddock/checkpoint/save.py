"""A network as a released folder, whole or not at all."""

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
    beside: Mapping[str, bytes] | None = None,
) -> None:
    """Write `folder` in the released layout, readable by transformers, SGLang and vLLM.

    The folder appears complete or not at all: everything is written beside it, flushed, and renamed
    into place. A checkpoint already there is replaced, whatever else it holds (tokenizer, template)
    kept; a folder that holds something else is refused, and so is a network with a NaN. `dtype`
    defaults to the network's own; `beside` are files to put beside the weights, by name.
    """
    further = dict(beside or {})
    for name in further:
        if not is_plain_filename(name) or is_checkpoint_file(name) or name.endswith(".safetensors"):
            raise ValueError(f"{name!r} is no name for a file beside the weights")
    stored = None if dtype is None else parse_dtype(dtype)
    _refuse_altered(network)
    target = Path(folder).resolve()  # through a link to the folder it means
    _refuse_strangers(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _folder_beside(target) as fresh:
        _write(network, fresh, stored, shard_bytes)
        for name, content in further.items():
            (fresh / name).write_bytes(content)
        _keep_what_else_is_there(target, fresh)
        fsync_folder(fresh)
        _replace(target, fresh)
        _flush_one(target.parent)


def _refuse_altered(network: Transformer) -> None:
    """A network whose parts were replaced, by integers or turned ones, is not what its
    configuration says: read back, it would be another."""
    plan, found = set(meta_model(network.config).state_dict()), set(network.state_dict())
    found |= {name for name, _ in network.named_buffers()}
    if strange := sorted(plan ^ found):
        raise CheckpointError(
            f"a network that was quantized or turned is not saved in the released layout: "
            f"'{strange[0]}'{'' if strange[0] in found else ' is missing'}"
        )


def _refuse_strangers(target: Path) -> None:
    """Only what a checkpoint would overwrite or keep may be in its place."""
    if target.is_file():
        raise CheckpointError(f"{target}: is a file, not a folder")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not (target / CONFIG).is_file() or "model_type" not in read_json(target / CONFIG):
        raise CheckpointError(f"{target}: holds something that is not a checkpoint; not replaced")
    for file in target.glob("*.safetensors"):
        if not is_checkpoint_file(file.name):
            raise CheckpointError(
                f"{target}: holds {file.name}, which would be lost or mistaken for a shard; "
                "not replaced"
            )


@contextmanager
def _folder_beside(target: Path) -> Iterator[Path]:
    """An empty folder that is gone after the block, or, should the process be killed inside it,
    after the next save to this target. A lock, which dies with its process, tells the two apart."""
    mark = f".{target.name}.saving-"
    for path in target.parent.iterdir():
        if path.name.startswith(mark) and _is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)
    nameless = Path(tempfile.mkdtemp(prefix=f".{target.name}.new-", dir=target.parent))
    nameless.chmod(0o755)  # mkdtemp makes private folders; a checkpoint is an ordinary one
    fresh = target.parent / (mark + nameless.name.rpartition("-")[2])
    handle = os.open(nameless, os.O_RDONLY)  # which keeps the lock until it is closed
    try:
        with suppress(OSError):  # a file system without locks keeps what a killed process left
            fcntl.flock(handle, fcntl.LOCK_EX)
        nameless.rename(fresh)  # so that nothing ever bears the mark without the lock
        yield fresh
    finally:
        os.close(handle)
        for path in (nameless, fresh):
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
    """A safetensors file, with checksums: the same bytes for the same tensors. Of a full disk the
    library says neither where nor by an OSError."""
    file.touch()
    mode = file.stat().st_mode  # as its owner wants files to be; the library makes private ones
    try:
        save_file(tensors, file, metadata={"format": "pt", **checksum_header(tensors)})
        _sort_header(file)
    except SafetensorError as error:
        raise CheckpointError(f"{file}: cannot be written: {error}") from None
    file.chmod(mode)


def _sort_header(file: Path) -> None:
    """Put the entries of a header, which the library writes in random order, into one order."""
    with file.open("r+b") as opened:
        size = int.from_bytes(opened.read(8), "little")
        found = json.loads(opened.read(size))
        found["__metadata__"] = dict(sorted(found["__metadata__"].items()))
        text = json.dumps(found, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= size, "it is what was there in another order, and spaces behind it"
        opened.seek(8)
        opened.write(text.ljust(size))


# A released name, the part of our tensor it is, and the dtype it is stored in.
Entry = tuple[str, Tensor, torch.dtype]


def _shards(network: Transformer, dtype: torch.dtype | None, limit: int) -> Iterator[list[Entry]]:
    """All released tensors in groups whose bytes stay within the limit, one tensor at least."""
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


def _keep_what_else_is_there(target: Path, fresh: Path) -> None:
    for path in target.iterdir() if target.is_dir() else ():
        if is_checkpoint_file(path.name) or (fresh / path.name).exists():
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, fresh / path.name, symlinks=True)
        else:
            shutil.copy2(path, fresh / path.name, follow_symlinks=False)


def fsync_folder(folder: Path) -> None:
    """Everything in it is on the disk, not only on its way there."""
    for path in (*folder.rglob("*"), folder):
        if not path.is_symlink():
            _flush_one(path)


def _flush_one(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(target: Path, fresh: Path) -> None:
    """Put `fresh` in the place of `target`; what was there is then in the place of `fresh`."""
    if not target.exists() or not any(target.iterdir()):
        os.replace(fresh, target)  # an empty folder may be renamed over
    elif not _exchange(fresh, target):
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old-", dir=target.parent))
        os.replace(target, old)
        try:
            os.replace(fresh, target)
        except BaseException:
            os.replace(old, target)
            raise
        os.replace(old, fresh)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step, so that a reader meets the old checkpoint or the new one and
    never neither. False where the system cannot (it is Linux's renameat2)."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0)
