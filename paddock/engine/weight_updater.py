"""New weights while requests run: from disk, from tensors, from a trainer's group.

What arrives is checked (names, shapes, numbers, checksums) and brought to the engine's device and
dtype beside the weights that serve; only then, between two steps, is it copied over them. So the
pause is one copy within the device's memory, and whatever is wrong with what arrives leaves the old
weights serving, bit for bit. It costs memory for a second copy of what a version changes.

A version arrives in one of two ways:

- **whole** (`from_disk`, `from_network`, `delivery`, `publisher`): every tensor must be there
  before any is served. Only the MTP layer may be left out, all of it; the engine then drafts with
  the one it has.
- **bucket by bucket** (`from_tensors`, `from_group`), each call with some tensors, as trainers do
  that pause the engine first. A bucket is in the network when its call returns. While the engine
  stays paused, what the buckets replace is kept until all have come; if one is refused, those
  before it are taken back. To an engine that runs, every bucket is a version of its own.

With `in_place_buckets` there is no second copy: tensors are written where they belong as they come,
the engine pauses meanwhile, and stays paused if the rest never comes.
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

# Of a configuration, what does not change what the tensors mean.
IGNORED_CONFIG_FIELDS = {"init", "mtp", "context", "eos", "bos", "pad"}


@dataclass(slots=True)
class _Buckets:
    """What has come, in several calls, of a version that is not whole yet."""

    version: int  # before the first of them
    steps: int  # that the engine had taken; another number, and they have been served
    names: set[str] = field(default_factory=set)
    replaced: dict[str, Tensor] = field(default_factory=dict)


class EngineWeightUpdater:
    """New weights for one engine. One change at a time; each blocks until it is done, returns how
    many requests were running and raises a ValueError that says what is wrong with what came."""

    def __init__(
        self, engine: Engine, *, in_place_buckets: bool = False, timeout_s: float = 300.0
    ) -> None:
        """`timeout_s` is how long peers of a group are waited for, each time."""
        self.engine, self.in_place_buckets, self.timeout_s = engine, in_place_buckets, timeout_s
        self.last_update: WeightUpdateStats | None = None
        self._places = WeightReceiver(engine)
        self._groups: dict[str, WeightBroadcastGroup] = {}
        self._buckets: _Buckets | None = None
        self._changing = RLock()

    # --- a whole version --------------------------------------------------------------------------

    def update_from_disk(self, folder: str | Path, *, version: int, mode: PauseMode) -> int:
        """A folder in the released layout, for a network that means the same by its tensors."""
        mla = self.engine.config.mla
        eps = mla.norm_eps if mla is not None else None  # may have been chosen when it was loaded
        config, stored = open_checkpoint(Path(folder), latent_norm_eps=eps)
        _refuse_another(config, self.engine.config, folder)
        plan = match_tensors(meta_model(drop_missing_mtp(config, stored)), stored)
        with self.stage_update(version, mode) as new:
            for piece, tensor in read_tensors(stored, plan):
                new.add_validated(piece.released_name, tensor)
        return new.running

    def update_from_model(self, network: Transformer, *, version: int, mode: PauseMode) -> int:
        """Another network of this process, such as the one that is being trained."""
        with self.stage_update(version, mode) as new:
            new.add_without_copy(dict(iter_released_tensors(network)))
        return new.running

    def weight_publisher(self, mode: PauseMode = "in_place") -> WeightPublisher:
        """Where a trainer in this process hands over its parcels, all of one version."""

        def publish(parcels: Iterable[WeightUpdate]) -> None:
            rest = iter(parcels)
            first = next(rest, None)
            if first is None:
                raise CheckpointError("nothing was published: there is no parcel")
            with self.stage_update(first.version, mode) as new:
                new.add(first.tensors)
                for parcel in rest:
                    if parcel.version != first.version:
                        raise CheckpointError(
                            f"a parcel of version {parcel.version} among those of {first.version}"
                        )
                    new.add(parcel.tensors)

        return publish

    @contextmanager
    def stage_update(self, version: int, mode: PauseMode) -> Iterator[StagedWeightLoader]:
        """A version that comes in several parts: it serves when the block ends, or not at all if
        something is missing or wrong."""
        if version < 0:
            raise CheckpointError(f"version {version} is negative")
        with self._changing:
            kind = InPlaceWeightLoader if self.in_place_buckets else StagedWeightLoader
            with kind(self._places).staging() as new:
                yield new
                missing = self._places.missing(new.names)
                if missing:
                    raise CheckpointError(
                        f"tensor '{missing[0]}' is missing, of {len(missing)} in all"
                    )
                new.running = self.engine.update_weights(lambda _: new.write(), version, mode)
            self._buckets, self.last_update = None, new.stats(version)

    # --- bucket by bucket -------------------------------------------------------------------------

    def update_from_tensor(self, parcels: Sequence[bytes], *, version: int, mode: PauseMode) -> int:
        """Safetensors files in memory, each with some of the tensors or all."""
        with self._changing, self._all_or_none():
            new = StagedWeightLoader(self._places)
            for data in parcels:
                new.add_without_copy(deserialize_update(data, version).tensors)
            return self._take(new, version, mode)

    def update_from_distributed(
        self, name: str, tensors: Sequence[TensorMetadata], *, version: int, mode: PauseMode
    ) -> int:
        """What rank 0 of a joined group broadcasts, one tensor after another. What can be received
        is received even if it will be refused, so that the group stays in step."""
        with self._changing, self._all_or_none():
            group = self._groups.get(name)
            if group is None:
                raise WeightBroadcastError(f"no group called '{name}' was joined")
            room = self._places.allocate_buffers(tensors, group.device)
            group.receive(room)
            named = {each.name: tensor for each, tensor in zip(tensors, room, strict=True)}
            if len(named) < len(room):
                raise CheckpointError(f"{len(room) - len(named)} of {len(room)} names came twice")
            new = StagedWeightLoader(self._places)
            new.add_without_copy(named)
            return self._take(new, version, mode)

    def init_group(self, group: Rendezvous) -> None:
        """Blocks until all are there. It replaces a group of the same name: a trainer that begins
        anew could not leave the old one."""
        joined = WeightBroadcastGroup(
            group, self._places.device, self.timeout_s
        )  # others may go on
        with self._changing:
            if group.name in self._groups:
                self.destroy_group(group.name)
            self._groups[group.name] = joined

    def destroy_group(self, name: str) -> None:
        with self._changing:
            if name not in self._groups:
                raise WeightBroadcastError(f"no group called '{name}' was joined")
            self._groups.pop(name).destroy()

    # --- looking ----------------------------------------------------------------------------------

    def checksums(self) -> Mapping[str, str]:
        """Of every tensor, by released name. Steps go on meanwhile."""
        with self._changing:
            return {name: tensor_digest(tensor) for name, tensor in self._places.tensors.items()}

    def mismatched(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Those of `tensors` that the engine serves otherwise, as it rounds them; compared where
        they lie, which takes a thousandth of the time of their checksums."""
        with self._changing:
            pairs = [
                (name, self._places.tensors[name], given)
                for name, given in tensors.items()
                if name in self._places.tensors
            ]
            wrong = [(served != given.to(served)).any() for _, served, given in pairs]
            found = torch.stack(wrong).tolist() if wrong else []
            return [name for (name, _, _), bad in zip(pairs, found, strict=True) if bad]

    def verify(self, parcels: Iterable[WeightUpdate]) -> None:
        """That the engine serves what was handed over, every tensor of it."""
        for parcel in parcels:
            for name in self.mismatched(parcel.tensors):
                raise CheckpointError(
                    f"version {parcel.version}: the engine serves another '{name}' than it was "
                    "given"
                )

    def get_weights_by_name(self, name: str, most: int) -> list[float]:
        """The first `most` numbers of a tensor."""
        if name not in self._places.tensors:
            raise CheckpointError(f"no tensor is called '{name}'")
        if most < 0:
            raise CheckpointError(f"{most} numbers of '{name}' cannot be had")
        with self._changing:
            numbers = self._places.tensors[name].flatten()[:most].double()
            return numbers.tolist()  # type: ignore[no-any-return]

    # --- within -----------------------------------------------------------------------------------

    def _take(self, new: StagedWeightLoader, version: int, mode: PauseMode) -> int:
        """A bucket into the network, with a way back while more may come."""
        buckets = self._open_buckets()
        if buckets is not None:
            fresh = () if self.in_place_buckets else new.names - buckets.names
            buckets.replaced |= {name: self._places.tensors[name].clone() for name in fresh}
            buckets.names |= new.names
        running = self.engine.update_weights(lambda _: new.write(), version, mode)
        self.last_update = new.stats(version)
        if buckets is not None and not self._places.missing(buckets.names):
            self._buckets = None
        return running

    def _open_buckets(self) -> _Buckets | None:
        """Those since the engine was paused; none while it runs, for it serves each at once."""
        stats = self.engine.stats()
        if not stats.paused:
            self._buckets = None
        elif self._buckets is None or self._buckets.steps != stats.counters.steps:
            self._buckets = _Buckets(version=stats.version, steps=stats.counters.steps)
        return self._buckets

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """If a bucket is refused, those before it are taken back."""
        try:
            yield
        except Exception as error:
            what = self._take_back()
            if what is None or not isinstance(error, ValueError):
                raise
            raise CheckpointError(f"{error}; {what}") from error

    def _take_back(self) -> str | None:
        buckets = self._open_buckets()
        self._buckets = None
        if buckets is None or not buckets.names:
            return None
        count, old = len(buckets.names), buckets.replaced
        if self.in_place_buckets:
            return f"{count} tensors came before it and stay: send the whole version again"
        self.engine.update_weights(lambda _: self._places.write(old), buckets.version, "in_place")
        return f"{count} tensors that came before it were taken back"


class WeightVersionLabels:
    """What clients call versions (any string) and the numbers the engine knows them by.

    A number keeps itself where it can; any other name gets the next number. The same name means the
    same version, so that buckets may repeat it.

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
        """The version to come; the next one if nothing is said."""
        if label is None:
            return newest + 1
        if label not in self._number:
            plain = label.isdecimal() and label.isascii() and len(label) <= 18
            free = plain and str(int(label)) == label and int(label) not in self._label
            found = int(label) if free else max(newest, *self._label, 0) + 1
            self._number[label], self._label[found] = found, label
        return self._number[label]

    def label_of(self, version: int) -> str:
        return self._label.get(version, str(version))


def _refuse_another(found: ModelConfig, own: ModelConfig, folder: str | Path) -> None:
    """The same tensors mean another network if, say, positions are rotated by another base."""
    theirs, ours = (config.model_dump(exclude=IGNORED_CONFIG_FIELDS) for config in (found, own))
    for name, value in ours.items():
        if theirs[name] != value:
            raise CheckpointError(
                f"{folder}: '{name}' is {theirs[name]}, in the network that serves it is {value}"
            )
