"""The state of a run's tasks in its folder, for dashboards: a file that is replaced at times."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

INTERVAL_S = 2.0
SHARE = 0.02  # of the time, at most, that is spent on it


@asynccontextmanager
async def written_states(
    file: Path, states: Callable[[], Mapping[str, Any]], interval_s: float = INTERVAL_S
) -> AsyncIterator[None]:
    """Write what `states` returns from now on, and once more at the end."""

    async def write_on() -> None:
        while True:
            began = time.monotonic()
            _write(file, states())
            await asyncio.sleep(max(interval_s, (time.monotonic() - began) / SHARE))

    writing = asyncio.ensure_future(write_on())
    try:
        yield
    finally:
        writing.cancel()
        _write(file, states())


def _write(file: Path, states: Mapping[str, Any]) -> None:
    """A reader sees the file whole, the old one or the new one."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"time": time.time(), **states}))
    new.replace(file)
