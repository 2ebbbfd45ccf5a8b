"""Resumable dataloader of packed batches for one data-parallel rank.

T is the number of tokens of a batch.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from paddock.config import BaseSettings
from paddock.data.mixture import DocumentSpan, Mixture, MixtureSettings
from paddock.data.packing import PACKERS, PackingLimits, PackingMode, Row, shard_rows
from paddock.data.shards import IndexedDataset
from paddock.data.sources import DataError
from paddock.data.stream_state import StreamState


class DataLoaderSettings(BaseSettings):
    packing: PackingMode = "truncate"
    seq_len: Annotated[int, Field(gt=1)] = 4096
    batch_tokens: Annotated[int, Field(gt=0)] = 65536  # over all ranks
    # Further batches that best_fit chooses from.
    packing_lookahead: Annotated[float, Field(ge=0)] = 1.0
    # Skip documents longer than a row instead of cutting them: half a dialogue misleads.
    drop_overlong: bool = False
    mixture: MixtureSettings = MixtureSettings()
    seed: int = 0

    @model_validator(mode="after")
    def _rows_fill_a_batch(self) -> "DataLoaderSettings":
        problem = _batch_size_problem(self.packing, self.seq_len, self.batch_tokens)
        if problem:
            raise ValueError(f"batch_tokens: {problem}")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """What one rank trains on in one step: token spans that do not attend to each other."""

    token_T: NDArray[np.int32]
    loss_mask_T: NDArray[np.bool_]  # as targets; the first token of a span has no context
    lengths: tuple[int, ...]  # of the spans; they sum to T
    sources: tuple[str, ...]  # of the spans
    num_targets: int  # trained tokens of all ranks: the denominator of a mean
    loss_weight_T: NDArray[np.float32] | None = None  # of the targets; None: all 1

    def tokens_by_source(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for source, length in zip(self.sources, self.lengths, strict=True):
            counts[source] += length
        return counts


class PackedDataLoader:
    """The same global batches for any number of ranks; each rank reads only its rows."""

    def __init__(
        self,
        documents: Mapping[str, IndexedDataset],
        settings: DataLoaderSettings,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        assert 0 <= rank < world_size, (rank, world_size)
        self._documents, self._settings = documents, settings
        self._rank, self._world_size = rank, world_size
        at_most = settings.seq_len if settings.packing == "rows" else None
        self._mixture = Mixture(documents, settings.mixture, seed=settings.seed, at_most=at_most)
        self._carried_over: list[DocumentSpan] = []
        self.counts = Counter(batches=0, tokens=0, cut_tokens=0, split_documents=0, left_out=0)

    def next_batch(self, *, progress: float = 0.0, tokens: int | None = None) -> PackedBatch:
        """The next batch. `progress` of the run (0 to 1) selects the mixture weights; `tokens`
        overrides `batch_tokens`, for batch-size warmup."""
        limits = self._limits(tokens or self._settings.batch_tokens)
        pack = PACKERS[self._settings.packing]
        packed = pack(lambda: self._next_document(progress), self._carried_over, limits)
        self._carried_over = packed.carried_over
        spans = [span for row in packed.rows for span in row]
        self.counts.update(
            batches=1,
            tokens=sum(map(len, spans)),
            cut_tokens=packed.dropped_tokens,
            split_documents=packed.split_documents,
        )
        mine = shard_rows(packed.rows, rank=self._rank, world_size=self._world_size)
        return _batch(self._documents, mine, targets=_num_targets(self._documents, spans))

    def _next_document(self, progress: float) -> DocumentSpan:
        if not self._settings.drop_overlong:
            return self._mixture.next_document(progress)
        for _ in range(2 * sum(self._mixture.sizes().values())):
            span = self._mixture.next_document(progress)
            if len(span) <= self._settings.seq_len:
                return span
            self.counts["left_out"] += 1
        raise DataError(
            f"all documents are longer than a row of {self._settings.seq_len} tokens; "
            "raise seq_len or set drop_overlong = false"
        )

    def epochs(self) -> dict[str, float]:
        """Number of passes over each source."""
        return self._mixture.epochs()

    def state_dict(self) -> dict[str, Any]:
        """Position in the data as JSON; the same on every rank."""
        return StreamState(
            built_with=self._built_with(),
            sizes=self._mixture.sizes(),
            documents_taken=self._mixture.taken,
            carried_over=self._carried_over,
            counts=self.counts,
        ).to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, with any number of ranks."""
        position = StreamState.from_json(state)
        position.check(built_with=self._built_with(), sizes=self._mixture.sizes())
        self._mixture.taken = {name: position.documents_taken[name] for name in self._mixture.taken}
        self._carried_over = list(position.carried_over)
        self.counts = Counter(position.counts)

    def _built_with(self) -> dict[str, int | str]:
        settings = self._settings
        return {"seed": settings.seed, "mode": settings.packing, "context": settings.seq_len}

    def _limits(self, tokens: int) -> PackingLimits:
        settings = self._settings
        problem = _batch_size_problem(settings.packing, settings.seq_len, tokens)
        if not problem and tokens // settings.seq_len < self._world_size:
            ranks, length = self._world_size, settings.seq_len
            problem = f"{tokens} are too few for {ranks} ranks with a seq_len of {length}"
        if problem:
            raise DataError(f"batch_tokens: {problem}")
        return PackingLimits(
            seq_len=settings.seq_len, tokens=tokens, lookahead=settings.packing_lookahead
        )


