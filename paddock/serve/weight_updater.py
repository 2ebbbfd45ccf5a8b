"""Protocol of the weight updaters that the admin routes call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paddock.engine import PauseMode


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdateGroup:
    """A torch.distributed process group in which a trainer broadcasts weights."""

    name: str
    address: str
    port: int
    rank: int
    world_size: int
    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor to be received, by its checkpoint name."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class WeightUpdater(Protocol):
    """Updates the weights of one engine. Updates block until done and return the number of requests
    that were running. Invalid input raises ValueError."""

    def update_from_disk(self, folder: str, *, version: int, mode: PauseMode) -> int: ...

    def update_from_tensor(self, files: Sequence[bytes], *, version: int, mode: PauseMode) -> int:
        """Load safetensors files held in memory, each with some or all of the tensors."""

    def init_group(self, group: WeightUpdateGroup) -> None: ...

    def update_from_distributed(
        self, name: str, tensors: Sequence[TensorSpec], *, version: int, mode: PauseMode
    ) -> int: ...

    def destroy_group(self, name: str) -> None: ...

    def checksums(self) -> Mapping[str, str]:
        """The checksum of every tensor, by checkpoint name."""

    def get_weights_by_name(self, name: str, count: int) -> Any:
        """The first `count` values of a tensor."""
