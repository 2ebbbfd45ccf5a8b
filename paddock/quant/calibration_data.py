"""Calibration text, and the activations of the exact and the quantized network between layers.

One batch is in memory and one on its way to disk; between two layers all activations are on disk,
so that an interrupted run resumes with bitwise identical results.

T tokens, D hidden, Q sparse queries, K selected keys.
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

ActivationSide = Literal["exact", "quantized"]
TextPurpose = Literal["calibration", "validation", "needles"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationText:
    """A tokenized text. `answers` are token ranges [start, stop) that the network must predict."""

    ids: tuple[int, ...]
    purpose: TextPurpose
    answers: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for start, stop in self.answers:
            if not 0 < start < stop <= len(self.ids):
                raise QuantError(
                    f"an answer must have 0 < start < stop <= {len(self.ids)}, "
                    f"got start {start}, stop {stop}"
                )


@dataclass(frozen=True)
class CalibrationBatch:
    """Packed texts of one purpose."""

    passages: tuple[CalibrationText, ...]

    @property
    def purpose(self) -> TextPurpose:
        return self.passages[0].purpose

    @cached_property
    def token_T(self) -> Tensor:
        return torch.tensor([token for passage in self.passages for token in passage.ids])

    def layout(self, device: torch.device) -> AttentionMetadata:
        return AttentionMetadata.packed([len(passage.ids) for passage in self.passages], device)


def make_batches(passages: Sequence[CalibrationText], max_tokens: int) -> list[CalibrationBatch]:
    """Batches of at most `max_tokens` tokens, or of a single longer text.

    >>> texts = [CalibrationText(ids=(0,) * n, purpose="validation") for n in (3, 3, 9, 1)]
    >>> [len(batch.token_T) for batch in make_batches(texts, 6)]
    [6, 9, 1]
    """
    groups: list[list[CalibrationText]] = []
    for passage in passages:
        if not passage.ids:
            continue
        current = groups[-1] if groups else None
        tokens = sum(len(other.ids) for other in current or ())
        if (
            current
            and current[0].purpose == passage.purpose
            and tokens + len(passage.ids) <= max_tokens
        ):
            current.append(passage)
        else:
            groups.append([passage])
    return [CalibrationBatch(tuple(group)) for group in groups]


@dataclass(frozen=True, slots=True, eq=False)
class LayerActivations:
    """Hidden states of a batch between two layers, and a top-k selection the next may share."""

    hidden_TD: Tensor
    selection: TopKSelection | None = None


class ActivationStore:
    """Activations of every batch before each layer, for the exact and the quantized network.

    Writing takes as long as a GPU needs for a layer, so it runs in the background.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: tuple[Path, Future[None]] | None = None

    @contextmanager
    def background_writes(self) -> Iterator[None]:
        """Allow background writes within the block; all are finished when it ends."""
        with ThreadPoolExecutor(1) as self._writer:
            yield

    def flush(self) -> None:
        """Wait until the pending write is finished."""
        if self._pending is not None:
            self._pending[1].result()

    def read(
        self, layer: int, batch: int, side: ActivationSide, device: torch.device
    ) -> LayerActivations:
        file = self._file(layer, batch, side)
        if self._pending is not None and self._pending[0] == file:
            self.flush()
        stored = load_file(file)
        # Copied: matrix products may round differently with another memory alignment.
        tensors = {name: tensor.to(device, copy=True) for name, tensor in stored.items()}
        selection = None
        if "query" in tensors:
            selection = TopKSelection(tensors["query"], tensors["index"])
        return LayerActivations(tensors["hidden"], selection)

    def write(self, layer: int, batch: int, side: ActivationSide, state: LayerActivations) -> None:
        tensors = {"hidden": state.hidden_TD}
        if state.selection is not None:
            tensors |= {"query": state.selection.query_Q, "index": state.selection.index_QK}
        cpu_tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        self.flush()
        file = self._file(layer, batch, side)
        self._pending = file, self._writer.submit(_save, cpu_tensors, file)

    def delete(self, layer: int) -> None:
        """Delete the activations before a finished layer."""
        shutil.rmtree(self._folder / f"{layer:04d}", ignore_errors=True)

    def _file(self, layer: int, batch: int, side: ActivationSide) -> Path:
        return self._folder / f"{layer:04d}" / f"{batch:05d}.{side}"


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".partial")
    save_file(tensors, temporary)
    os.replace(temporary, file)
