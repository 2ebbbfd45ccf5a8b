"""A process that is killed at a moment that was drawn, whatever the clock says.

A kill after so many milliseconds comes too late on a fast machine, or on a busy one that lets the
victim run and its killer wait. Counting the victim's own function calls is independent of both.
"""

import os
import signal
import sys
from collections.abc import Callable
from itertools import count


def kill_after_calls(calls: int) -> Callable[[], int]:
    """Let this thread make so many Python calls, then `kill -9` the process; 0: never.

    Returns a function that says how many calls there have been.
    """
    made, seen = count(1), [0]

    def profile(_frame: object, _event: str, _arg: object) -> None:
        seen[0] = next(made)
        if seen[0] == calls:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(profile)
    return lambda: seen[0]