def iterate_once(
    documents: Mapping[str, IndexedDataset], *, context: int, batch_tokens: int
) -> Iterator[PackedBatch]:
    """Every document once, in order, in spans of at most `context` tokens: for evaluation."""
    rows: list[Row] = []
    free = batch_tokens
    for span in _spans(documents, min(context, batch_tokens)):
        if len(span) > free:
            yield _batch(documents, rows)
            rows, free = [], batch_tokens
        rows.append([span])
        free -= len(span)
    if rows:
        yield _batch(documents, rows)


def _spans(documents: Mapping[str, IndexedDataset], context: int) -> Iterator[DocumentSpan]:
    for source, found in documents.items():
        for number in range(len(found)):
            yield from DocumentSpan(source, number, 0, found.length(number)).chunks(context)


def _batch(
    documents: Mapping[str, IndexedDataset], rows: list[Row], *, targets: int | None = None
) -> PackedBatch:
    spans = [span for row in rows for span in row]
    lengths = tuple(map(len, spans))
    token_T = np.empty(sum(lengths), np.int32)
    loss_mask_T = np.ones(len(token_T), np.bool_)
    loss_weight_T = np.ones(len(token_T), np.float32)
    start = 0
    for span in spans:
        found, where = documents[span.source], slice(start, start + len(span))
        token_T[where] = found.token_ids(span.document, span.start, span.stop)
        loss_mask_T[where] = found.loss_mask(span.document, span.start, span.stop)
        loss_weight_T[where] = found.loss_weight(span.document)
        loss_mask_T[start] = False  # nothing before it to predict it from
        start += len(span)
    return PackedBatch(
        token_T=token_T,
        loss_mask_T=loss_mask_T,
        lengths=lengths,
        sources=tuple(span.source for span in spans),
        num_targets=int(loss_mask_T.sum()) if targets is None else targets,
        loss_weight_T=None if (loss_weight_T == 1).all() else loss_weight_T,
    )


def _num_targets(documents: Mapping[str, IndexedDataset], spans: list[DocumentSpan]) -> int:
    """Number of trained tokens in the spans."""
    return sum(
        int(documents[s.source].loss_mask(s.document, s.start + 1, s.stop).sum()) for s in spans
    )


def _batch_size_problem(mode: PackingMode, seq_len: int, tokens: int) -> str | None:
    if tokens < seq_len:
        return f"{tokens} must be at least one row of {seq_len}"
    if mode != "rows" and tokens % seq_len:
        return f"{tokens} must be a multiple of seq_len ({seq_len})"
    return None
