"""Weight loaders: validate new weights, stage them, and copy them into the serving model."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from paddock.checkpoint import (
    CheckpointError,
    load_weights,
    meta_model,
    safetensors_folder,
    tensor_names,
    weight_destinations,
)
from paddock.engine.engine import Engine
from paddock.model import packed

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in safetensors_folder.FLOAT_DTYPES}


class TensorMetadata(Protocol):
    """Name (as released), dtype and shape of a tensor about to be broadcast."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdateStats:
    """Statistics of one finished weight update."""

    version: int
    tensors: int
    bytes: int
    paused_s: float  # time without steps: the copy only, not the transfer before it


class WeightReceiver:
    """The serving model's tensors by released name: validates new values and writes them."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.config = engine, engine.config
        self.tensors = engine.run_between_steps(weight_destinations).result()
        self.device = engine.run_between_steps(lambda n: n.device).result()
        self._meta_model = meta_model(engine.config)

    def validate(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Check names, shapes, dtypes and values; returns the tensors that the model has.

        Raises CheckpointError.
        """
        for name, tensor in tensors.items():
            if tensor.dtype not in safetensors_folder.FLOAT_DTYPES:
                raise CheckpointError(
                    f"tensor '{name}' is {tensor.dtype}; expected one of {[*DTYPES]}"
                )
        # Checked by loading into a meta model, which copies nothing.
        load_weights(self._meta_model, tensors, whole=False)
        return {name: tensor for name, tensor in tensors.items() if name in self.tensors}

    def read(self, name: str) -> Tensor:
        """The served values: the tensor itself, or a copy of a packed one."""
        tensor = self.tensors[name]
        return tensor.read() if isinstance(tensor, packed.PackedTensor) else tensor

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy into the model; call it on the engine thread, between two steps."""
        with torch.no_grad():
            for name, tensor in tensors.items():
                self.tensors[name].copy_(tensor)
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def missing(self, names: set[str]) -> list[str]:
        """Tensors that a full version lacks. The MTP layer may be absent as a whole."""
        with_mtp = any(tensor_names.is_mtp(name, self.config) for name in names)
        required = (
            name for name in self.tensors if with_mtp or not tensor_names.is_mtp(name, self.config)
        )
        return [name for name in required if name not in names]

    def allocate_buffers(
        self, tensors: Sequence[TensorMetadata], device: torch.device
    ) -> list[Tensor]:
        """Receive buffers for a broadcast; rejects what cannot be weights of this model."""
        dtypes = [DTYPES.get(each.dtype.removeprefix("torch.")) for each in tensors]
        for each, dtype in zip(tensors, dtypes, strict=True):
            if dtype is None:
                raise CheckpointError(
                    f"tensor '{each.name}' is {each.dtype}; expected one of {[*DTYPES]}"
                )
            if any(size < 0 for size in each.shape):
                raise CheckpointError(f"tensor '{each.name}' cannot have shape {each.shape}")
        incoming = sum(prod(each.shape) for each in tensors)
        known = sum(prod(tensor.shape) for tensor in self.tensors.values())
        if incoming > 2 * known:  # tied tensors may be sent twice, but nothing more often
            raise CheckpointError(f"{incoming:,} values are too many: the model has {known:,}")
        rows = zip(tensors, dtypes, strict=True)
        return [torch.empty(each.shape, dtype=dtype, device=device) for each, dtype in rows]


class StagedWeightLoader:
    """Stages a weight update in a second copy, then writes it between two steps."""

    def __init__(self, receiver: WeightReceiver) -> None:
        self.names: set[str] = set()
        self.running = 0  # running requests when the update was applied
        self.paused_s = 0.0
        self._bytes = 0
        self._receiver = receiver
        self._staged: dict[str, Tensor] = {}

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Validate and stage some tensors, by released name."""
        for name, tensor in self._receiver.validate(tensors).items():
            self.add_validated(name, tensor)

    def add_validated(self, name: str, tensor: Tensor) -> None:
        """Stage a tensor that is already validated. It is copied: the trainer may reuse its buffer
        and a memory-mapped file may be overwritten."""
        self._stage(name, self._converted(name, tensor, copy=True))

    def add_without_copy(self, tensors: Mapping[str, Tensor]) -> None:
        """As `add`, without a copy; the tensors must not change until they are applied."""
        for name, tensor in self._receiver.validate(tensors).items():
            self._stage(name, self._converted(name, tensor, copy=False))

    def _converted(self, name: str, tensor: Tensor, *, copy: bool) -> Tensor:
        receiver = self._receiver
        return tensor.detach().to(receiver.device, receiver.tensors[name].dtype, copy=copy)

    def _stage(self, name: str, staged: Tensor) -> None:
        if name in self.names:
            raise CheckpointError(f"tensor '{name}' was sent twice")
        self.names.add(name)
        self._staged[name] = staged
        self._bytes += staged.nbytes

    def write(self) -> None:
        """Write the staged tensors into the model, on the engine thread."""
        clock = self._receiver.engine.clock
        started = clock()
        self._receiver.write(self._staged)
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
    """Writes tensors as they arrive, without a second copy; the engine is paused meanwhile."""

    def _stage(self, name: str, staged: Tensor) -> None:
        super()._stage(name, staged)
        self._receiver.engine.run_between_steps(lambda _: self.write()).result()

    @contextmanager
    def staging(self) -> Iterator[StagedWeightLoader]:
        engine = self._receiver.engine
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
                f"{error}; {len(self.names)} earlier tensors stay; the engine is paused: send a "
                "full version before resuming it"
            ) from error
        if not was_paused:
            engine.resume()
        self.paused_s = engine.clock() - started
