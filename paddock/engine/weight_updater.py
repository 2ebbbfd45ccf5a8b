"""Weight sync: update a serving engine from disk, tensors, a broadcast group or a trainer.

New weights are validated (names, shapes, values, checksums) and staged on the engine's device and
dtype next to the serving ones; only then, between two steps, are they copied over them. So the
pause is one on-device copy, and an invalid update leaves the old weights in service, bitwise
identical. It costs memory for a second copy of what a version changes.

A weight update arrives in one of two ways:

- **full version** (`update_from_disk`, `update_from_model`, `stage_update`, `weight_publisher`):
  all tensors must be present before any is applied. Only the MTP layer may be absent, as a whole;
  the engine then keeps the one it has.
- **bucket by bucket** (`update_from_tensor`, `update_from_distributed`), each call with some
  tensors, for trainers that pause the engine first. A bucket is applied when its call returns.
  While the engine stays paused, replaced values are kept until all buckets have arrived; if one is
  rejected, the earlier ones are rolled back. On a running engine every bucket is its own version.

With `in_place_buckets` there is no second copy: tensors are written as they arrive, the engine is
paused meanwhile, and stays paused if the update is never completed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock

import torch
from torch import Tensor

from paddock.checkpoint import (
    CheckpointError,
    WeightPublisher,
    WeightUpdate,
    deserialize_update,
    drop_missing_mtp,
    iter_released_tensors,
    match_tensors,
    meta_model,
    open_checkpoint,
    read_tensors,
    tensor_digest,
)
from paddock.engine.engine import Engine
from paddock.engine.engine_loop import PauseMode
from paddock.engine.weight_loader import (
    InPlaceWeightLoader,
    StagedWeightLoader,
    TensorMetadata,
    WeightReceiver,
    WeightUpdateStats,
)
from paddock.model import ModelConfig, Transformer
from paddock.parallel import Rendezvous, WeightBroadcastError, WeightBroadcastGroup

# Configuration fields that do not change the meaning of the tensors.
IGNORED_CONFIG_FIELDS = {"init", "mtp", "context", "eos", "bos", "pad"}


@dataclass(slots=True)
class _Buckets:
    """Buckets of a version that is not complete yet."""

    version: int  # before the first bucket
    steps: int  # of the engine so far; if it changes, the buckets were served
    names: set[str] = field(default_factory=set)
    replaced: dict[str, Tensor] = field(default_factory=dict)


class EngineWeightUpdater:
    """Weight updates of one engine. One update at a time; each blocks until it is applied, returns
    how many requests were running and raises a ValueError if the update is invalid."""

    def __init__(
        self, engine: Engine, *, in_place_buckets: bool = False, timeout_s: float = 300.0
    ) -> None:
        """`timeout_s` limits every wait for the peers of a broadcast group."""
        self.engine, self.in_place_buckets, self.timeout_s = engine, in_place_buckets, timeout_s
        self.last_update: WeightUpdateStats | None = None
        self._receiver = WeightReceiver(engine)
        self._groups: dict[str, WeightBroadcastGroup] = {}
        self._buckets: _Buckets | None = None
        self._update_lock = RLock()

    # --- full versions ----------------------------------------------------------------------------

    def update_from_disk(self, folder: str | Path, *, version: int, mode: PauseMode) -> int:
        """Load a checkpoint folder in the released layout, of a model with the same config."""
        mla = self.engine.config.mla
        eps = mla.norm_eps if mla is not None else None  # may have been overridden on load
        config, stored = open_checkpoint(Path(folder), latent_norm_eps=eps)
        _check_same_model(config, self.engine.config, folder)
        plan = match_tensors(meta_model(drop_missing_mtp(config, stored)), stored)
        with self.stage_update(version, mode) as new:
            for piece, tensor in read_tensors(stored, plan):
                new.add_validated(piece.released_name, tensor)
        return new.running

    def update_from_model(self, network: Transformer, *, version: int, mode: PauseMode) -> int:
        """Copy from another model in this process, such as the one being trained."""
        with self.stage_update(version, mode) as new:
            new.add_without_copy(dict(iter_released_tensors(network)))
        return new.running

    def weight_publisher(self, mode: PauseMode = "in_place") -> WeightPublisher:
        """A function with which a trainer in this process publishes the updates of one version."""

        def publish(updates: Iterable[WeightUpdate]) -> None:
            rest = iter(updates)
            first = next(rest, None)
            if first is None:
                raise CheckpointError("nothing was published: there is no weight update")
            with self.stage_update(first.version, mode) as new:
                new.add(first.tensors)
                for update in rest:
                    if update.version != first.version:
                        raise CheckpointError(
                            f"version {update.version} among those of {first.version}"
                        )
                    new.add(update.tensors)

        return publish

    @contextmanager
    def stage_update(self, version: int, mode: PauseMode) -> Iterator[StagedWeightLoader]:
        """Stage a full version in several parts; it is applied when the block ends, or not at all
        if something is missing or invalid."""
        if version < 0:
            raise CheckpointError(f"version must not be negative, got {version}")
        with self._update_lock:
            kind = InPlaceWeightLoader if self.in_place_buckets else StagedWeightLoader
            with kind(self._receiver).staging() as new:
                yield new
                missing = self._receiver.missing(new.names)
                if missing:
                    raise CheckpointError(
                        f"tensor '{missing[0]}' is missing ({len(missing)} missing in total)"
                    )
                new.running = self.engine.update_weights(lambda _: new.write(), version, mode)
            self._buckets, self.last_update = None, new.stats(version)

    # --- bucket by bucket -------------------------------------------------------------------------

    def update_from_tensor(self, updates: Sequence[bytes], *, version: int, mode: PauseMode) -> int:
        """Apply safetensors files given as bytes, each with some or all tensors."""
        with self._update_lock, self._rollback_on_error():
            new = StagedWeightLoader(self._receiver)
            for data in updates:
                new.add_without_copy(deserialize_update(data, version).tensors)
            return self._apply_bucket(new, version, mode)

    def update_from_distributed(
        self, name: str, tensors: Sequence[TensorMetadata], *, version: int, mode: PauseMode
    ) -> int:
        """Receive what rank 0 of a broadcast group sends, one tensor after another. Tensors are
        received even if they will be rejected, so that the group stays synchronized."""
        with self._update_lock, self._rollback_on_error():
            group = self._groups.get(name)
            if group is None:
                raise WeightBroadcastError(f"group '{name}' not found")
            buffers = self._receiver.allocate_buffers(tensors, group.device)
            group.receive(buffers)
            named = {each.name: tensor for each, tensor in zip(tensors, buffers, strict=True)}
            if len(named) < len(buffers):
                raise CheckpointError(
                    f"{len(buffers) - len(named)} of {len(buffers)} names are duplicates"
                )
            new = StagedWeightLoader(self._receiver)
            new.add_without_copy(named)
            return self._apply_bucket(new, version, mode)

    def init_group(self, group: Rendezvous) -> None:
        """Join a broadcast group; blocks until all peers are there. Replaces a group of the same
        name: a restarted trainer could not destroy the old one."""
        # Outside the lock: other updates may proceed meanwhile.
        joined = WeightBroadcastGroup(group, self._receiver.device, self.timeout_s)
        with self._update_lock:
            if group.name in self._groups:
                self.destroy_group(group.name)
            self._groups[group.name] = joined

    def destroy_group(self, name: str) -> None:
        with self._update_lock:
            if name not in self._groups:
                raise WeightBroadcastError(f"group '{name}' not found")
            self._groups.pop(name).destroy()

    # --- inspection -------------------------------------------------------------------------------

    def checksums(self) -> Mapping[str, str]:
        """Digests of all tensors by released name. The engine keeps stepping."""
        with self._update_lock:
            return {
                name: tensor_digest(self._receiver.read(name)) for name in self._receiver.tensors
            }

    def mismatched(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Names of `tensors` that differ from the served ones in the engine's dtype; compared on
        the device, which takes a thousandth of the time of checksums."""
        with self._update_lock:
            pairs = [
                (name, self._receiver.read(name), given)
                for name, given in tensors.items()
                if name in self._receiver.tensors
            ]
            wrong = [(served != given.to(served)).any() for _, served, given in pairs]
            found = torch.stack(wrong).tolist() if wrong else []
            return [name for (name, _, _), bad in zip(pairs, found, strict=True) if bad]

    def verify(self, updates: Iterable[WeightUpdate]) -> None:
        """Raise CheckpointError if a served tensor differs from the update."""
        for update in updates:
            for name in self.mismatched(update.tensors):
                raise CheckpointError(
                    f"version {update.version}: the served tensor '{name}' differs from the update"
                )

    def get_weights_by_name(self, name: str, count: int) -> list[float]:
        """The first `count` values of a tensor."""
        if name not in self._receiver.tensors:
            raise CheckpointError(f"tensor '{name}' not found")
        if count < 0:
            raise CheckpointError(f"the number of values must not be negative, got {count}")
        with self._update_lock:
            values = self._receiver.read(name).flatten()[:count].double()
            return values.tolist()  # type: ignore[no-any-return]

    # --- internals --------------------------------------------------------------------------------

    def _apply_bucket(self, new: StagedWeightLoader, version: int, mode: PauseMode) -> int:
        """Apply a bucket, keeping the replaced values while more buckets may follow."""
        buckets = self._open_buckets()
        if buckets is not None:
            fresh = () if self.in_place_buckets else new.names - buckets.names
            buckets.replaced |= {name: self._receiver.read(name).clone() for name in fresh}
            buckets.names |= new.names
        running = self.engine.update_weights(lambda _: new.write(), version, mode)
        self.last_update = new.stats(version)
        if buckets is not None and not self._receiver.missing(buckets.names):
            self._buckets = None
        return running

    def _open_buckets(self) -> _Buckets | None:
        """The buckets since the engine was paused; None while it runs (each is served)."""
        stats = self.engine.stats()
        if not stats.paused:
            self._buckets = None
        elif self._buckets is None or self._buckets.steps != stats.counters.steps:
            self._buckets = _Buckets(version=stats.version, steps=stats.counters.steps)
        return self._buckets

    @contextmanager
    def _rollback_on_error(self) -> Iterator[None]:
        """Roll back the earlier buckets if one is rejected."""
        try:
            yield
        except Exception as error:
            what = self._roll_back()
            if what is None or not isinstance(error, ValueError):
                raise
            raise CheckpointError(f"{error}; {what}") from error

    def _roll_back(self) -> str | None:
        buckets = self._open_buckets()
        self._buckets = None
        if buckets is None or not buckets.names:
            return None
        count, old = len(buckets.names), buckets.replaced
        if self.in_place_buckets:
            return f"{count} earlier tensors stay: send the full version again"
        self.engine.update_weights(lambda _: self._receiver.write(old), buckets.version, "in_place")
        return f"{count} tensors of earlier buckets were rolled back"


