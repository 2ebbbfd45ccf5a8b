"""An event loop that ends in time, and a process that does.

Code of others runs in both: attempts that swallow their cancellation, calls in threads that never
return. `asyncio.run` and the interpreter would wait for them without end.
"""

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
log = logging.getLogger("paddock.cli")

GRACE_S = 30.0  # for tasks and threads that were left when a run has ended
_THREADS = "paddock-run"
_left: list[str] = []  # what did not end in time, in this process


def run_with_grace(main: Coroutine[Any, Any, T], *, grace_s: float = GRACE_S) -> T:
    """As `asyncio.run`, but what is still running at the end is cancelled and waited for no longer
    than `grace_s`; whatever remains is logged by name and left behind."""
    runner = asyncio.Runner()
    loop = runner.get_loop()
    loop.set_default_executor(threads := ThreadPoolExecutor(thread_name_prefix=_THREADS))
    try:
        return runner.run(main)
    finally:
        deadline = time.monotonic() + grace_s
        stuck = _cancelled(loop, deadline)
        threads.shutdown(wait=False, cancel_futures=True)
        stuck += _joined(deadline)
        asyncio.set_event_loop(None)
        loop.close()
        if stuck:
            log.warning("did not end within %g s and was left behind: %s", grace_s, stuck)
            _left.extend(stuck)


def _cancelled(loop: asyncio.AbstractEventLoop, deadline: float) -> list[str]:
    """Cancel every task; the names of those that do not end."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    tasks.add(loop.create_task(loop.shutdown_asyncgens(), name="async generators"))
    while (left := deadline - time.monotonic()) > 0 and any(not task.done() for task in tasks):
        with suppress(SystemExit):  # which a task raises through the loop
            loop.run_until_complete(asyncio.wait(tasks, timeout=left))
    return [task.get_name() for task in tasks if not task.done()]


def _joined(deadline: float) -> list[str]:
    """Wait for the loop's threads; the names of those that do not end."""
    threads = [t for t in threading.enumerate() if t.name.startswith(_THREADS)]
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread.name for thread in threads if thread.is_alive()]


def run_and_exit(command: Callable[[], object]) -> None:
    """Call `command`, then end the process even if something was left behind that the interpreter
    would wait for."""
    try:
        command()
    except SystemExit as end:
        _leave(end.code)
        raise
    except BaseException:
        if _left:
            traceback.print_exc()
        _leave(1)
        raise
    _leave(0)


def _leave(code: int | str | None) -> None:
    if not _left:
        return
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
