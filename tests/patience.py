"""Waiting in tests: long enough for a busy machine, with a timeout."""

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 120.0  # a second is enough on an idle machine; CI may be many times slower


def until(holds: Callable[[], object]) -> None:
    """Return once `holds()`; fail if it never does."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "timeout: the condition did not become true"
        time.sleep(0.005)


async def until_async(holds: Callable[[], object]) -> None:
    """Like `until`, without blocking the event loop."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.005)
