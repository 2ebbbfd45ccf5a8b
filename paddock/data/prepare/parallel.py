"""Generated sources in processes of their own: nothing of one depends on another."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from threading import Thread

from paddock.data.shards import SourceManifest
from paddock.data.sources import SourceSettings

MIN_PARALLEL_DOCUMENTS = (
    8_000  # documents to be made, below which starting processes takes longer than it saves
)


def sources_to_parallelize(
    sources: Sequence[SourceSettings], processes: int
) -> list[SourceSettings]:
    """Those to be made apart: all that are generated, where they are many. The longest first, as
    far as counts tell: what is begun last should not end last."""
    made = sorted((source for source in sources if source.is_generated), key=_count, reverse=True)
    many = len(made) > 1 and sum(map(_count, made)) >= MIN_PARALLEL_DOCUMENTS
    return made if many and processes > 1 else []


def _count(source: SourceSettings) -> int:
    return getattr(source, "count", None) or 0


@contextmanager
def generate_in_processes(
    sources: Sequence[SourceSettings], processes: int, make: Callable[[str], SourceManifest]
) -> Iterator[dict[str, "Future[SourceManifest]"]]:
    """What `make` returns for each source's name, some day."""
    if not sources:
        yield {}
        return
    pool = ProcessPoolExecutor(
        min(processes, len(sources)), multiprocessing.get_context("spawn"), initializer=_begin
    )
    try:
        yield {source.name: pool.submit(make, source.name) for source in sources}
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    Thread(target=_end_with_the_asker, daemon=True).start()


def _end_with_the_asker() -> None:
    """A pool's processes would wait for ever for one that was killed."""
    asker = multiprocessing.parent_process()
    assert asker is not None
    asker.join()
    os._exit(1)
