"""The journal, for human eyes: pages that need nothing but themselves.

bar_charts.py  groups of numbers side by side
comparison.py  several runs on one page
metrics.py   the curves of a run
demo/        a small run that comes with the package
demo.py      laying it out
engine_monitor.py  an engine's own numbers
rollouts.py  what a ledger holds, down to the token
charts.py    a line chart
run_view.py  a run folder as it lies on disk
html.py      HTML that cannot be broken into
page.css     how pages look, by day and by night
page.js      the readout under the pointer
pages/       the dashboard in the browser: plain modules, no build step
prefix_tree.py  what attempts share, as a radix tree
run_report.py  one run on one page
jsonl_pages.py  rows that a run writes as it goes, read from the end
scale.py     axes, and how numbers are written
series.py    curves as plain numbers
app.py       run folders in a browser, read-only
run_index.py  the runs under some folders
pipeline_report.py  a whole plan on one page
messages.py  tokens as a conversation
"""

from paddock.dashboard.app import DashboardApp, build_app
from paddock.dashboard.comparison import write_comparison
from paddock.dashboard.demo import write_demo_runs
from paddock.dashboard.engine_monitor import EngineMonitor
from paddock.dashboard.messages import TokenText
from paddock.dashboard.pipeline_report import read_pipeline_report, write_pipeline_report
from paddock.dashboard.run_index import RunIndex
from paddock.dashboard.run_report import write_report
from paddock.dashboard.scale import format_duration

__all__ = [
    "DashboardApp",
    "EngineMonitor",
    "RunIndex",
    "TokenText",
    "build_app",
    "format_duration",
    "read_pipeline_report",
    "write_comparison",
    "write_demo_runs",
    "write_pipeline_report",
    "write_report",
]
