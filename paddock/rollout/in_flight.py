"""Groups in flight: queued, running and finished rollouts of a group, and rollout timeouts."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from paddock.journal import GroupRecord
from paddock.records import Failure, Trajectory
from paddock.rollout.batch_composer import LiveGroup
from paddock.rollout.group import RolloutFn, RolloutGroup
from paddock.rollout.task_schedule import RolloutSpec

CANCEL_GRACE_S = 5.0  # for a cancelled rollout to release its resources


@dataclass(slots=True, kw_only=True)
class GroupInFlight:
    """A group that was issued, with the state of its rollouts."""

    record: GroupRecord
    oldest_version: int | None = None  # oldest version that may have sampled a token
    queued: list[int] = field(default_factory=list)  # rollout indices, the next one last
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    done: dict[int, tuple[Trajectory, ...]] = field(default_factory=dict)
    finished: bool = False
    cached_live_group: LiveGroup | None = None  # read often, changed rarely

    @property
    def is_done(self) -> bool:
        return not self.queued and not self.running

    @property
    def live_group(self) -> LiveGroup:
        cached = self.cached_live_group
        if (
            cached is None
            or cached.oldest_version != self.oldest_version
            or cached.finished != self.finished
        ):
            record = self.record
            cached = self.cached_live_group = LiveGroup(
                ordinal=record.ordinal,
                task=record.task,
                number=record.number,
                oldest_version=self.oldest_version,
                finished=self.finished,
            )
        return cached

    @property
    def group(self) -> RolloutGroup:
        return make_group(self.record, [self.done[member] for member in sorted(self.done)])

    def note_version(self, version: int | None) -> None:
        """Tokens of the group were, or may now be, sampled with this version."""
        if version is not None:
            self.oldest_version = (
                version if self.oldest_version is None else min(self.oldest_version, version)
            )


def make_group(record: GroupRecord, rollouts: Sequence[tuple[Trajectory, ...]]) -> RolloutGroup:
    return RolloutGroup(
        ordinal=record.ordinal, task=record.task, number=record.number, rollouts=tuple(rollouts)
    )


async def run_with_timeout(
    rollout_fn: RolloutFn, spec: RolloutSpec, *, timeout_s: float
) -> tuple[Trajectory, ...]:
    """Run a rollout with a timeout.

    After `timeout_s` it is cancelled and its outcome is a failure of kind `time` (timeout). A
    rollout that ignores its cancellation is abandoned.
    """
    work = asyncio.ensure_future(rollout_fn(spec))
    if isinstance(work, asyncio.Task):  # the event-loop watchdog logs this name
        work.set_name(spec.session_id)
    try:
        await asyncio.wait({work}, timeout=timeout_s)
        if work.cancelled():
            raise RuntimeError(f"rollout {spec.session_id} cancelled itself")
        if work.done():
            return _checked(tuple(work.result()), spec)
        work.cancel()
        await asyncio.wait({work}, timeout=CANCEL_GRACE_S)
    except asyncio.CancelledError:
        work.cancel()
        raise
    left = (
        "" if work.done() else f", and did not stop within {CANCEL_GRACE_S:g} s of being cancelled"
    )
    work.add_done_callback(_retrieve_exception)
    what = f"over {timeout_s:g} s{left}"
    return (failed_trajectory(spec, Failure(kind="time", where="attempt", what=what)),)


def failed_trajectory(spec: RolloutSpec, failure: Failure) -> Trajectory:
    """A trajectory without turns, for a rollout that failed."""
    return Trajectory(
        task_id=spec.task_id,
        group_id=spec.group_id,
        session_id=spec.session_id,
        turns=(),
        outcome=failure,
    )


def _checked(branches: tuple[Trajectory, ...], spec: RolloutSpec) -> tuple[Trajectory, ...]:
    if not branches:
        raise ValueError(f"rollout {spec.session_id} returned no trajectory")
    for branch in branches:
        if (branch.group_id, branch.session_id) != (spec.group_id, spec.session_id):
            raise ValueError(
                f"rollout {spec.session_id} returned a trajectory of session"
                f" {branch.session_id} in group {branch.group_id}"
            )
        if branch.outcome != branches[0].outcome:
            raise ValueError(f"the branches of rollout {spec.session_id} differ in their outcome")
    return branches


def _retrieve_exception(work: "asyncio.Future[Sequence[Trajectory]]") -> None:
    """Mark the exception of an abandoned rollout as retrieved, or asyncio would log it."""
    if not work.cancelled():
        work.exception()
