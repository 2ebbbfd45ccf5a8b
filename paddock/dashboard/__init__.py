"""The journal, for human eyes: pages that need nothing but themselves.

bars.py     groups of numbers side by side
compare.py  several runs on one page
curves.py   the curves of a run
figure.py   a line chart
folder.py   a run folder as it lies on disk
html.py     HTML that cannot be broken into
page.css    how pages look, by day and by night
page.js     the readout under the pointer
report.py   one run on one page
scale.py    axes, and how numbers are written
series.py   curves as plain numbers
"""

from paddock.dashboard.compare import write_comparison
from paddock.dashboard.folder import ReportError
from paddock.dashboard.report import write_report

__all__ = ["ReportError", "write_comparison", "write_report"]
