"""Text on its way through the layers, twice: as the exact network and as the quantized one see it.

Only one batch is ever in memory, and one on its way to disk; between two layers all of them lie
there, so that a run that was stopped goes on with the same bits.

T tokens, D hidden, Q sparse queries, K kept keys.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paddock.model import AttentionMetadata, TopKSelection
from paddock.quant.w4a8 import QuantError

ActivationSide = Literal["exact", "integer"]
TextPurpose = Literal["calibrate", "held_out", "needles"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationText:
    """A text as tokens. `answers` are stretches of it, first and behind the last, that the network
    is asked to say."""

    ids: tuple[int, ...]
    purpose: TextPurpose
    answers: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for start, stop in self.answers:
            if not 0 < start < stop <= len(self.ids):
                raise QuantError(
                    f"an answer at tokens {start} to {stop} of {len(self.ids)}: nothing before it "
                    "could be asked, or it is not there"
                )


@dataclass(frozen=True)
class CalibrationBatch:
    """Passages of one purpose side by side."""

    passages: tuple[CalibrationText, ...]

    @property
    def purpose(self) -> TextPurpose:
        return self.passages[0].purpose

    @cached_property
    def token_T(self) -> Tensor:
        return torch.tensor([token for passage in self.passages for token in passage.ids])

    def layout(self, device: torch.device) -> AttentionMetadata:
        return AttentionMetadata.packed([len(passage.ids) for passage in self.passages], device)


def make_batches(passages: Sequence[CalibrationText], most: int) -> list[CalibrationBatch]:
    """At most so many tokens at a time, or one passage that is longer.

    >>> texts = [CalibrationText(ids=(0,) * n, purpose="held_out") for n in (3, 3, 9, 1)]
    >>> [len(batch.token_T) for batch in make_batches(texts, 6)]
    [6, 9, 1]
    """
    made: list[list[CalibrationText]] = []
    for passage in passages:
        if not passage.ids:
            continue
        last = made[-1] if made else None
        tokens = sum(len(other.ids) for other in last or ())
        if last and last[0].purpose == passage.purpose and tokens + len(passage.ids) <= most:
            last.append(passage)
        else:
            made.append([passage])
    return [CalibrationBatch(tuple(some)) for some in made]


@dataclass(frozen=True, slots=True, eq=False)
class LayerActivations:
    """A batch between two layers, and the choice of keys that the next one may share."""

    hidden_TD: Tensor
    selection: TopKSelection | None = None


class ActivationStore:
    """States of every batch, on both sides, before each layer.

    Writing takes as long as a GPU takes for a layer, so it goes on beside it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: tuple[Path, Future[None]] | None = None

    @contextmanager
    def background_writes(self) -> Iterator[None]:
        """Until the block ends, with everything on disk then."""
        with ThreadPoolExecutor(1) as self._writer:
            yield

    def flush(self) -> None:
        """Wait until everything is on disk."""
        if self._written is not None:
            self._written[1].result()

    def read(
        self, layer: int, batch: int, side: ActivationSide, device: torch.device
    ) -> LayerActivations:
        file = self._file(layer, batch, side)
        if self._written is not None and self._written[0] == file:
            self.flush()
        found = load_file(file)
        # Copied: products of the same numbers round differently where memory is aligned otherwise.
        tensors = {name: tensor.to(device, copy=True) for name, tensor in found.items()}
        selection = None
        if "query" in tensors:
            selection = TopKSelection(tensors["query"], tensors["index"])
        return LayerActivations(tensors["hidden"], selection)

    def write(self, layer: int, batch: int, side: ActivationSide, state: LayerActivations) -> None:
        tensors = {"hidden": state.hidden_TD}
        if state.selection is not None:
            tensors |= {"query": state.selection.query_Q, "index": state.selection.index_QK}
        near = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        self.flush()
        file = self._file(layer, batch, side)
        self._written = file, self._writer.submit(_save, near, file)

    def delete(self, layer: int) -> None:
        """What lay before a layer that is done."""
        shutil.rmtree(self._folder / f"{layer:04d}", ignore_errors=True)

    def _file(self, layer: int, batch: int, side: ActivationSide) -> Path:
        return self._folder / f"{layer:04d}" / f"{batch:05d}.{side}"


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(".partial")
    save_file(tensors, draft)
    os.replace(draft, file)
