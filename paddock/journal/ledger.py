"""Rollout ledger: every group that was issued and how it ended, a SQLite file in the run folder.

A group is `in flight` until all its rollouts have ended. Then it is `failed` (too few rollouts have
a verdict), `filtered` (zero variance or too stale) or `finished`; a finished group becomes
`trained` in the transaction that records the update. Groups that a completed run did not train are
`filtered` as unused. Each transition happens once; only `rewind`, to a checkpoint, reverts some.
An update is numbered by how many were done before it.

Whatever was written survives a killed process at once. A power cut loses nothing written before
the last `record_update`. Tables and columns keep the names of format 1 (attempts, lessons, shares).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, Self

from paddock.journal.ledger_schema import LEDGER_SCHEMA, UNDO, UNTRAIN
from paddock.journal.rollout_codec import pack_rollout, unpack_rollout
from paddock.journal.sqlite import LedgerError, check_integrity, connect, rollback
from paddock.journal.token_records import (
    INSERT_TOKEN_RECORD,
    TOKEN_RECORDS_SCHEMA,
    TokenTrainRecord,
)
from paddock.records import Failure, Trajectory, Verdict

LEDGER_FORMAT = 1
GroupStatus = Literal["in flight", "finished", "trained", "filtered", "failed"]
# Why a group is filtered when a run is complete. Stored: a resumed run compares it.
UNUSED_REASON = "the run ended before it was trained"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """One group of rollouts, a row of the ledger."""

    ordinal: int  # order of issue, from 0
    task: str
    number: int  # counts up by task, from 0, and selects the problem; some may be skipped
    size: int
    issued: int  # update whose batch was being collected or trained at the time
    status: GroupStatus = "in flight"
    reason: str = ""
    ended: int | None = None  # order of ending, from 0
    trained: int | None = None  # first update of its batch


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCounts:
    """Number of groups by status. `issued` comes from the group numbers and the rest from the
    status column, so that a lost or duplicated group shows as an inconsistency."""

    issued: int
    trained: int
    filtered: int
    failed: int
    in_flight: int  # including finished ones that are not trained yet

    @property
    def is_consistent(self) -> bool:
        return self.issued == self.trained + self.filtered + self.failed + self.in_flight


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskWeights:
    """Sampling weight of each task, from one update on."""

    since: int
    weights: Mapping[str, float]
    why: str
    asked: bool  # by a user or recipe, not because a task was disabled or retried


class Ledger:
    """Record of all groups of a run: one writer (the journal locks the run folder), many readers.

    >>> ledger = Ledger(":memory:")
    >>> ledger.issue([GroupRecord(ordinal=0, task="sums", number=0, size=4, issued=0)])
    >>> ledger.end_group(0, "failed", "4 of 4 rollouts failed: environment at start (4)")
    >>> ledger.end_group(0, "finished")
    Traceback (most recent call last):
    paddock.journal.sqlite.LedgerError: group 0 cannot become finished: it is not in flight
    >>> ledger.group_counts()
    GroupCounts(issued=1, trained=0, filtered=0, failed=1, in_flight=0)
    """

    _num_skipped = "(SELECT COUNT(*) FROM skipped)"  # a view has none of an older ledger

    def __init__(self, path: str | Path) -> None:
        self._base = connect(path, name=path)
        self._base.execute("PRAGMA journal_mode = WAL")
        check_integrity(self._base)
        self._base.execute("PRAGMA synchronous = NORMAL")
        self._base.executescript(LEDGER_SCHEMA + TOKEN_RECORDS_SCHEMA)
        found = self.get_metadata("format")
        if found is None:
            self.set_metadata("format", LEDGER_FORMAT)
        elif found != LEDGER_FORMAT:
            self._base.close()
            raise LedgerError(
                f"{path}: ledger format {found} is not supported, expected {LEDGER_FORMAT}"
            )

    def issue(self, groups: Sequence[GroupRecord], skipped: Sequence[tuple[str, int]] = ()) -> None:
        """Record new groups as in flight, and the (task, number) that were skipped before them."""
        rows = [(g.ordinal, g.task, g.number, g.size, g.issued) for g in groups]
        since = groups[0].issued if groups else 0
        with self.transaction():
            self._base.executemany(
                "INSERT INTO groups (ordinal, task, number, size, issued) VALUES (?, ?, ?, ?, ?)",
                rows,
            )
            self._base.executemany(
                "INSERT INTO skipped VALUES (?, ?, ?)", [(*each, since) for each in skipped]
            )

    def record_rollout(
        self,
        ordinal: int,
        member: int,
        branches: Sequence[Trajectory],
        seconds: float | None = None,
    ) -> None:
        """Record a rollout of a group that has ended, with all its branches, and how long it took
        if that is to be known."""
        outcome = branches[0].outcome
        result: tuple[float | None, str, str, str]  # reward, kind, place, what
        match outcome:
            case Verdict():
                result = (outcome.reward, "", "", "")
            case Failure():
                result = (None, outcome.kind, outcome.where, outcome.what)
        versions = [s.version for b in branches for t in b.turns for s in t.completion.versions]
        self._base.execute(
            "INSERT INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                ordinal,
                member,
                *result,
                min(versions, default=None),
                max(versions, default=None),
                sum(len(turn.completion.token_ids) for b in branches for turn in b.turns),
                pack_rollout(branches),
            ),
        )
        if seconds is not None:
            row = (ordinal, member, seconds)
            self._base.execute("INSERT OR REPLACE INTO rollout_seconds VALUES (?, ?, ?)", row)

    def end_group(
        self, ordinal: int, status: Literal["finished", "filtered", "failed"], reason: str = ""
    ) -> None:
        """End a group that is in flight, or filter one that is finished; else a LedgerError."""
        allowed = "('in flight', 'finished')" if status == "filtered" else "('in flight')"
        done = self._base.execute(
            "UPDATE groups SET status = ?, reason = ?, "
            " ended = (SELECT COALESCE(MAX(ended) + 1, 0) FROM groups)"
            f" WHERE ordinal = ? AND status IN {allowed}",
            (status, reason, ordinal),
        )
        if done.rowcount != 1:
            raise LedgerError(f"group {ordinal} cannot become {status}: it is not in flight")

    def record_update(self, first: int, until: int, ordinals: Sequence[int]) -> None:
        """Record that the updates `[first, until)` trained these groups. On disk when it returns,
        with everything written before."""
        self._base.execute("PRAGMA synchronous = FULL")
        try:
            with self.transaction():
                insert = "INSERT INTO updates (first, until) VALUES (?, ?)"
                self._base.execute(insert, (first, until))
                for ordinal in ordinals:
                    done = self._base.execute(
                        "UPDATE groups SET status = 'trained', trained = ?"
                        " WHERE ordinal = ? AND status = 'finished'",
                        (first, ordinal),
                    )
                    if done.rowcount != 1:
                        raise LedgerError(
                            f"group {ordinal} cannot become trained: it is not finished"
                        )
        finally:
            self._base.execute("PRAGMA synchronous = NORMAL")

    def record_task_weights(self, mixture: TaskWeights, *, now: int) -> None:
        self._base.execute(
            "INSERT INTO shares (since, written, weights, why, asked) VALUES (?, ?, ?, ?, ?)",
            (mixture.since, now, json.dumps(dict(mixture.weights)), mixture.why, mixture.asked),
        )

    def record_checkpoint(self, updates: int, name: str) -> None:
        """Record the checkpoint that the trainer saved after this many updates."""
        self._base.execute("UPDATE updates SET checkpoint = ? WHERE until = ?", (name, updates))

    def set_metadata(self, key: str, value: Any) -> None:
        """Store a JSON value about the run under a key."""
        self._base.execute(
            "INSERT INTO run VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value",
            (key, json.dumps(value)),
        )

    def record_token_stats(self, records: Mapping[tuple[str, int], TokenTrainRecord]) -> None:
        """Store per-token training statistics by (session, branch), for display only."""
        rows = [(*key, record.update, record.pack()) for key, record in records.items()]
        with self.transaction():
            self._base.executemany(INSERT_TOKEN_RECORD, rows)

    def drop_tokens(self, updates: int) -> None:
        """Delete the tokens of groups trained before this update; their outcomes stay."""
        self._base.execute("DELETE FROM lessons WHERE trained < ?", (updates,))
        self._base.execute(
            "UPDATE attempts SET packed = NULL WHERE ordinal IN"
            " (SELECT ordinal FROM groups WHERE trained < ?)",
            (updates,),
        )

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit everything written inside, or nothing. May be nested."""
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

    def get_metadata(self, key: str) -> Any:
        row = self._base.execute("SELECT value FROM run WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def group_counts(self) -> GroupCounts:
        """Counts by status in one query, hence one snapshot."""
        row = self._base.execute(
            "SELECT (SELECT COALESCE(SUM(n), 0) FROM"
            f" (SELECT MAX(number) + 1 AS n FROM groups GROUP BY task)) - {self._num_skipped},"
            " TOTAL(status = 'trained'), TOTAL(status = 'filtered'), TOTAL(status = 'failed'),"
            " TOTAL(status IN ('in flight', 'finished')) FROM groups"
        ).fetchone()
        issued, trained, filtered, failed, in_flight = map(int, row)
        return GroupCounts(
            issued=issued, trained=trained, filtered=filtered, failed=failed, in_flight=in_flight
        )

    def groups(self, *status: GroupStatus) -> list[GroupRecord]:
        """Groups in the order of issue, of the given statuses; all if none is given."""
        marks = ", ".join("?" * len(status))
        where = f"WHERE status IN ({marks})" if status else ""
        found = self._base.execute(
            "SELECT ordinal, task, number, size, issued, status, reason, ended, trained"
            f" FROM groups {where} ORDER BY ordinal",
            status,
        )
        names = [column[0] for column in found.description]
        return [GroupRecord(**dict(zip(names, row, strict=True))) for row in found]

    def packed_rollouts(self, ordinal: int) -> dict[int, bytes]:
        """Ended rollouts of a group by member, packed; a LedgerError if tokens were dropped."""
        rows = self._base.execute(
            "SELECT member, packed FROM attempts WHERE ordinal = ? ORDER BY member", (ordinal,)
        )
        found = dict(rows.fetchall())
        if any(data is None for data in found.values()):
            raise LedgerError(f"the tokens of group {ordinal} were dropped after it was trained")
        return found

    def rollouts(self, ordinal: int) -> dict[int, tuple[Trajectory, ...]]:
        """The branches of the ended rollouts of a group, by member."""
        return {
            member: unpack_rollout(data, ordinal)
            for member, data in self.packed_rollouts(ordinal).items()
        }

    def batches(self, first: int = 0) -> list[tuple[int, int, tuple[GroupRecord, ...]]]:
        """Trained batches from update `first` on: first update, end of the range (exclusive), and
        the groups ordered by task and number."""
        spans = self._base.execute(
            "SELECT first, until FROM updates WHERE first >= ? ORDER BY first", (first,)
        ).fetchall()
        by_update: dict[int, list[GroupRecord]] = {begin: [] for begin, _ in spans}
        for group in sorted(self.groups("trained"), key=lambda g: (g.task, g.number)):
            if group.trained in by_update:
                by_update[group.trained].append(group)
        return [(begin, until, tuple(by_update[begin])) for begin, until in spans]

    def checkpoints(self) -> dict[int, str]:
        """Names of the trainer's checkpoints by number of updates done."""
        rows = self._base.execute(
            "SELECT until, checkpoint FROM updates WHERE checkpoint <> '' ORDER BY until"
        )
        return dict(rows.fetchall())

    def counts_by_reason(self) -> dict[tuple[str, GroupStatus, str], int]:
        """Number of groups by task, status and reason."""
        rows = self._base.execute(
            "SELECT task, status, reason, COUNT(*) FROM groups GROUP BY task, status, reason"
        )
        return {(task, status, reason): count for task, status, reason, count in rows}

    def failure_counts(self) -> dict[tuple[str, str, str], int]:
        """Number of rollouts without a verdict by task, failure kind and place."""
        rows = self._base.execute(
            "SELECT task, kind, place, COUNT(*) FROM attempts JOIN groups USING (ordinal)"
            " WHERE kind <> '' GROUP BY task, kind, place"
        )
        return {(task, kind, place): count for task, kind, place, count in rows}

    def group_cost(self, ordinal: int, unit: Literal["tokens", "seconds"]) -> float:
        """Sampled tokens of a group, or seconds that its rollouts took."""
        table = "attempts" if unit == "tokens" else "rollout_seconds"
        query = f"SELECT TOTAL({unit}) FROM {table} WHERE ordinal = ?"
        return float(self._base.execute(query, (ordinal,)).fetchone()[0])

    def ended_rewards(self) -> Iterator[tuple[str, int, list[float]]]:
        """Task, number and rewards of every group whose rollouts have all ended, in the order in
        which the groups ended: -inf for a failure of the policy, nothing for another failure."""
        rows = self._base.execute(
            "SELECT ordinal, task, number, size, reward, kind"
            " FROM groups JOIN attempts USING (ordinal) WHERE ended IS NOT NULL"
            " ORDER BY ended, member"
        )
        for (_, task, number, size), found in groupby(rows, key=itemgetter(0, 1, 2, 3)):
            members = [row[4:] for row in found]
            if len(members) == size:  # else it was dropped with rollouts in flight
                known = [reward for reward, kind in members if kind in ("", "policy")]
                yield task, number, [-inf if reward is None else reward for reward in known]

    def task_weights(self) -> list[TaskWeights]:
        """All task weights in the order they were recorded."""
        rows = self._base.execute("SELECT since, weights, why, asked FROM shares ORDER BY id")
        return [
            TaskWeights(since=since, weights=json.loads(weights), why=why, asked=bool(asked))
            for since, weights, why, asked in rows
        ]

    def rewind(self, updates: int, *, whole: bool) -> None:
        """Go back to the trainer's checkpoint after this many updates: groups trained later become
        finished again and keep their tokens.

        Weights newer than the checkpoint are lost, and new ones will reuse their version numbers.
        So rollouts sampled by such weights in part are deleted and must be repeated. With `whole`
        the ledger is as it was after that many updates: groups issued since are deleted too.
        """
        self._check_rewind_target(updates)
        with self.transaction():
            for statement in (*(UNDO if whole else ()), *UNTRAIN):
                self._base.execute(statement, {"updates": updates, "unused": UNUSED_REASON})

    def _check_rewind_target(self, updates: int) -> None:
        spans = self._base.execute("SELECT first, until FROM updates ORDER BY first").fetchall()
        done = spans[-1][1] if spans else 0
        if updates > done:
            raise LedgerError(
                f"the checkpoint has {updates} updates, but the ledger has {done}:"
                " they belong to different runs"
            )
        for first, until in spans:
            if first < updates < until:
                raise LedgerError(
                    f"the checkpoint has {updates} updates, which is inside the batch trained"
                    f" from {first} to {until}"
                )

    def close(self) -> None:
        self._base.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
