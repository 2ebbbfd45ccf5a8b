"""What the control routes need of whoever changes an engine's weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paddock.engine import PauseMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A torch.distributed group in which a trainer sends: where it meets, and who we are in it."""

    name: str
    address: str
    port: int
    rank: int
    world_size: int
    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A tensor that is about to be sent, by its released name."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Weights(Protocol):
    """New weights for one engine. Each blocks until done, returns how many requests were running,
    and raises a ValueError that says what is wrong with what came."""

    def from_disk(self, folder: str, *, version: int, mode: PauseMode) -> int: ...

    def from_tensors(self, parcels: Sequence[bytes], *, version: int, mode: PauseMode) -> int:
        """Safetensors files in memory, each with some of the tensors or all."""

    def join(self, group: Group) -> None: ...

    def from_group(
        self, name: str, tensors: Sequence[Sent], *, version: int, mode: PauseMode
    ) -> int: ...

    def leave(self, name: str) -> None: ...

    def checksums(self) -> Mapping[str, str]:
        """Of every tensor, by released name."""

    def values(self, name: str, most: int) -> Any:
        """The first `most` numbers of a tensor."""
