"""Training checkpoints: master weights, optimizer state and other state of a run.

A checkpoint is a folder `step-00000123` with the network in the Hugging Face layout (`model/`), the
optimizer's tensors (`optimizer.safetensors`) and the rest as JSON (`state.json`). Saving is atomic,
and nothing is pickled.
"""

import json
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paddock.checkpoint.load import load_pretrained, read_config
from paddock.checkpoint.safetensors_folder import CheckpointError, SafetensorsFolder, read_json
from paddock.checkpoint.save import fsync_folder, save_pretrained, write_tensors
from paddock.model import Transformer

MODEL, OPTIMIZER, STATE = "model", "optimizer.safetensors", "state.json"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingState:
    """One training checkpoint in memory."""

    network: Transformer
    optimizer: dict[str, Tensor]  # "parameter name/slot"
    extra: dict[str, Any]


def save_training_state(
    folder: Path,
    step: int,
    network: Transformer,
    optimizer: Mapping[str, Tensor],
    *,
    extra: Mapping[str, Any],
    extra_files: Mapping[str, bytes] | None = None,
) -> Path:
    """Write `folder/step-...`; `optimizer` comes from `optimizer_state_tensors`, `extra` goes to
    state.json, `extra_files` (the tokenizer) to the model folder."""
    target = folder / f"step-{step:08d}"
    fresh = folder / f".step-{step:08d}.partial"
    shutil.rmtree(fresh, ignore_errors=True)  # left by a killed run
    fresh.mkdir(parents=True)
    try:
        save_pretrained(network, fresh / MODEL, extra_files=extra_files or {})
        write_tensors(dict(optimizer), fresh / OPTIMIZER)
        (fresh / STATE).write_text(json.dumps({"step": step, **extra}))
        fsync_folder(fresh)  # the data must reach the disk before the final name does
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error}") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def load_training_state(folder: Path) -> TrainingState:
    """One checkpoint, on the CPU."""
    extra = read_json(folder / STATE)
    tensors = SafetensorsFolder(folder, [OPTIMIZER])
    optimizer = {name: tensors.read_stored(name) for name in sorted(tensors.names)}
    return TrainingState(network=load_pretrained(folder / MODEL), optimizer=optimizer, extra=extra)


def load_latest(folder: Path) -> tuple[int, TrainingState] | None:
    """The newest checkpoint of a run, to resume from, with its step; None if there is none yet.

    If it is damaged, the CheckpointError says how to resume from the newest intact one.
    """
    found = list_checkpoints(folder)
    if not found:
        return None
    step = max(found)
    try:
        return step, load_training_state(found[step])
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_recovery_hint(found)}") from None


def _recovery_hint(found: Mapping[int, Path]) -> str:
    """How to recover from a damaged newest checkpoint. Reads older ones, tensor by tensor."""
    damaged, *older = (found[step] for step in sorted(found, reverse=True))
    remove = ["rm", "-r", str(damaged)]
    for path in older:
        if _is_intact(path):
            return (
                f"{path} is intact: to resume from it, remove what is newer with "
                f"`{shlex.join(remove)}`, then run the same command again"
            )
        remove.append(str(path))
    return "no older checkpoint is intact: restore a copy, or start in another folder (--out)"


def _is_intact(folder: Path) -> bool:
    try:
        read_json(folder / STATE)
        read_config(folder / MODEL)
        for tensors in (SafetensorsFolder(folder, [OPTIMIZER]), SafetensorsFolder(folder / MODEL)):
            for name in tensors.names:
                tensors.read_stored(name)
    except CheckpointError:
        return False
    return True


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """The complete checkpoints of a run, by step, oldest first."""
    found = {}
    for path in sorted(folder.glob("step-*")) if folder.is_dir() else ():
        if match := re.fullmatch(r"step-(\d{8,})", path.name):
            found[int(match[1])] = path
    return found


def prune_checkpoints(folder: Path, *, keep_last: int, keep_every: int | None) -> None:
    """Remove all but the newest `keep_last` checkpoints and multiples of `keep_every` steps."""
    found = list_checkpoints(folder)
    for step in list(found)[:-keep_last]:
        if keep_every is None or step % keep_every:
            shutil.rmtree(found[step])


def latest_model(folder: Path) -> Path:
    """The model folder of a run's newest checkpoint, or the folder itself if it is a model."""
    if (folder / "config.json").is_file():
        return folder
    found = list_checkpoints(folder / "checkpoints")
    if not found:
        raise CheckpointError(f"{folder}: is neither a checkpoint nor a run with checkpoints")
    return found[max(found)] / MODEL


def optimizer_state_tensors(
    optimizer: torch.optim.Optimizer,
    gather: Callable[[str, Tensor], Tensor | None] = lambda _, value: value,
) -> dict[str, Tensor]:
    """State tensors of an optimizer whose groups have parameter names, as "parameter name/slot".

    `gather` returns the full tensor of a sharded state on the rank that saves it, None elsewhere.
    """
    found = {}
    for name, parameter in _named_parameters(optimizer):
        for slot, value in optimizer.state[parameter].items():
            tensor = gather(name, value.detach()) if value.ndim else value
            if tensor is not None:
                found[f"{name}/{slot}"] = tensor.cpu().contiguous()
    return found


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    shard: Callable[[str, Tensor], Tensor] = lambda _, value: value,
) -> None:
    """Restore saved state; `shard` selects the part of a tensor that this rank holds. Raises
    CheckpointError if the state belongs to other parameters."""
    left = dict(tensors)
    for name, parameter in _named_parameters(optimizer):
        for key in [key for key in left if key.rsplit("/", 1)[0] == name]:
            value = left.pop(key)
            slot = key.rsplit("/", 1)[1]
            if value.ndim:
                value = shard(name, value).to(parameter.device)
            optimizer.state[parameter][slot] = value
    if left:
        raise CheckpointError(f"optimizer state for '{next(iter(left))}' has no parameter")


def _named_parameters(optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    return [
        (name, parameter)
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    ]
