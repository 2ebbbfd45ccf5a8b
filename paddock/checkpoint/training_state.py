"""The state of a training run: exact weights, optimizer, and whatever else must come back.

A checkpoint is a folder `step-00000123` with the network in the released layout (`model/`), the
optimizer's tensors (`optimizer.safetensors`) and the rest as JSON (`state.json`). It appears whole
or not at all, and holds no pickle.
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
    network: Transformer
    optimizer: dict[str, Tensor]  # "parameter name/slot"
    extra: dict[str, Any]


def save_training_state(
    folder: Path,
    step: int,
    network: Transformer,
    optimizer: Mapping[str, Tensor],
    *,
    facts: Mapping[str, Any],
    beside: Mapping[str, bytes] | None = None,
) -> Path:
    """Write `folder/step-...`; `optimizer` is what `optimizer_tensors` found, `beside` are files
    for the model folder, such as the tokenizer."""
    target = folder / f"step-{step:08d}"
    fresh = folder / f".step-{step:08d}.partial"
    shutil.rmtree(fresh, ignore_errors=True)  # of a run that was killed
    fresh.mkdir(parents=True)
    try:
        save_pretrained(network, fresh / MODEL, beside=beside or {})
        write_tensors(dict(optimizer), fresh / OPTIMIZER)
        (fresh / STATE).write_text(json.dumps({"step": step, **facts}))
        fsync_folder(fresh)  # a name that outlives a power cut must not outlive what it names
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error}") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def load_training_state(folder: Path) -> TrainingState:
    """One checkpoint, on the CPU."""
    facts = read_json(folder / STATE)
    tensors = SafetensorsFolder(folder, [OPTIMIZER])
    optimizer = {name: tensors.read_stored(name) for name in sorted(tensors.names)}
    return TrainingState(network=load_pretrained(folder / MODEL), optimizer=optimizer, extra=facts)


def load_latest(folder: Path) -> tuple[int, TrainingState] | None:
    """The newest checkpoint of a run, to go on from, with its step; None where there is none yet.

    A damaged one is a CheckpointError that says how to go on from the newest whole one.
    """
    found = list_checkpoints(folder)
    if not found:
        return None
    step = max(found)
    try:
        return step, load_training_state(found[step])
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_way_out(found)}") from None


def _way_out(found: Mapping[int, Path]) -> str:
    """What to do about a damaged newest checkpoint. Older ones are read, one tensor at a time."""
    damaged, *older = (found[step] for step in sorted(found, reverse=True))
    remove = ["rm", "-r", str(damaged)]
    for path in older:
        if _is_whole(path):
            return (
                f"{path} is whole: to go on from it, remove what is newer with "
                f"`{shlex.join(remove)}`, then call the same command again"
            )
        remove.append(str(path))
    return "no older checkpoint is whole: put a copy back, or begin in another folder (--out)"


def _is_whole(folder: Path) -> bool:
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
    """The whole checkpoints of a run, by step, oldest first."""
    found = {}
    for path in sorted(folder.glob("step-*")) if folder.is_dir() else ():
        if match := re.fullmatch(r"step-(\d{8,})", path.name):
            found[int(match[1])] = path
    return found


def prune_checkpoints(folder: Path, *, last: int, forever: int | None) -> None:
    """Remove all but the newest `last` checkpoints and multiples of `forever` steps."""
    found = list_checkpoints(folder)
    for step in list(found)[:-last]:
        if forever is None or step % forever:
            shutil.rmtree(found[step])


def latest_model(folder: Path) -> Path:
    """The network of a run folder's newest checkpoint, or the folder itself if it is a network."""
    if (folder / "config.json").is_file():
        return folder
    found = list_checkpoints(folder / "checkpoints")
    if not found:
        raise CheckpointError(f"{folder}: neither a checkpoint nor a run with checkpoints")
    return found[max(found)] / MODEL


def optimizer_state_tensors(
    optimizer: torch.optim.Optimizer,
    whole: Callable[[str, Tensor], Tensor | None] = lambda _, value: value,
) -> dict[str, Tensor]:
    """All state of an optimizer whose groups know their parameters' names.

    `whole` makes a parameter's sharded state whole, where this rank is the one to have it.
    """
    found = {}
    for name, parameter in _named(optimizer):
        for slot, value in optimizer.state[parameter].items():
            tensor = whole(name, value.detach()) if value.ndim else value
            if tensor is not None:
                found[f"{name}/{slot}"] = tensor.cpu().contiguous()
    return found


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    part: Callable[[str, Tensor], Tensor] = lambda _, value: value,
) -> None:
    """Put saved state back, the part of it that this rank holds; CheckpointError if it belongs to
    other parameters."""
    left = dict(tensors)
    for name, parameter in _named(optimizer):
        for key in [key for key in left if key.rsplit("/", 1)[0] == name]:
            value = left.pop(key)
            slot = key.rsplit("/", 1)[1]
            if value.ndim:
                value = part(name, value).to(parameter.device)
            optimizer.state[parameter][slot] = value
    if left:
        raise CheckpointError(f"optimizer state for '{next(iter(left))}' has no parameter")


def _named(optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    return [
        (name, parameter)
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    ]
