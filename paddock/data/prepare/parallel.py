"""Generated sources built in parallel processes; they are independent of each other."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from threading import Thread

from paddock.data.shards import SourceManifest
from paddock.data.sources import SourceSettings

# Fewer documents than this: starting processes takes longer than it saves.
MIN_PARALLEL_DOCUMENTS = 8_000


def sources_to_parallelize(
    sources: Sequence[SourceSettings], processes: int
) -> list[SourceSettings]:
    """The sources to build in parallel: all generated ones, if there are enough documents. The
    largest come first, so that none is started late and finishes last."""
    generated = sorted((s for s in sources if s.is_generated), key=_count, reverse=True)
    enough = len(generated) > 1 and sum(map(_count, generated)) >= MIN_PARALLEL_DOCUMENTS
    return generated if enough and processes > 1 else []


def _count(source: SourceSettings) -> int:
    return getattr(source, "count", None) or 0


@contextmanager
def generate_in_processes(
    sources: Sequence[SourceSettings], processes: int, make: Callable[[str], SourceManifest]
) -> Iterator[dict[str, "Future[SourceManifest]"]]:
    """Futures of `make(name)` by source name."""
    if not sources:
        yield {}
        return
    pool = ProcessPoolExecutor(
        min(processes, len(sources)), multiprocessing.get_context("spawn"), initializer=_init_worker
    )
    try:
        yield {source.name: pool.submit(make, source.name) for source in sources}
    finally:
        pool.shutdown(cancel_futures=True)


def _init_worker() -> None:
    Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Without this, workers of a killed parent would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
