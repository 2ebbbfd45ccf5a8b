"""A tool that blocks the event loop is named, not those who wait."""

import asyncio
import logging
from threading import Event

from paddock.records import Verdict
from paddock.rollout.in_flight import run_with_timeout
from paddock.rollout.task_schedule import RolloutSpec
from paddock.rollout.watchdog import EventLoopWatchdog
from tests.patience import PATIENCE_S
from tests.rollout.virtual_time import trajectory


class Noticed(logging.Handler):
    def __init__(self):
        super().__init__()
        self.event, self.lines = Event(), []

    def emit(self, record):
        self.lines.append(record.getMessage())
        self.event.set()


def test_whoever_blocks_the_loop_is_named_by_session_and_line():
    noticed, told = Noticed(), []
    heard = asyncio.Event()

    def tell(kind, **fields):
        told.append((kind, fields))
        heard.set()

    def grind():
        assert noticed.event.wait(PATIENCE_S)  # as long as it takes to be noticed

    async def attempt(given):
        await asyncio.sleep(0)
        if given.member == 1:
            grind()
        await heard.wait()
        return [trajectory(given, [1], [0], Verdict(reward=1.0))]

    async def main():
        with EventLoopWatchdog(tell, blocked_s=0.05):
            every = [RolloutSpec.derive("sums", 7, member, seed=0) for member in range(3)]
            await asyncio.gather(
                *(run_with_timeout(attempt, each, timeout_s=PATIENCE_S) for each in every)
            )

    log = logging.getLogger("paddock.rollout")
    log.addHandler(noticed)
    try:
        asyncio.run(main())
    finally:
        log.removeHandler(noticed)
    assert "sums-7-1 blocks the event loop" in noticed.lines[0]
    (kind, fields), *_ = told
    assert (kind, fields["session"]) == ("event_loop_blocked", "sums-7-1")
    assert fields["seconds"] > 0
    assert "test_blocking.py" in fields["why"] and fields["why"].endswith("in grind")
