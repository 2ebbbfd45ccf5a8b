"""Weights on their way into a network that serves: checked, gathered, then written at once."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from paddock.checkpoint import (
    CheckpointError,
    iter_released_tensors,
    load_weights,
    meta_model,
    safetensors_folder,
    tensor_names,
)
from paddock.engine.engine import Engine

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in safetensors_folder.FLOAT_DTYPES}


class TensorMetadata(Protocol):
    """A tensor that is about to be broadcast, by its released name."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdateStats:
    """One change of weights, once it is done."""

    version: int
    tensors: int
    bytes: int
    paused_s: float  # in which no step could be taken: the copy, not what came before it


class WeightReceiver:
    """Where each released tensor lies in the network that serves, and what may be put there."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.config = engine, engine.config
        self.tensors: dict[str, Tensor] = engine.run_between_steps(
            lambda n: dict(iter_released_tensors(n))
        ).result()
        self.device = next(iter(self.tensors.values())).device
        self._blueprint = meta_model(engine.config)

    def validate(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those that have a place, once all were found to be right."""
        for name, tensor in tensors.items():
            if tensor.dtype not in safetensors_folder.FLOAT_DTYPES:
                raise CheckpointError(f"tensor '{name}' is {tensor.dtype}; known: {[*DTYPES]}")
        # The wire's own checks; what is copied into a blueprint goes nowhere.
        load_weights(self._blueprint, tensors, whole=False)
        return {name: tensor for name, tensor in tensors.items() if name in self.tensors}

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """On the engine's thread, between two steps."""
        with torch.no_grad():
            for name, tensor in tensors.items():
                self.tensors[name].copy_(tensor)
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def missing(self, names: set[str]) -> list[str]:
        """What a whole version lacks; the MTP layer only if part of it is there."""
        whole = any(tensor_names.is_mtp(name, self.config) for name in names)
        wanted = (
            name for name in self.tensors if whole or not tensor_names.is_mtp(name, self.config)
        )
        return [name for name in wanted if name not in names]

    def allocate_buffers(
        self, tensors: Sequence[TensorMetadata], device: torch.device
    ) -> list[Tensor]:
        """Memory for what is about to come, if it could be weights of this network at all."""
        dtypes = [DTYPES.get(each.dtype.removeprefix("torch.")) for each in tensors]
        for each, dtype in zip(tensors, dtypes, strict=True):
            if dtype is None:
                raise CheckpointError(f"tensor '{each.name}' is {each.dtype}; known: {[*DTYPES]}")
            if any(size < 0 for size in each.shape):
                raise CheckpointError(f"tensor '{each.name}' cannot have shape {each.shape}")
        coming = sum(prod(each.shape) for each in tensors)
        known = sum(place.numel() for place in self.tensors.values())
        if coming > 2 * known:  # a checkpoint may carry some twice, but not more
            raise CheckpointError(f"{coming:,} numbers are too many: the network has {known:,}")
        rows = zip(tensors, dtypes, strict=True)
        return [torch.empty(each.shape, dtype=dtype, device=device) for each, dtype in rows]


class StagedWeightLoader:
    """Weights on their way in, gathered beside those that serve."""

    def __init__(self, places: WeightReceiver) -> None:
        self.names: set[str] = set()
        self.running = 0  # requests, when it began to serve
        self.paused_s = 0.0
        self._bytes = 0
        self._places = places
        self._staged: dict[str, Tensor] = {}

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Some more tensors, by released name."""
        for name, tensor in self._places.validate(tensors).items():
            self.add_validated(name, tensor)

    def add_validated(self, name: str, tensor: Tensor) -> None:
        """One more, known to be right. It is copied: a trainer may gather the next in the same
        memory, a file may be written over."""
        self._keep(name, tensor.detach().to(self._places.tensors[name], copy=True))

    def add_without_copy(self, tensors: Mapping[str, Tensor]) -> None:
        """As `add`, without a copy, of tensors that nobody changes before they serve."""
        for name, tensor in self._places.validate(tensors).items():
            self._keep(name, tensor.detach().to(self._places.tensors[name]))

    def _keep(self, name: str, staged: Tensor) -> None:
        if name in self.names:
            raise CheckpointError(f"tensor '{name}' came twice")
        self.names.add(name)
        self._staged[name] = staged
        self._bytes += staged.nbytes

    def write(self) -> None:
        """What is gathered goes to its place, on the engine's thread."""
        clock = self._places.engine.clock
        started = clock()
        self._places.write(self._staged)
        self._staged.clear()
        self.paused_s += clock() - started

    def stats(self, version: int) -> WeightUpdateStats:
        return WeightUpdateStats(
            version=version, tensors=len(self.names), bytes=self._bytes, paused_s=self.paused_s
        )

    @contextmanager
    def staging(self) -> Iterator["StagedWeightLoader"]:
        yield self


class InPlaceWeightLoader(StagedWeightLoader):
    """The same without a second copy: written as it comes, while the engine pauses."""

    def _keep(self, name: str, staged: Tensor) -> None:
        super()._keep(name, staged)
        self._places.engine.run_between_steps(lambda _: self.write()).result()

    @contextmanager
    def staging(self) -> Iterator[StagedWeightLoader]:
        engine = self._places.engine
        was_paused, started = engine.stats().paused, engine.clock()
        engine.pause("in_place")
        try:
            yield self
        except Exception as error:
            if not self.names and not was_paused:
                engine.resume()
            if not self.names or not isinstance(error, ValueError):
                raise
            raise CheckpointError(
                f"{error}; {len(self.names)} tensors came before it and stay; the engine is paused "
                "and may go on after a whole version has come"
            ) from error
        if not was_paused:
            engine.resume()
        self.paused_s = engine.clock() - started
