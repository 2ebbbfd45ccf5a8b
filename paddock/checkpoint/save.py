"""A network as a released folder, whole or not at all."""

import ctypes
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from paddock.checkpoint.config_json import config_to_json
from paddock.checkpoint.folder import (
    CONFIG,
    INDEX,
    SINGLE,
    CheckpointError,
    files_beside_weights,
)
from paddock.checkpoint.load import dtype_called
from paddock.checkpoint.names import pieces, place
from paddock.model import Network

SHARD_BYTES = 5_000_000_000


def save_pretrained(
    network: Network,
    folder: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `folder` in the released layout, readable by transformers, SGLang and vLLM.

    The folder appears complete or not at all: everything is written beside it, flushed, and renamed
    into place. A checkpoint already there is replaced, its other files (tokenizer, template) kept;
    a folder that holds something else is refused. `dtype` defaults to the network's own.
    """
    target = Path(folder).absolute()
    _refuse_strangers(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write(network, fresh, None if dtype is None else dtype_called(dtype), shard_bytes)
        if target.exists():
            for file in files_beside_weights(target):
                shutil.copy2(file, fresh / file.name)
        _flush(fresh)
        _replace(target, fresh)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _refuse_strangers(target: Path) -> None:
    if target.is_file():
        raise CheckpointError(f"{target}: is a file, not a folder")
    if target.is_dir() and any(target.iterdir()) and not (target / CONFIG).is_file():
        raise CheckpointError(f"{target}: holds something that is not a checkpoint; not replaced")


def _write(network: Network, folder: Path, dtype: torch.dtype | None, shard_bytes: int) -> None:
    os.chmod(folder, 0o755)  # mkdtemp makes private folders; a checkpoint is an ordinary one
    weight_map: dict[str, str] = {}
    total = 0
    shards = list(_shards(network, dtype, shard_bytes))
    for i, shard in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        # Cloned: safetensors refuses tensors that share storage, as the experts of a stack do.
        tensors = {name: part.to("cpu", stored).clone() for name, part, stored in shard}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        total += sum(tensor.nbytes for tensor in tensors.values())
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    written = dtype or network.embed.weight.dtype
    config = config_to_json(network.config) | {"dtype": str(written).removeprefix("torch.")}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


# A released name, the part of our tensor it is, and the dtype it is stored in.
Entry = tuple[str, Tensor, torch.dtype]


def _shards(network: Network, dtype: torch.dtype | None, limit: int) -> Iterator[list[Entry]]:
    """All released tensors in groups whose bytes stay within the limit, one tensor at least."""
    group: list[Entry] = []
    size = 0
    for name, tensor in network.state_dict().items():
        stored = _stored(tensor, name, dtype)
        for piece in pieces(name, tuple(tensor.shape), network.config):
            part = place(tensor.detach(), piece)
            nbytes = part.numel() * stored.itemsize
            if group and size + nbytes > limit:
                yield group
                group, size = [], 0
            group.append((piece.released, part, stored))
            size += nbytes
    yield group


def _stored(tensor: Tensor, name: str, dtype: torch.dtype | None) -> torch.dtype:
    """What decides rankings is kept in float32 whatever the rest is stored in."""
    if dtype is None or name.endswith(("router.bias", "indexer.weights.weight")):
        return tensor.dtype
    return dtype


def _flush(folder: Path) -> None:
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _replace(target: Path, fresh: Path) -> None:
    if not target.exists() or not any(target.iterdir()):
        os.replace(fresh, target)  # an empty folder may be renamed over
    elif _exchange(fresh, target):
        shutil.rmtree(fresh)
    else:
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
        os.replace(target, old)
        os.replace(fresh, target)
        shutil.rmtree(old)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step, so that a reader meets the old checkpoint or the new one and
    never neither. False where the system cannot (it is Linux's renameat2)."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0)
