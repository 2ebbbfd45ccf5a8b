"""A group on its way: which of its attempts are queued, running and done."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from paddock.journal import GroupRecord
from paddock.records import Failure, Trajectory
from paddock.rollout.batch_composer import LiveGroup
from paddock.rollout.group import RolloutFn, RolloutGroup
from paddock.rollout.task_schedule import RolloutSpec

CANCEL_GRACE_S = 5.0  # for an attempt that was given up to let everything go


@dataclass(slots=True, kw_only=True)
class GroupInFlight:
    record: GroupRecord
    oldest_version: int | None = None  # the oldest version that may have sampled any of it
    queued: list[int] = field(default_factory=list)  # members, the next one last
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    done: dict[int, tuple[Trajectory, ...]] = field(default_factory=dict)
    finished: bool = False
    cached_live_group: LiveGroup | None = (
        None  # what `alive` said last: it is asked often and changes seldom
    )

    @property
    def is_done(self) -> bool:
        return not self.queued and not self.running

    @property
    def live_group(self) -> LiveGroup:
        seen = self.cached_live_group
        if (
            seen is None
            or seen.oldest_version != self.oldest_version
            or seen.finished != self.finished
        ):
            entry = self.record
            seen = self.cached_live_group = LiveGroup(
                ordinal=entry.ordinal,
                task=entry.task,
                number=entry.number,
                oldest_version=self.oldest_version,
                finished=self.finished,
            )
        return seen

    @property
    def group(self) -> RolloutGroup:
        return make_group(self.record, [self.done[member] for member in sorted(self.done)])

    def note_version(self, version: int | None) -> None:
        """Something of it was, or may now be, sampled by this version."""
        if version is not None:
            self.oldest_version = (
                version if self.oldest_version is None else min(self.oldest_version, version)
            )


def make_group(entry: GroupRecord, attempts: Sequence[tuple[Trajectory, ...]]) -> RolloutGroup:
    return RolloutGroup(
        ordinal=entry.ordinal, task=entry.task, number=entry.number, rollouts=tuple(attempts)
    )


async def run_with_timeout(
    attempt: RolloutFn, given: RolloutSpec, *, limit_s: float
) -> tuple[Trajectory, ...]:
    """An attempt that ends in time. One that does not is cancelled and is a failure of kind time;
    if even that does not stop it, it is left behind."""
    work = asyncio.ensure_future(attempt(given))
    if isinstance(work, asyncio.Task):  # whoever blocks the event loop is named by this
        work.set_name(given.session_id)
    try:
        await asyncio.wait({work}, timeout=limit_s)
        if work.cancelled():
            raise RuntimeError(f"the attempt {given.session_id} cancelled itself")
        if work.done():
            return _checked(tuple(work.result()), given)
        work.cancel()
        await asyncio.wait({work}, timeout=CANCEL_GRACE_S)
    except asyncio.CancelledError:
        work.cancel()
        raise
    left = (
        "" if work.done() else f", and did not stop within {CANCEL_GRACE_S:g} s of being cancelled"
    )
    work.add_done_callback(_heard)
    what = f"over {limit_s:g} s{left}"
    return (failed_trajectory(given, Failure(kind="time", where="attempt", what=what)),)


def failed_trajectory(given: RolloutSpec, failure: Failure) -> Trajectory:
    """An attempt of which nothing is known but why it failed."""
    return Trajectory(
        task_id=given.task_id,
        group_id=given.group_id,
        session_id=given.session_id,
        turns=(),
        outcome=failure,
    )


def _checked(branches: tuple[Trajectory, ...], given: RolloutSpec) -> tuple[Trajectory, ...]:
    if not branches:
        raise ValueError(f"the attempt {given.session_id} returned no trajectory")
    for branch in branches:
        if (branch.group_id, branch.session_id) != (given.group_id, given.session_id):
            raise ValueError(
                f"the attempt {given.session_id} returned a trajectory of session"
                f" {branch.session_id} in group {branch.group_id}"
            )
        if branch.outcome != branches[0].outcome:
            raise ValueError(f"the branches of attempt {given.session_id} differ in their outcome")
    return branches


def _heard(work: "asyncio.Future[Sequence[Trajectory]]") -> None:
    """What a cancelled attempt still has to say is of no use, but somebody must have asked."""
    if not work.cancelled():
        work.exception()
