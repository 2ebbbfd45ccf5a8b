"""What a run writes down, line by line, for those who watch it or come after it.

rollout_codec.py  an attempt as bytes and back
sqlite.py    a SQLite connection whose errors name the file and say what to do
journal.py   metrics and events of a run folder
ledger.py    every group of attempts that was issued, and how it ended
token_records.py  what the trainer made of an attempt's tokens
jsonl.py     files of JSON lines that only grow, and reading them meanwhile
ledger_view.py  a ledger for those who only look
"""

from paddock.journal.journal import EVENTS_FILE, LEDGER_FILE, METRICS_FILE, Journal
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
