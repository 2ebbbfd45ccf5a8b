"""What a run writes down, line by line, for those who watch it or come after it.

journal.py  metrics and events of a run folder
lines.py    files of JSON lines that only grow, and reading them meanwhile
"""

from paddock.journal.journal import EVENTS, METRICS, Journal
from paddock.journal.lines import follow

__all__ = ["EVENTS", "METRICS", "Journal", "follow"]