class WeightVersionLabels:
    """Maps the version labels of clients (any string) to the engine's version numbers.

    A decimal label keeps its number if that is free; any other label gets the next number. The same
    label means the same version, so that buckets may repeat it.

    >>> labels = WeightVersionLabels()
    >>> labels.version_of("7", newest=3), labels.version_of("default", newest=7), labels.label_of(8)
    (7, 8, 'default')
    >>> labels.version_of(None, newest=8), labels.label_of(9), labels.version_of("007", newest=9)
    (9, '9', 10)
    """

    def __init__(self) -> None:
        self._number: dict[str, int] = {}
        self._label: dict[int, str] = {}

    def version_of(self, label: str | None, *, newest: int) -> int:
        """The version number of a label; the next one for None."""
        if label is None:
            return newest + 1
        if label not in self._number:
            plain = label.isdecimal() and label.isascii() and len(label) <= 18
            free = plain and str(int(label)) == label and int(label) not in self._label
            found = int(label) if free else max(newest, *self._label, 0) + 1
            self._number[label], self._label[found] = found, label
        return self._number[label]

    def label_of(self, version: int) -> str:
        """The label of a version; the number itself if it has none."""
        return self._label.get(version, str(version))


def _check_same_model(found: ModelConfig, own: ModelConfig, folder: str | Path) -> None:
    """Raise CheckpointError if a config field differs: with another RoPE base, say, the same
    tensors are another model."""
    theirs, ours = (config.model_dump(exclude=IGNORED_CONFIG_FIELDS) for config in (found, own))
    for name, value in ours.items():
        if theirs[name] != value:
            raise CheckpointError(
                f"{folder}: '{name}' is {theirs[name]}, in the served model it is {value}"
            )
