"""A ledger as it lies on disk, for those who only look: a run that goes on, or one long dead.

Nothing is written, not even the locks that SQLite keeps beside the file, and no question reads
more than it shows: what an attempt said lies in the same rows as what became of it, so a run of a
hundred thousand attempts is never read whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory

from paddock.journal.ledger import GroupRecord, GroupStatus, Ledger
from paddock.journal.rollout_codec import unpack_rollout
from paddock.journal.sqlite import LedgerError, connect
from paddock.journal.token_records import TokenTrainRecord
from paddock.records import Trajectory

_ENTRY = "ordinal, task, number, size, issued, status, reason, ended, trained"
_SAID = 400  # characters of what a failure said


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """How one attempt ended, without what it said."""

    ordinal: int
    member: int
    reward: float | None
    kind: str  # of failure; none: it has a verdict
    place: str
    what: str
    oldest: int | None  # version of the weights
    newest: int | None
    tokens: int  # sampled


class LedgerView(Ledger):
    """Everything a ledger can be asked, and what a reader of a large one needs besides. Each view
    is a moment of the file: open it anew to see what came since."""

    def __init__(self, path: str | Path) -> None:
        if not Path(path).is_file():
            raise LedgerError(f"{path}: no such ledger")
        self._copies = TemporaryDirectory()
        try:
            address = _address(Path(path), Path(self._copies.name))
            self._base = connect(address, name=path, timeout=5.0, uri=True)
            self._tables = {
                name
                for (name,) in self._base.execute(
                    "SELECT name FROM sqlite_master WHERE type = 'table'"
                )
            }
        except LedgerError:
            self._copies.cleanup()
            raise
        if not {"groups", "attempts", "updates"} <= self._tables:
            self.close()
            raise LedgerError(f"{path}: no ledger, it lacks a table of groups and attempts")

    def close(self) -> None:
        super().close()
        self._copies.cleanup()

    def newest_ordinal(self) -> int:
        """The ordinal of the newest group; -1 where there is none."""
        found = self._base.execute("SELECT MAX(ordinal) FROM groups").fetchone()[0]
        return -1 if found is None else int(found)

    def updates(self) -> list[int]:
        """The first update of every batch that was trained."""
        return [first for (first,) in self._base.execute("SELECT first FROM updates ORDER BY 1")]

    def tasks(self) -> list[str]:
        return [task for (task,) in self._base.execute("SELECT DISTINCT task FROM groups")]

    def list_groups(
        self,
        most: int,
        *,
        before: int | None = None,
        task: str = "",
        status: GroupStatus | str = "",
        update: int | None = None,
    ) -> list[GroupRecord]:
        """At most so many groups, the last issued first: of a task, of a status, of an update (that
        trained them, or while which they were issued), below an ordinal."""
        wishes = {
            "ordinal < ?": before,
            "task = ?": task or None,
            "status = ?": status or None,
            "COALESCE(trained, issued) = ?": update,
        }
        asked = {clause: value for clause, value in wishes.items() if value is not None}
        where = f"WHERE {' AND '.join(asked)}" if asked else ""
        rows = self._base.execute(
            f"SELECT {_ENTRY} FROM groups {where} ORDER BY ordinal DESC LIMIT ?",
            (*asked.values(), most),
        )
        names = _ENTRY.split(", ")
        return [GroupRecord(**dict(zip(names, row, strict=True))) for row in rows]

    def get_group(self, ordinal: int) -> GroupRecord:
        found = self.list_groups(1, before=ordinal + 1)
        if not found or found[0].ordinal != ordinal:
            raise LedgerError(f"there is no group {ordinal}")
        return found[0]

    def find_ordinal(self, task: str, number: int) -> int | None:
        row = self._base.execute(
            "SELECT ordinal FROM groups WHERE task = ? AND number = ?", (task, number)
        ).fetchone()
        return None if row is None else int(row[0])

    def rollout_summaries(self, ordinals: Sequence[int]) -> list[RolloutSummary]:
        """The attempts of these groups that have ended, by group and member."""
        if not ordinals:
            return []
        columns = "ordinal, member, reward, kind, place, substr(what, 1, ?), oldest, newest, tokens"
        wanted = set(ordinals)
        found: list[RolloutSummary] = []
        for low, high in _runs(sorted(wanted)):
            rows = self._base.execute(
                f"SELECT {columns} FROM attempts WHERE ordinal BETWEEN ? AND ?"
                " ORDER BY ordinal, member",
                (_SAID, low, high),
            )
            names = RolloutSummary.__slots__
            found += [RolloutSummary(**dict(zip(names, row, strict=True))) for row in rows]
        return found

    def trajectories(self, ordinal: int, member: int) -> tuple[Trajectory, ...]:
        """What one attempt said; nothing where its tokens were dropped after it was trained."""
        row = self._base.execute(
            "SELECT packed FROM attempts WHERE ordinal = ? AND member = ?", (ordinal, member)
        ).fetchone()
        if row is None:
            raise LedgerError(f"group {ordinal} has no ended attempt {member}")
        return () if row[0] is None else unpack_rollout(row[0], ordinal)

    def group_trajectories(self, ordinal: int) -> list[tuple[Trajectory, ...]]:
        """What the attempts of a group said, those that ended and were not dropped since."""
        rows = self._base.execute(
            "SELECT packed FROM attempts WHERE ordinal = ? AND packed IS NOT NULL ORDER BY member",
            (ordinal,),
        )
        return [unpack_rollout(data, ordinal) for (data,) in rows]

    def token_record(self, session: str, branch: int) -> TokenTrainRecord | None:
        """What the trainer made of a branch; None where it was not trained, or not written down."""
        if "lessons" not in self._tables:
            return None
        row = self._base.execute(
            "SELECT trained, packed FROM lessons WHERE session = ? AND branch = ?",
            (session, branch),
        ).fetchone()
        return None if row is None else TokenTrainRecord.unpack(row[0], row[1])


def _runs(ordinals: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as stretches without a gap.

    >>> _runs([1, 2, 3, 7, 8, 12])
    [(1, 3), (7, 8), (12, 12)]
    """
    found: list[tuple[int, int]] = []
    for ordinal in ordinals:
        if found and ordinal == found[-1][1] + 1:
            found[-1] = (found[-1][0], ordinal)
        else:
            found.append((ordinal, ordinal))
    return found


def _address(path: Path, copies: Path) -> str:
    """How to open it without leaving a trace.

    A writer that is there, or was killed, has left its newest pages in a file beside, and an index
    of that file. They are read from there, the index opened for reading only. Where the index was
    lost, SQLite would have to make one: it makes it beside a copy. Without such pages the ledger is
    whole; opened as one that nobody changes, it needs no lock.
    """
    pages, index = (path.with_name(f"{path.name}{end}") for end in ("-wal", "-shm"))
    if not pages.is_file() or pages.stat().st_size == 0:
        return f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    if not index.is_file():
        for file in (path, pages):
            copyfile(file, copies / file.name)
        return f"{(copies / path.name).as_uri()}?mode=ro"
    return f"{path.resolve().as_uri()}?mode=ro&readonly_shm=1"
