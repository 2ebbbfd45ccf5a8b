"""What the control routes need of whoever changes an engine's weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paddock.engine import PauseMode


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdateGroup:
    """A torch.distributed group in which a trainer sends: where it meets, and who we are in it."""

    name: str
    address: str
    port: int
    rank: int
    world_size: int
    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor that is about to be sent, by its released name."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class WeightUpdater(Protocol):
    """New weights for one engine. Each blocks until done, returns how many requests were running,
    and raises a ValueError that says what is wrong with what came."""

    def update_from_disk(self, folder: str, *, version: int, mode: PauseMode) -> int: ...

    def update_from_tensor(self, parcels: Sequence[bytes], *, version: int, mode: PauseMode) -> int:
        """Safetensors files in memory, each with some of the tensors or all."""

    def init_group(self, group: WeightUpdateGroup) -> None: ...

    def update_from_distributed(
        self, name: str, tensors: Sequence[TensorSpec], *, version: int, mode: PauseMode
    ) -> int: ...

    def destroy_group(self, name: str) -> None: ...

    def checksums(self) -> Mapping[str, str]:
        """Of every tensor, by released name."""

    def get_weights_by_name(self, name: str, most: int) -> Any:
        """The first `most` numbers of a tensor."""
