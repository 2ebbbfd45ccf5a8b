"""What a run writes down, line by line, for those who watch it or come after it.

attempts.py  an attempt as bytes and back
database.py  a SQLite connection whose errors name the file and say what to do
journal.py   metrics and events of a run folder
ledger.py    every group of attempts that was issued, and how it ended
lessons.py   what the trainer made of an attempt's tokens
lines.py     files of JSON lines that only grow, and reading them meanwhile
view.py      a ledger for those who only look
"""

from paddock.journal.database import LedgerError
from paddock.journal.journal import EVENTS, LEDGER, METRICS, Journal
from paddock.journal.ledger import UNUSED, Balance, Entry, Ledger, Shares
from paddock.journal.lessons import Taught
from paddock.journal.lines import follow
from paddock.journal.view import Ended, LedgerView

__all__ = [
    "EVENTS",
    "LEDGER",
    "METRICS",
    "UNUSED",
    "Balance",
    "Ended",
    "Entry",
    "Journal",
    "Ledger",
    "LedgerError",
    "LedgerView",
    "Shares",
    "Taught",
    "follow",
]
