"""The journal, for human eyes: pages that need nothing but themselves.

bars.py      groups of numbers side by side
compare.py   several runs on one page
curves.py    the curves of a run
demo/        a small run that comes with the package
demo.py      laying it out
engine.py    an engine's own numbers
episodes.py  what a ledger holds, down to the token
figure.py    a line chart
folder.py    a run folder as it lies on disk
html.py      HTML that cannot be broken into
page.css     how pages look, by day and by night
page.js      the readout under the pointer
pages/       the dashboard in the browser: plain modules, no build step
prefixes.py  what attempts share, as a radix tree
report.py    one run on one page
rows.py      rows that a run writes as it goes, read from the end
scale.py     axes, and how numbers are written
series.py    curves as plain numbers
server.py    run folders in a browser, read-only
shelf.py     the runs under some folders
story.py     a whole plan on one page
talk.py      tokens as a conversation
"""

from paddock.dashboard.compare import write_comparison
from paddock.dashboard.folder import ReportError
from paddock.dashboard.report import write_report
from paddock.dashboard.story import Story, read_story, write_story

__all__ = [
    "ReportError",
    "Story",
    "read_story",
    "write_comparison",
    "write_report",
    "write_story",
]
