"""Batches without end, for one rank of many, that can be stopped and taken up at any point.

T is the tokens of a batch.
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
    packing_lookahead: Annotated[float, Field(ge=0)] = (
        1.0  # batches more that best_fit chooses from
    )
    drop_overlong: bool = (
        False  # what is longer than a row is left out, not cut: half a dialogue misleads
    )
    mixture: MixtureSettings = MixtureSettings()
    seed: int = 0

    @model_validator(mode="after")
    def _rows_fill_a_batch(self) -> "DataLoaderSettings":
        refusal = _refusal(self.packing, self.seq_len, self.batch_tokens)
        if refusal:
            raise ValueError(f"batch_tokens: {refusal}")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """What one rank trains on in one step: spans of tokens that do not see each other."""

    token_T: NDArray[np.int32]
    loss_mask_T: NDArray[np.bool_]  # as a target; the first of a span has nothing before it
    lengths: tuple[int, ...]  # of the spans, T in all
    sources: tuple[str, ...]  # of the spans
    num_targets: int  # trained tokens of all ranks: the denominator of a mean
    loss_weight_T: NDArray[np.float32] | None = (
        None  # of each target in the loss; None: all the same
    )

    def tokens_by_source(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for source, length in zip(self.sources, self.lengths, strict=True):
            counts[source] += length
        return counts


class PackedDataLoader:
    """The same global batches for every number of ranks; each rank reads only its rows."""

    def __init__(
        self,
        documents: Mapping[str, IndexedDataset],
        settings: DataLoaderSettings,
        *,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        assert 0 <= rank < world, (rank, world)
        self._documents, self._settings = documents, settings
        self._rank, self._world = rank, world
        at_most = settings.seq_len if settings.packing == "rows" else None
        self._mixture = Mixture(documents, settings.mixture, seed=settings.seed, at_most=at_most)
        self._waiting: list[DocumentSpan] = []
        self.counts = Counter(batches=0, tokens=0, cut_tokens=0, split_documents=0, left_out=0)

    def next_batch(self, *, progress: float = 0.0, tokens: int | None = None) -> PackedBatch:
        """The next batch. `progress` of the run, 0 to 1, chooses the weights of the mixture;
        `tokens` is for runs whose batches grow."""
        shape = self._shape(tokens or self._settings.batch_tokens)
        pack = PACKERS[self._settings.packing]
        packed = pack(lambda: self._draw(progress), self._waiting, shape)
        self._waiting = packed.carried_over
        pieces = [piece for row in packed.rows for piece in row]
        self.counts.update(
            batches=1,
            tokens=sum(map(len, pieces)),
            cut_tokens=packed.dropped_tokens,
            split_documents=packed.split_documents,
        )
        mine = shard_rows(packed.rows, rank=self._rank, world=self._world)
        return _batch(self._documents, mine, targets=_targets(self._documents, pieces))

    def _draw(self, progress: float) -> DocumentSpan:
        if not self._settings.drop_overlong:
            return self._mixture.next_document(progress)
        for _ in range(2 * sum(self._mixture.sizes().values())):
            piece = self._mixture.next_document(progress)
            if len(piece) <= self._settings.seq_len:
                return piece
            self.counts["left_out"] += 1
        raise DataError(f"no document is as short as a row of {self._settings.seq_len} tokens")

    def epochs(self) -> dict[str, float]:
        """How often each source was gone through."""
        return self._mixture.epochs()

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, as JSON; the same on every rank."""
        return StreamState(
            built_with=self._made(),
            sizes=self._mixture.sizes(),
            documents_taken=self._mixture.taken,
            carried_over=self._waiting,
            counts=self.counts,
        ).to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, with any number of ranks."""
        position = StreamState.from_json(state)
        position.check(made=self._made(), sizes=self._mixture.sizes())
        self._mixture.taken = {name: position.documents_taken[name] for name in self._mixture.taken}
        self._waiting = list(position.carried_over)
        self.counts = Counter(position.counts)

    def _made(self) -> dict[str, int | str]:
        settings = self._settings
        return {"seed": settings.seed, "mode": settings.packing, "context": settings.seq_len}

    def _shape(self, tokens: int) -> PackingLimits:
        settings = self._settings
        refusal = _refusal(settings.packing, settings.seq_len, tokens)
        if not refusal and tokens // settings.seq_len < self._world:
            refusal = (
                f"{tokens} are too few for {self._world} ranks with a context of {settings.seq_len}"
            )
        if refusal:
            raise DataError(f"batch_tokens: {refusal}")
        return PackingLimits(
            seq_len=settings.seq_len, tokens=tokens, lookahead=settings.packing_lookahead
        )


def iterate_once(
    documents: Mapping[str, IndexedDataset], *, context: int, batch_tokens: int
) -> Iterator[PackedBatch]:
    """Every document once, in order, cut into pieces of at most `context`: for evaluation."""
    rows: list[Row] = []
    room = batch_tokens
    for piece in _pieces(documents, min(context, batch_tokens)):
        if len(piece) > room:
            yield _batch(documents, rows)
            rows, room = [], batch_tokens
        rows.append([piece])
        room -= len(piece)
    if rows:
        yield _batch(documents, rows)


def _pieces(documents: Mapping[str, IndexedDataset], context: int) -> Iterator[DocumentSpan]:
    for source, found in documents.items():
        for number in range(len(found)):
            yield from DocumentSpan(source, number, 0, found.length(number)).chunks(context)


def _batch(
    documents: Mapping[str, IndexedDataset], rows: list[Row], *, targets: int | None = None
) -> PackedBatch:
    pieces = [piece for row in rows for piece in row]
    lengths = tuple(map(len, pieces))
    token_T = np.empty(sum(lengths), np.int32)
    trained_T = np.ones(len(token_T), np.bool_)
    weight_T = np.ones(len(token_T), np.float32)
    start = 0
    for piece in pieces:
        found, place = documents[piece.source], slice(start, start + len(piece))
        token_T[place] = found.token_ids(piece.document, piece.start, piece.stop)
        trained_T[place] = found.loss_mask(piece.document, piece.start, piece.stop)
        weight_T[place] = found.loss_weight(piece.document)
        trained_T[start] = False
        start += len(piece)
    return PackedBatch(
        token_T=token_T,
        loss_mask_T=trained_T,
        lengths=lengths,
        sources=tuple(piece.source for piece in pieces),
        num_targets=int(trained_T.sum()) if targets is None else targets,
        loss_weight_T=None if (weight_T == 1).all() else weight_T,
    )


def _targets(documents: Mapping[str, IndexedDataset], pieces: list[DocumentSpan]) -> int:
    """How many tokens of these are learnt."""
    return sum(
        int(documents[p.source].loss_mask(p.document, p.start + 1, p.stop).sum()) for p in pieces
    )


def _refusal(mode: PackingMode, context: int, tokens: int) -> str | None:
    if tokens < context:
        return f"{tokens} are less than one row of {context}"
    if mode != "rows" and tokens % context:
        return f"{tokens} are no whole rows of {context}"
    return None
