"""Weight sync: updates from a trainer into a serving network.

Tensors have their released names, so that any trainer can send them whatever the layout of the
receiving network. A `WeightUpdate` holds some or all of them; serialized, it is a safetensors file
whose header has the version and a checksum of every tensor. Pickle is never read.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from paddock.checkpoint.safetensors_folder import CheckpointError, check_finite
from paddock.checkpoint.tensor_names import TensorMapping, is_redundant, map_tensor, slice_tensor
from paddock.model import Transformer, packed

VERSION, SUM = "version", "sum."  # header keys


@dataclass(frozen=True, slots=True, eq=False)
class WeightUpdate:
    """Tensors of one version of the weights, by released name."""

    version: int
    tensors: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        if self.version < 0:
            raise CheckpointError(f"version {self.version} is negative")


class WeightPublisher(Protocol):
    """Sends a trainer's weights to engines, in this process or remote."""

    def __call__(self, updates: Iterable[WeightUpdate], /) -> None:
        """Send the updates; returns when new requests are served with these weights."""


def iter_released_tensors(network: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Every released tensor of the network, as views."""
    for name, tensor in network.state_dict().items():
        for piece in map_tensor(name, tuple(tensor.shape), network.config):
            yield piece.released_name, slice_tensor(tensor.detach(), piece)


def weight_destinations(network: Transformer) -> dict[str, Tensor | packed.PackedTensor]:
    """Where new weights are written, by released name: views of tensors, or packed tensors."""
    packed_by_name = dict(packed.packed_tensors(network))
    if not packed_by_name:
        return dict(iter_released_tensors(network))
    plain = {
        name: tensor.detach()
        for name, tensor in (*network.named_parameters(), *network.named_buffers())
    }
    found: dict[str, Tensor | packed.PackedTensor] = {}
    for name, tensor in plain.items():
        for piece in map_tensor(name, tuple(tensor.shape), network.config):
            found[piece.released_name] = slice_tensor(tensor, piece)
    for name, packed_tensor in packed_by_name.items():
        for piece in map_tensor(name, packed_tensor.shape, network.config):
            found[piece.released_name] = packed_tensor.piece(piece.expert, piece.rows)
    return found


@torch.no_grad()
def load_weights(network: Transformer, tensors: Mapping[str, Tensor], *, whole: bool) -> None:
    """Copy tensors into the network. With `whole`, every tensor of the network must be present.

    Everything is checked before anything is written: an unknown name, a wrong shape or a non-finite
    value raises CheckpointError and leaves the network unchanged. Redundant tensors of released
    checkpoints (see `is_redundant`) are ignored.
    """
    state = network.state_dict()
    known = _released_mappings(network, state)
    plan = []
    for name, tensor in tensors.items():
        if name not in known:
            if is_redundant(name, network.config):
                continue
            raise CheckpointError(f"unexpected tensor '{name}'")
        target = slice_tensor(state[known[name].model_name], known[name])
        if target.shape != tensor.shape:
            raise CheckpointError(
                f"tensor '{name}' has shape {tuple(tensor.shape)}, expected {tuple(target.shape)}"
            )
        check_finite(tensor, name, "received")
        plan.append((target, tensor))
    missing = sorted(known.keys() - tensors.keys()) if whole else []
    if missing:
        raise CheckpointError(f"tensor '{missing[0]}' is missing ({len(missing)} missing in total)")
    for target, tensor in plan:
        target.copy_(tensor)


def _released_mappings(
    network: Transformer, tensors_by_name: Mapping[str, Tensor]
) -> dict[str, TensorMapping]:
    return {
        piece.released_name: piece
        for name, tensor in tensors_by_name.items()
        for piece in map_tensor(name, tuple(tensor.shape), network.config)
    }


def tensor_digest(tensor: Tensor) -> str:
    """Digest of a tensor's dtype, shape and bytes.

    >>> tensor_digest(torch.zeros(2)) == tensor_digest(torch.zeros(2, 1))
    False
    """
    found = blake2b(f"{tensor.dtype} {tuple(tensor.shape)} ".encode(), digest_size=16)
    flat = tensor.detach().contiguous().flatten().cpu()
    found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()


def weight_digests(network: Transformer) -> dict[str, str]:
    """Digest of every released tensor; the same for networks with the same weights."""
    return {name: tensor_digest(tensor) for name, tensor in iter_released_tensors(network)}


def serialize_update(update: WeightUpdate) -> bytes:
    """The update as the bytes of a safetensors file."""
    # Cloned: safetensors refuses tensors that share storage, as the experts of a stack do.
    tensors = {name: t.detach().cpu().contiguous().clone() for name, t in update.tensors.items()}
    header = {f"{SUM}{name}": tensor_digest(tensor) for name, tensor in tensors.items()}
    return save(tensors, metadata={VERSION: str(update.version), **header})


def deserialize_update(data: bytes, version: int | None = None) -> WeightUpdate:
    """The update that `serialize_update` wrote, checksums verified; or any safetensors file, whose
    header needs no version if `version` is given. Raises CheckpointError if it is invalid."""
    try:
        header = _header(data)
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"not a safetensors file (pickle is never read): {str(error)[:200]}"
        ) from None
    for name, tensor in tensors.items():
        expected = header.get(SUM + name)
        if expected is not None and tensor_digest(tensor) != expected:
            raise CheckpointError(f"tensor '{name}' was corrupted in transit: its checksum differs")
    if version is None:
        version_text = header.get(VERSION, "")
        if not version_text.isdecimal():
            raise CheckpointError("the weight update has no version in its header")
        version = int(version_text)
    return WeightUpdate(version, tensors)


def _header(data: bytes) -> dict[str, str]:
    """The metadata of a safetensors file in memory, which the library reads only from disk."""
    size = int.from_bytes(data[:8], "little")
    if not 2 <= size <= len(data) - 8:
        raise ValueError("the header is longer than the file")
    found = json.loads(data[8 : 8 + size]).get("__metadata__", {})
    return {str(key): str(value) for key, value in found.items()}
