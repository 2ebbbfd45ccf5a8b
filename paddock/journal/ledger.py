"""Every group of attempts that was ever issued, and how it ended: a SQLite file in the run folder.

A group is `in flight` until all its attempts have ended. Then it is `failed` (too few attempts have
a verdict), `filtered` (nothing to learn from it, or too stale) or `finished`; a finished one is
`trained` in the transaction that names the update. What a run that is complete has not trained is
`filtered` as unused. Each of these moves happens once; only `rewind`,
to a checkpoint, takes some back. An update is named by how many were done before it.

Whatever was written outlives a killed process at once. A power cut loses nothing that was before
the last `train`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from paddock.journal.rollout_codec import pack_rollout, unpack_rollout
from paddock.journal.sqlite import LedgerError, check_integrity, connect, rollback
from paddock.journal.token_records import INSERT_TOKEN_RECORD as WRITE_LESSON
from paddock.journal.token_records import TOKEN_RECORDS_SCHEMA as LESSONS
from paddock.journal.token_records import TokenTrainRecord
from paddock.records import Failure, Trajectory, Verdict

LEDGER_FORMAT = 1
GroupStatus = Literal["in flight", "finished", "trained", "filtered", "failed"]
UNUSED_REASON = (
    "the run ended before it was trained"  # why a group is filtered when a run is complete
)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS run (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (
    ordinal INTEGER PRIMARY KEY,
    task TEXT NOT NULL,
    number INTEGER NOT NULL,
    size INTEGER NOT NULL,
    status TEXT NOT NULL DEFAULT 'in flight'
        CHECK (status IN ('in flight', 'finished', 'trained', 'filtered', 'failed')),
    reason TEXT NOT NULL DEFAULT '',
    issued INTEGER NOT NULL,
    ended INTEGER,
    trained INTEGER,
    UNIQUE (task, number),
    CHECK ((status = 'trained') = (trained IS NOT NULL)),
    CHECK ((status IN ('filtered', 'failed')) = (reason <> ''))
);
CREATE INDEX IF NOT EXISTS groups_by_status ON groups (status, trained);
CREATE INDEX IF NOT EXISTS groups_by_end ON groups (ended);
CREATE TABLE IF NOT EXISTS attempts (
    ordinal INTEGER NOT NULL REFERENCES groups,
    member INTEGER NOT NULL,
    reward REAL,
    kind TEXT NOT NULL DEFAULT '',
    place TEXT NOT NULL DEFAULT '',
    what TEXT NOT NULL DEFAULT '',
    oldest INTEGER,
    newest INTEGER,
    tokens INTEGER NOT NULL,
    packed BLOB,
    PRIMARY KEY (ordinal, member)
);
CREATE TABLE IF NOT EXISTS updates (
    first INTEGER PRIMARY KEY, until INTEGER NOT NULL, checkpoint TEXT NOT NULL DEFAULT ''
);
CREATE TABLE IF NOT EXISTS shares (
    id INTEGER PRIMARY KEY,
    since INTEGER NOT NULL,
    written INTEGER NOT NULL,
    weights TEXT NOT NULL,
    why TEXT NOT NULL,
    asked INTEGER NOT NULL
);
"""

