"""Kill a process at a random point that does not depend on the clock.

A kill after some milliseconds comes too late on a fast machine, or on a busy one that schedules the
victim and not its killer. Counting the victim's own function calls is independent of both.
"""

import os
import signal
import sys
from collections.abc import Callable
from itertools import count


def kill_after_calls(calls: int) -> Callable[[], int]:
    """`kill -9` this process after so many Python calls of this thread; 0: never.

    Returns a function that returns the number of calls so far.
    """
    made, seen = count(1), [0]

    def profile(_frame: object, _event: str, _arg: object) -> None:
        seen[0] = next(made)
        if seen[0] == calls:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(profile)
    return lambda: seen[0]
