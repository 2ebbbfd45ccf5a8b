"""Read-only web dashboard of runs, and self-contained HTML reports.

app.py              FastAPI app: pages and JSON API over run folders
bar_charts.py       seed plots, stacked bars, heat maps
charts.py           line charts as SVG
comparison.py       report that compares several runs
demo/               two small runs that come with the package
demo.py             writes the demo runs to a folder
engine_monitor.py   metrics of a live engine
html.py             escaped HTML elements, tables, pages
jsonl_pages.py      rollouts.jsonl, engine.jsonl and network.jsonl, a page at a time
messages.py         tokens as chat messages
metrics.py          titles, units and charts of metrics
old_names.py        names in the files of older runs
page.css            style of reports and dashboard, light and dark
page.js             hover readout and legend of report charts
pages/              dashboard in the browser: plain JavaScript modules, no build step
pipeline_report.py  report of a pipeline: metrics after each stage
prefix_tree.py      prefixes that rollouts share, as a radix tree
rollouts.py         groups, rollouts and tokens of a ledger as JSON
run_index.py        the runs below some folders
run_report.py       report of one run
run_view.py         a run folder as read from disk
scale.py            axis scales, ticks and number formats
series.py           metric series: smoothing, downsampling, averaging
"""

from paddock.dashboard.app import DashboardApp, build_app
from paddock.dashboard.comparison import write_comparison
from paddock.dashboard.demo import write_demo_runs
from paddock.dashboard.engine_monitor import EngineMonitor
from paddock.dashboard.pipeline_report import read_pipeline_report, write_pipeline_report
from paddock.dashboard.run_index import RunIndex
from paddock.dashboard.run_report import write_report
from paddock.dashboard.scale import format_duration

__all__ = [
    "DashboardApp",
    "EngineMonitor",
    "RunIndex",
    "build_app",
    "format_duration",
    "read_pipeline_report",
    "write_comparison",
    "write_demo_runs",
    "write_pipeline_report",
    "write_report",
]
