"""Event loop and process exit with a grace period.

Third-party code may ignore cancellation or block a thread forever. `asyncio.run` and the
interpreter would wait for it without limit.
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

GRACE_S = 30.0  # for tasks and threads that still run after the end of a run
_THREADS = "paddock-run"
_abandoned: list[str] = []  # names of tasks and threads that did not end in time


def run_with_grace(main: Coroutine[Any, Any, T], *, grace_s: float = GRACE_S) -> T:
    """Like `asyncio.run`, but tasks and threads that still run at the end are cancelled and awaited
    for at most `grace_s`; those that remain are logged by name and abandoned."""
    runner = asyncio.Runner()
    loop = runner.get_loop()
    loop.set_default_executor(threads := ThreadPoolExecutor(thread_name_prefix=_THREADS))
    try:
        return runner.run(main)
    finally:
        deadline = time.monotonic() + grace_s
        stuck = _cancel_tasks(loop, deadline)
        threads.shutdown(wait=False, cancel_futures=True)
        stuck += _join_threads(deadline)
        asyncio.set_event_loop(None)
        loop.close()
        if stuck:
            log.warning("did not end within %g s and was abandoned: %s", grace_s, stuck)
            _abandoned.extend(stuck)


def _cancel_tasks(loop: asyncio.AbstractEventLoop, deadline: float) -> list[str]:
    """Cancel every task; the names of those that do not end."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    tasks.add(loop.create_task(loop.shutdown_asyncgens(), name="async generators"))
    while (left := deadline - time.monotonic()) > 0 and any(not task.done() for task in tasks):
        with suppress(SystemExit):  # which a task raises through the loop
            loop.run_until_complete(asyncio.wait(tasks, timeout=left))
    return [task.get_name() for task in tasks if not task.done()]


def _join_threads(deadline: float) -> list[str]:
    """Wait for the loop's threads; the names of those that do not end."""
    threads = [t for t in threading.enumerate() if t.name.startswith(_THREADS)]
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread.name for thread in threads if thread.is_alive()]


def run_and_exit(command: Callable[[], object]) -> None:
    """Call `command`, then exit even if abandoned threads remain that the interpreter would wait
    for."""
    try:
        command()
    except SystemExit as end:
        _exit_if_abandoned(end.code)
        raise
    except BaseException:
        if _abandoned:
            traceback.print_exc()
        _exit_if_abandoned(1)
        raise
    _exit_if_abandoned(0)


def _exit_if_abandoned(code: int | str | None) -> None:
    if not _abandoned:
        return
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