_UNDO = (
    "DELETE FROM attempts WHERE ordinal IN (SELECT ordinal FROM groups WHERE issued >= :updates)",
    "DELETE FROM groups WHERE issued >= :updates",
    "DELETE FROM shares WHERE written >= :updates AND NOT asked",
)
_UNTRAIN = (
    "UPDATE groups SET status = 'finished', reason = '' WHERE reason = :unused",
    "UPDATE groups SET status = 'finished', trained = NULL WHERE trained >= :updates",
    "DELETE FROM updates WHERE first >= :updates",
    "DELETE FROM attempts WHERE newest > :updates AND ordinal IN"
    " (SELECT ordinal FROM groups WHERE status IN ('in flight', 'finished'))",
    "UPDATE groups SET status = 'in flight', ended = NULL WHERE status = 'finished' AND size >"
    " (SELECT COUNT(*) FROM attempts WHERE attempts.ordinal = groups.ordinal)",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """A group as the ledger knows it."""

    ordinal: int  # in the order of issue, from 0
    task: str
    number: int  # among the groups of its task, from 0: which problem it is
    size: int
    issued: int  # the update of the batch that was being made or trained then
    status: GroupStatus = "in flight"
    reason: str = ""
    ended: int | None = None  # its place in the order of ending
    trained: int | None = None  # the first update of its batch


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCounts:
    """Where everything is that was issued. `issued` is read off the numbers given to groups, the
    rest off their status, so that a lost or doubled group shows."""

    issued: int
    trained: int
    filtered: int
    failed: int
    in_flight: int  # finished ones too, until they are trained

    @property
    def is_consistent(self) -> bool:
        return self.issued == self.trained + self.filtered + self.failed + self.in_flight


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskWeights:
    """What share of the groups each task is to get, from an update on."""

    since: int
    weights: Mapping[str, float]
    why: str
    asked: bool  # by a person or a recipe, not by a task that failed or came back


class Ledger:
    """One writer at a time; the lock of the run folder's journal sees to that. Readers come and go.

    >>> ledger = Ledger(":memory:")
    >>> ledger.issue([GroupRecord(ordinal=0, task="sums", number=0, size=4, issued=0)])
    >>> ledger.end_group(0, "failed", "4 of 4 attempts: world at start")
    >>> ledger.end_group(0, "finished")
    Traceback (most recent call last):
    paddock.journal.sqlite.LedgerError: group 0 is not in flight, so it cannot become finished
    >>> ledger.group_counts()
    Balance(issued=1, trained=0, filtered=0, failed=1, in_flight=0)
    """

    def __init__(self, path: str | Path) -> None:
        self._base = connect(path, name=path)
        self._base.execute("PRAGMA journal_mode = WAL")
        check_integrity(self._base)
        self._base.execute("PRAGMA synchronous = NORMAL")
        self._base.executescript(_SCHEMA + LESSONS)
        found = self.get_metadata("format")
        if found is None:
            self.set_metadata("format", LEDGER_FORMAT)
        elif found != LEDGER_FORMAT:
            self._base.close()
            raise LedgerError(
                f"{path}: the ledger has format {found}, this reads format {LEDGER_FORMAT}"
            )

    # -- writing ---------------------------------------------------------------------------------

    def issue(self, entries: Sequence[GroupRecord]) -> None:
        """Groups that are in flight from now on."""
        rows = [(e.ordinal, e.task, e.number, e.size, e.issued) for e in entries]
        with self.transaction():
            self._base.executemany(
                "INSERT INTO groups (ordinal, task, number, size, issued) VALUES (?, ?, ?, ?, ?)",
                rows,
            )

    def record_rollout(self, ordinal: int, member: int, branches: Sequence[Trajectory]) -> None:
        """One attempt of a group has ended."""
        outcome = branches[0].outcome
        said: tuple[float | None, str, str, str]
        match outcome:
            case Verdict():
                said = (outcome.reward, "", "", "")
            case Failure():
                said = (None, outcome.kind, outcome.where, outcome.what)
        versions = [s.version for b in branches for t in b.turns for s in t.completion.versions]
        self._base.execute(
            "INSERT INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                ordinal,
                member,
                *said,
                min(versions, default=None),
                max(versions, default=None),
                sum(len(turn.completion.token_ids) for b in branches for turn in b.turns),
                pack_rollout(branches),
            ),
        )

    def end_group(
        self, ordinal: int, status: Literal["finished", "filtered", "failed"], reason: str = ""
    ) -> None:
        """A group that is in flight no more. One that is finished may still be filtered."""
        before = "('in flight', 'finished')" if status == "filtered" else "('in flight')"
        done = self._base.execute(
            "UPDATE groups SET status = ?, reason = ?, "
            " ended = (SELECT COALESCE(MAX(ended) + 1, 0) FROM groups)"
            f" WHERE ordinal = ? AND status IN {before}",
            (status, reason, ordinal),
        )
        if done.rowcount != 1:
            raise LedgerError(f"group {ordinal} is not in flight, so it cannot become {status}")

    def record_update(self, first: int, until: int, ordinals: Sequence[int]) -> None:
        """The updates from `first` to before `until` trained these groups. On disk when this
        returns, and all that was written before with it."""
        self._base.execute("PRAGMA synchronous = FULL")
        try:
            with self.transaction():
                self._base.execute(
                    "INSERT INTO updates (first, until) VALUES (?, ?)", (first, until)
                )
                for ordinal in ordinals:
                    done = self._base.execute(
                        "UPDATE groups SET status = 'trained', trained = ?"
                        " WHERE ordinal = ? AND status = 'finished'",
                        (first, ordinal),
                    )
                    if done.rowcount != 1:
                        raise LedgerError(f"group {ordinal} is not finished: it cannot be trained")
        finally:
            self._base.execute("PRAGMA synchronous = NORMAL")

    def record_task_weights(self, shares: TaskWeights, *, now: int) -> None:
        self._base.execute(
            "INSERT INTO shares (since, written, weights, why, asked) VALUES (?, ?, ?, ?, ?)",
            (shares.since, now, json.dumps(dict(shares.weights)), shares.why, shares.asked),
        )

    def record_checkpoint(self, updates: int, name: str) -> None:
        """A checkpoint of the trainer after so many updates is on disk."""
        self._base.execute("UPDATE updates SET checkpoint = ? WHERE until = ?", (name, updates))

    def set_metadata(self, key: str, value: Any) -> None:
        """A fact about the run, as JSON."""
        self._base.execute(
            "INSERT INTO run VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value",
            (key, json.dumps(value)),
        )

    def record_token_stats(self, taught: Mapping[tuple[str, int], TokenTrainRecord]) -> None:
        """What the trainer made of branches, by session and branch: for eyes alone."""
        rows = [(*branch, each.update, each.pack()) for branch, each in taught.items()]
        with self.transaction():
            self._base.executemany(WRITE_LESSON, rows)

    def drop_tokens(self, updates: int) -> None:
        """Drop the tokens of groups trained before this update; how they ended stays."""
        self._base.execute("DELETE FROM lessons WHERE trained < ?", (updates,))
        self._base.execute(
            "UPDATE attempts SET packed = NULL WHERE ordinal IN"
            " (SELECT ordinal FROM groups WHERE trained < ?)",
            (updates,),
        )

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """What is written inside is written whole or not at all."""
        if self._base.in_transaction:
            yield
            return
        self._base.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._base.execute("COMMIT")
        except BaseException:
            rollback(self._base)
            raise

    # -- reading ---------------------------------------------------------------------------------

    def get_metadata(self, key: str) -> Any:
        row = self._base.execute("SELECT value FROM run WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def group_counts(self) -> GroupCounts:
        """In one read: a moment of the ledger."""
        row = self._base.execute(
            "SELECT (SELECT COALESCE(SUM(n), 0) FROM"
            " (SELECT MAX(number) + 1 AS n FROM groups GROUP BY task)),"
            " TOTAL(status = 'trained'), TOTAL(status = 'filtered'), TOTAL(status = 'failed'),"
            " TOTAL(status IN ('in flight', 'finished')) FROM groups"
        ).fetchone()
        issued, trained, filtered, failed, in_flight = map(int, row)
        return GroupCounts(
            issued=issued, trained=trained, filtered=filtered, failed=failed, in_flight=in_flight
        )

    def groups(self, *status: GroupStatus) -> list[GroupRecord]:
        """Groups in the order of issue; all of them if no status is named."""
        marks = ", ".join("?" * len(status))
        chosen = f"WHERE status IN ({marks})" if status else ""
        found = self._base.execute(
            "SELECT ordinal, task, number, size, issued, status, reason, ended, trained"
            f" FROM groups {chosen} ORDER BY ordinal",
            status,
        )
        names = [column[0] for column in found.description]
        return [GroupRecord(**dict(zip(names, row, strict=True))) for row in found]

    def packed_rollouts(self, ordinal: int) -> dict[int, bytes]:
        """The attempts of a group that have ended, by member, as `attempts.pack` wrote them."""
        rows = self._base.execute(
            "SELECT member, packed FROM attempts WHERE ordinal = ? ORDER BY member", (ordinal,)
        )
        found = dict(rows.fetchall())
        if any(data is None for data in found.values()):
            raise LedgerError(f"the tokens of group {ordinal} were dropped after it was trained")
        return found

    def rollouts(self, ordinal: int) -> dict[int, tuple[Trajectory, ...]]:
        return {
            member: unpack_rollout(data, ordinal)
            for member, data in self.packed_rollouts(ordinal).items()
        }

    def batches(self, first: int = 0) -> list[tuple[int, int, tuple[GroupRecord, ...]]]:
        """What was trained from an update on: the first, the one after the last, and its groups by
        task and number."""
        spans = self._base.execute(
            "SELECT first, until FROM updates WHERE first >= ? ORDER BY first", (first,)
        ).fetchall()
        by_update: dict[int, list[GroupRecord]] = {begin: [] for begin, _ in spans}
        for entry in sorted(self.groups("trained"), key=lambda e: (e.task, e.number)):
            if entry.trained in by_update:
                by_update[entry.trained].append(entry)
        return [(begin, until, tuple(by_update[begin])) for begin, until in spans]

    def checkpoints(self) -> dict[int, str]:
        """The trainer's, by how many updates were done."""
        rows = self._base.execute(
            "SELECT until, checkpoint FROM updates WHERE checkpoint <> '' ORDER BY until"
        )
        return dict(rows.fetchall())

    def counts_by_reason(self) -> dict[tuple[str, GroupStatus, str], int]:
        """How many groups, by task, status and reason."""
        rows = self._base.execute(
            "SELECT task, status, reason, COUNT(*) FROM groups GROUP BY task, status, reason"
        )
        return {(task, status, reason): count for task, status, reason, count in rows}

    def failure_counts(self) -> dict[tuple[str, str, str], int]:
        """How many attempts have no verdict, by task, kind and place."""
        rows = self._base.execute(
            "SELECT task, kind, place, COUNT(*) FROM attempts JOIN groups USING (ordinal)"
            " WHERE kind <> '' GROUP BY task, kind, place"
        )
        return {(task, kind, place): count for task, kind, place, count in rows}

    def task_weights(self) -> list[TaskWeights]:
        """In the order in which they were written."""
        rows = self._base.execute("SELECT since, weights, why, asked FROM shares ORDER BY id")
        return [
            TaskWeights(since=since, weights=json.loads(weights), why=why, asked=bool(asked))
            for since, weights, why, asked in rows
        ]

    # -- going back ------------------------------------------------------------------------------

    def rewind(self, updates: int, *, whole: bool) -> None:
        """Back to a checkpoint of the trainer after so many updates: what was trained later is
        finished again, its tokens are still here.

        Weights newer than the checkpoint are lost, and the next ones with their number will be
        others. So attempts that such weights had a part in are erased, to be made again. With
        `whole`, everything is as it was when that many updates were done: groups issued since are
        as if they had not been.
        """
        self._refuse_what_no_checkpoint_is(updates)
        with self.transaction():
            for statement in (*(_UNDO if whole else ()), *_UNTRAIN):
                self._base.execute(statement, {"updates": updates, "unused": UNUSED_REASON})

    def _refuse_what_no_checkpoint_is(self, updates: int) -> None:
        spans = self._base.execute("SELECT first, until FROM updates ORDER BY first").fetchall()
        done = spans[-1][1] if spans else 0
        if updates > done:
            raise LedgerError(
                f"the checkpoint has {updates} updates, the ledger knows of {done}:"
                " they are not of the same run"
            )
        for first, until in spans:
            if first < updates < until:
                raise LedgerError(
                    f"the checkpoint has {updates} updates, in the middle of a batch that was"
                    f" trained from {first} to {until}"
                )

    def close(self) -> None:
        self._base.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
