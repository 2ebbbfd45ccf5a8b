"""Event-loop watchdog: a thread that detects a blocked loop and logs the code that blocks it.

Everything in a run shares one loop: a tool that computes or waits without `await` delays all
rollouts, health checks and timeouts.
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

BLOCKED_S = 3.0  # without an iteration of the loop
_LIBRARY = sysconfig.get_path("stdlib")


class EventLoopWatchdog:
    """Use it with `with` in the thread of the loop. Logs a warning while the loop is blocked, and
    calls `log_event` in the loop when it runs again."""

    def __init__(self, log_event: LogEvent, *, blocked_s: float = BLOCKED_S) -> None:
        self._log_event, self._blocked_s = log_event, blocked_s
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
            ran, posted_at = Event(), time.monotonic()
            if not self._post(ran.set) or ran.wait(self._blocked_s):
                continue
            session, where = self._blocking_task()
            log.warning("%s blocks the event loop, at %s", session, where)
            while not ran.wait(self._blocked_s):
                if self._over.is_set():
                    return
            seconds = round(time.monotonic() - posted_at, 1)
            self._post(
                self._log_event, "event_loop_blocked", session=session, seconds=seconds, why=where
            )

    def _post(self, call: Callable[..., object], *args: object, **fields: object) -> bool:
        try:
            self._loop.call_soon_threadsafe(partial(call, *args, **fields))
        except RuntimeError:  # the loop has ended
            self._over.set()
            return False
        return True

    def _blocking_task(self) -> tuple[str, str]:
        """The current task and its innermost line outside the standard library. Tasks of rollouts
        are named by their session."""
        task = asyncio.current_task(self._loop)
        frame = sys._current_frames().get(self._thread_id)
        if frame is None:
            return "nothing", "an end"
        stack = traceback.extract_stack(frame)
        own = [line for line in stack if not line.filename.startswith(_LIBRARY)]
        line = (own or stack)[-1]
        name = task.get_name() if task is not None else "a callback"
        return name, f"{line.filename}:{line.lineno} in {line.name}"
