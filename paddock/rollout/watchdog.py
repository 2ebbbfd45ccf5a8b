"""Who blocks the event loop: a thread notices that it stands still, and names what holds it.

Everything in a run shares one loop: a tool that computes or waits without `await` makes attempts,
heartbeats and deadlines late, none of which is to blame.
"""

import asyncio
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from functools import partial
from logging import getLogger
from threading import Event, Thread, get_ident
from typing import Self

from paddock.rollout.orchestrator import LogEvent

log = getLogger("paddock.rollout")

BLOCKED_S = 3.0  # without a turn of the loop
_LIBRARY = sysconfig.get_path("stdlib")


class EventLoopWatchdog:
    """Use it with `with` on the loop's own thread. A warning is logged while the loop is blocked;
    `tell` hears of it, in the loop, when it is free again."""

    def __init__(self, tell: LogEvent, *, blocked_s: float = BLOCKED_S) -> None:
        self._tell, self._blocked_s = tell, blocked_s
        self._over = Event()

    def __enter__(self) -> Self:
        self._loop, self._thread_id = asyncio.get_running_loop(), get_ident()
        self._thread = Thread(target=self._watch, name="paddock-block-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(self._blocked_s):
            turned, asked_at = Event(), time.monotonic()
            if not self._post(turned.set) or turned.wait(self._blocked_s):
                continue
            session, where = self._culprit()
            log.warning("%s blocks the event loop, at %s", session, where)
            while not turned.wait(self._blocked_s):
                if self._over.is_set():
                    return
            seconds = round(time.monotonic() - asked_at, 1)
            self._post(self._tell, "blocked", session=session, seconds=seconds, why=where)

    def _post(self, call: Callable[..., object], *args: object, **fields: object) -> bool:
        try:
            self._loop.call_soon_threadsafe(partial(call, *args, **fields))
        except RuntimeError:  # the loop has ended
            self._over.set()
            return False
        return True

    def _culprit(self) -> tuple[str, str]:
        """The task that the loop is in, and the innermost line of it outside the standard library.
        Attempts are called by their session."""
        task = asyncio.current_task(self._loop)
        frame = sys._current_frames().get(self._thread_id)
        if frame is None:
            return "nothing", "an end"
        stack = traceback.extract_stack(frame)
        own = [line for line in stack if not line.filename.startswith(_LIBRARY)]
        line = (own or stack)[-1]
        name = task.get_name() if task is not None else "a callback"
        return name, f"{line.filename}:{line.lineno} in {line.name}"
