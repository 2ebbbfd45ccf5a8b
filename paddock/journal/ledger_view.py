"""Read-only view of a ledger, for live and finished runs.

Nothing is written, not even SQLite's lock files, and no query reads more than it returns: tokens
and outcome of a rollout are in the same row, so a full scan of a large run would read all tokens.
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

_GROUP_COLUMNS = "ordinal, task, number, size, issued, status, reason, ended, trained"
_MAX_WHAT = 400  # characters of a failure message


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """How one rollout ended, without its tokens."""

    ordinal: int
    member: int
    reward: float | None
    kind: str  # of failure; "" if it has a verdict
    place: str
    what: str
    oldest: int | None  # weight version
    newest: int | None
    tokens: int  # sampled


class LedgerView(Ledger):
    """The queries of Ledger, plus paged ones for large ledgers. A view is a snapshot of the file:
    open a new one to see later writes. Raises LedgerError if the file is not a ledger."""

    def __init__(self, path: str | Path) -> None:
        if not Path(path).is_file():
            raise LedgerError(f"{path}: ledger not found")
        self._copies = TemporaryDirectory()
        try:
            uri = _read_only_uri(Path(path), Path(self._copies.name))
            self._base = connect(uri, name=path, timeout=5.0, uri=True)
            self._tables = {
                name
                for (name,) in self._base.execute(
                    "SELECT name FROM sqlite_master WHERE type = 'table'"
                )
            }
        except LedgerError:
            self._copies.cleanup()
            raise
        if "skipped" not in self._tables:
            self._num_skipped = "0"
        if not {"groups", "attempts", "updates"} <= self._tables:
            self.close()
            raise LedgerError(f"{path}: not a ledger: tables of groups and rollouts are missing")

    def close(self) -> None:
        super().close()
        self._copies.cleanup()

    def newest_ordinal(self) -> int:
        """The ordinal of the newest group; -1 if there is none."""
        found = self._base.execute("SELECT MAX(ordinal) FROM groups").fetchone()[0]
        return -1 if found is None else int(found)

    def updates(self) -> list[int]:
        """The first update of every trained batch."""
        return [first for (first,) in self._base.execute("SELECT first FROM updates ORDER BY 1")]

    def tasks(self) -> list[str]:
        return [task for (task,) in self._base.execute("SELECT DISTINCT task FROM groups")]

    def list_groups(
        self,
        limit: int,
        *,
        before: int | None = None,
        task: str = "",
        status: GroupStatus | str = "",
        update: int | None = None,
    ) -> list[GroupRecord]:
        """Up to `limit` groups, newest first: below the ordinal `before`, of this task, status and
        update (the one that trained them, or during which they were issued)."""
        clauses = {
            "ordinal < ?": before,
            "task = ?": task or None,
            "status = ?": status or None,
            "COALESCE(trained, issued) = ?": update,
        }
        filters = {clause: value for clause, value in clauses.items() if value is not None}
        where = f"WHERE {' AND '.join(filters)}" if filters else ""
        rows = self._base.execute(
            f"SELECT {_GROUP_COLUMNS} FROM groups {where} ORDER BY ordinal DESC LIMIT ?",
            (*filters.values(), limit),
        )
        names = _GROUP_COLUMNS.split(", ")
        return [GroupRecord(**dict(zip(names, row, strict=True))) for row in rows]

    def get_group(self, ordinal: int) -> GroupRecord:
        found = self.list_groups(1, before=ordinal + 1)
        if not found or found[0].ordinal != ordinal:
            raise LedgerError(f"group {ordinal} not found")
        return found[0]

    def find_ordinal(self, task: str, number: int) -> int | None:
        row = self._base.execute(
            "SELECT ordinal FROM groups WHERE task = ? AND number = ?", (task, number)
        ).fetchone()
        return None if row is None else int(row[0])

    def rollout_summaries(self, ordinals: Sequence[int]) -> list[RolloutSummary]:
        """The ended rollouts of these groups, by group and member."""
        if not ordinals:
            return []
        columns = "ordinal, member, reward, kind, place, substr(what, 1, ?), oldest, newest, tokens"
        wanted = set(ordinals)
        found: list[RolloutSummary] = []
        for low, high in _ranges(sorted(wanted)):
            rows = self._base.execute(
                f"SELECT {columns} FROM attempts WHERE ordinal BETWEEN ? AND ?"
                " ORDER BY ordinal, member",
                (_MAX_WHAT, low, high),
            )
            names = RolloutSummary.__slots__
            found += [RolloutSummary(**dict(zip(names, row, strict=True))) for row in rows]
        return found

    def pass_rates(self, groups: int = 512) -> dict[str, tuple[float, float]]:
        """Of each task: the share of full rewards and the mean reward in the newest `groups`."""
        rows = self._base.execute(
            "SELECT task, AVG(reward >= 1), AVG(reward) FROM attempts JOIN groups USING (ordinal)"
            " WHERE reward IS NOT NULL AND ordinal > (SELECT MAX(ordinal) FROM groups) - ?"
            " GROUP BY task",
            (groups,),
        )
        return {task: (passed, mean) for task, passed, mean in rows}

    def trajectories(self, ordinal: int, member: int) -> tuple[Trajectory, ...]:
        """The branches of one rollout; empty if its tokens were dropped after training.

        Raises LedgerError if the group has no such rollout that ended.
        """
        row = self._base.execute(
            "SELECT packed FROM attempts WHERE ordinal = ? AND member = ?", (ordinal, member)
        ).fetchone()
        if row is None:
            raise LedgerError(f"group {ordinal} has no finished rollout {member}")
        return () if row[0] is None else unpack_rollout(row[0], ordinal)

    def group_trajectories(self, ordinal: int) -> list[tuple[Trajectory, ...]]:
        """The branches of the ended rollouts of a group whose tokens were not dropped."""
        rows = self._base.execute(
            "SELECT packed FROM attempts WHERE ordinal = ? AND packed IS NOT NULL ORDER BY member",
            (ordinal,),
        )
        return [unpack_rollout(data, ordinal) for (data,) in rows]

    def token_record(self, session: str, branch: int) -> TokenTrainRecord | None:
        """Training statistics of a branch; None if it was not trained or not recorded."""
        if "lessons" not in self._tables:
            return None
        row = self._base.execute(
            "SELECT trained, packed FROM lessons WHERE session = ? AND branch = ?",
            (session, branch),
        ).fetchone()
        return None if row is None else TokenTrainRecord.unpack(row[0], row[1])


def _ranges(ordinals: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive ranges (inclusive) of ascending numbers.

    >>> _ranges([1, 2, 3, 7, 8, 12])
    [(1, 3), (7, 8), (12, 12)]
    """
    found: list[tuple[int, int]] = []
    for ordinal in ordinals:
        if found and ordinal == found[-1][1] + 1:
            found[-1] = (found[-1][0], ordinal)
        else:
            found.append((ordinal, ordinal))
    return found


def _read_only_uri(path: Path, copies: Path) -> str:
    """A SQLite URI that opens the ledger without writing anything next to it.

    A live or killed writer leaves its newest pages in the -wal file and their index in the -shm
    file: both are read in place, the index read-only. If the index is lost, SQLite would have to
    create one, so it works on a copy. Without a -wal file the ledger is complete: opened as
    immutable it needs no lock.
    """
    wal, shm = (path.with_name(f"{path.name}{end}") for end in ("-wal", "-shm"))
    if not wal.is_file() or wal.stat().st_size == 0:
        return f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    if not shm.is_file():
        for file in (path, wal):
            copyfile(file, copies / file.name)
        return f"{(copies / path.name).as_uri()}?mode=ro"
    return f"{path.resolve().as_uri()}?mode=ro&readonly_shm=1"
