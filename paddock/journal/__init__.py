"""Run logs: metrics and events as JSON lines, and the rollout ledger in SQLite.

journal.py        Journal: metrics.jsonl, events.jsonl and further logs of a run folder
jsonl.py          append-only JSON-lines files and concurrent reading
ledger.py         Ledger: every group that was issued, its rollouts and how it ended
ledger_schema.py  tables of the ledger
ledger_view.py    LedgerView: read-only access to a ledger, for dashboards
rollout_codec.py  binary encoding of a rollout's trajectories
sqlite.py         SQLite connection whose errors name the file and the remedy
token_records.py  per-token training statistics of a branch
"""

from paddock.journal.journal import EVENTS_FILE, LEDGER_FILE, METRICS_FILE, TASKS_FILE, Journal
from paddock.journal.jsonl import JsonlWriter, follow
from paddock.journal.ledger import LEDGER_FORMAT, UNUSED_REASON, GroupRecord, Ledger, TaskWeights
from paddock.journal.ledger_view import LedgerView, RolloutSummary
from paddock.journal.rollout_codec import unpack_rollout
from paddock.journal.sqlite import LedgerError
from paddock.journal.token_records import TokenTrainRecord

__all__ = [
    "EVENTS_FILE",
    "LEDGER_FILE",
    "LEDGER_FORMAT",
    "METRICS_FILE",
    "TASKS_FILE",
    "UNUSED_REASON",
    "GroupRecord",
    "Journal",
    "JsonlWriter",
    "Ledger",
    "LedgerError",
    "LedgerView",
    "RolloutSummary",
    "TaskWeights",
    "TokenTrainRecord",
    "follow",
    "unpack_rollout",
]
