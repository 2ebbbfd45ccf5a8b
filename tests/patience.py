"""Waiting in tests: for what must happen, however busy the machine is, and never for ever."""

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 120.0  # nothing here takes a second on a quiet machine; CI may be many times slower


def until(holds: Callable[[], object]) -> None:
    """Return once `holds()`; fail if it never does."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.005)


async def until_async(holds: Callable[[], object]) -> None:
    """As `until`, while the event loop goes on."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.005)
