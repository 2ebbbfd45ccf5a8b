"""Event loop watchdog: the rollout that blocks the loop is named, not those that wait."""

import asyncio
import logging
from threading import Event

from paddock.records import Verdict
from paddock.rollout.in_flight import run_with_timeout
from paddock.rollout.task_schedule import RolloutSpec
from paddock.rollout.watchdog import EventLoopWatchdog
from tests.patience import PATIENCE_S
from tests.rollout.virtual_time import trajectory


class WarningHandler(logging.Handler):
    def __init__(self):
        super().__init__()
        self.event, self.lines = Event(), []

    def emit(self, record):
        self.lines.append(record.getMessage())
        self.event.set()


def test_the_blocking_rollout_is_named_with_session_and_line():
    noticed, events = WarningHandler(), []
    logged = asyncio.Event()

    def log_event(kind, **fields):
        events.append((kind, fields))
        logged.set()

    def grind():
        assert noticed.event.wait(PATIENCE_S)  # blocks until the warning is logged

    async def rollout(spec):
        await asyncio.sleep(0)
        if spec.member == 1:
            grind()
        await logged.wait()
        return [trajectory(spec, [1], [0], Verdict(reward=1.0))]

    async def main():
        with EventLoopWatchdog(log_event, blocked_s=0.05):
            every = [RolloutSpec.derive("sums", 7, member, seed=0) for member in range(3)]
            await asyncio.gather(
                *(run_with_timeout(rollout, each, timeout_s=PATIENCE_S) for each in every)
            )

    log = logging.getLogger("paddock.rollout")
    log.addHandler(noticed)
    try:
        asyncio.run(main())
    finally:
        log.removeHandler(noticed)
    assert "sums-7-1 blocks the event loop" in noticed.lines[0]
    (kind, fields), *_ = events
    assert (kind, fields["session"]) == ("event_loop_blocked", "sums-7-1")
    assert fields["seconds"] > 0
    assert "test_watchdog.py" in fields["why"] and fields["why"].endswith("in grind")
