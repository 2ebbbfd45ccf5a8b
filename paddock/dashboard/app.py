"""FastAPI app of the dashboard: pages and a JSON API over run folders, which are never written.

The content of a run is untrusted: a model wrote it. Pages get it as JSON and insert it as text, a
content security policy forbids scripts other than ours, and only requests with an allowed host name
are answered, which prevents DNS rebinding.
"""

import base64
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Interval

from paddock.dashboard import jsonl_pages, prefix_tree, rollouts
from paddock.dashboard.engine_monitor import EngineMonitor
from paddock.dashboard.html import page
from paddock.dashboard.messages import OpenTokenText, TokenIdText, TokenText
from paddock.dashboard.pipeline_report import pipeline_report_page, read_pipeline_report
from paddock.dashboard.run_index import LEDGER_FILE, RunIndex, curve_data, summarize_run
from paddock.dashboard.run_report import run_report
from paddock.dashboard.run_view import ReportError, is_own_file
from paddock.http import is_allowed_host
from paddock.journal import TASKS_FILE, LedgerError, LedgerView
from paddock.records import Failure

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

INSTALL = "pip install 'paddock[dash]'"
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline';"
    " img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'"
)
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


FAILURES = "failures/"  # prefix of the metrics that count failed rollouts by kind
# Integers that SQLite can hold; FastAPI rejects others.
Number = Annotated[int, Interval(ge=0, lt=2**63)]


class DashboardError(ValueError):
    """The dashboard cannot start; the message says what to do."""


@dataclass(kw_only=True)
class DashboardApp:
    """What the dashboard shows: runs, their tokenizers and optionally a live engine."""

    run_index: RunIndex
    open_token_text: OpenTokenText
    engine: EngineMonitor | None = None
    host: str = "127.0.0.1"
    clock: Callable[[], float] = time.time
    _token_texts: dict[Path, TokenText] = field(default_factory=dict)

    def token_text(self, name: str) -> TokenText:
        """The tokenizer of a run: its own, its checkpoints', or that of its initial checkpoint.

        Without one, token ids are shown.
        """
        run = self.run_index.run(name)
        init = run.recipe.get("init")
        parent = init.get("checkpoint") if isinstance(init, Mapping) else None
        runs = [run.path]
        if isinstance(parent, str) and self.run_index.contains(Path(parent)):
            runs.append(Path(parent))
        for folder in (folder for each in runs for folder in find_tokenizer_folders(each)):
            # A symbolic link may lead out of the folders that the dashboard may show.
            if not self.run_index.contains(folder / "tokenizer.json"):
                continue
            if folder not in self._token_texts:
                if (found := self.open_token_text(folder)) is None:
                    continue
                self._token_texts[folder] = found
            return self._token_texts[folder]
        return TokenIdText()

    @contextmanager
    def ledger(self, name: str) -> Iterator[LedgerView]:
        """The ledger of a run, opened read-only. Raises LedgerError if there is none."""
        path = self.run_index.folder(name) / LEDGER_FILE
        if not is_own_file(path):
            raise LedgerError(f"{path}: ledger not found")
        with LedgerView(path) as view:
            yield view


def find_tokenizer_folders(run: Path) -> Iterator[Path]:
    """Folders of a run that may hold its tokenizer, in order of preference."""
    yield run / "tokenizer"
    yield from sorted(run.glob("checkpoints/step-*/model"), reverse=True)[:1]
    yield run / "model"


def plotly_script() -> Path:
    """Path of plotly.min.js in the installed plotly package."""
    spec = find_spec("plotly")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    for folder in folders:
        script = Path(folder) / "package_data" / "plotly.min.js"
        if script.is_file():
            return script
    raise DashboardError(f"the dashboard needs plotly, which is not installed: {INSTALL}")


def build_app(dashboard: DashboardApp) -> "FastAPI":
    """The dashboard as a FastAPI application."""
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse

    script = plotly_script()
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def guard(
        request: "Request", forward: Callable[["Request"], Awaitable["Response"]]
    ) -> "Response":
        if not is_allowed_host(request.headers.get("host"), [dashboard.host]):
            response: Response = JSONResponse({"error": "host name not allowed"}, 403)
        elif request.method not in ("GET", "HEAD"):
            response = JSONResponse({"error": "read-only: use GET"}, 405)
        else:
            response = await forward(request)
        for name, value in {"Content-Security-Policy": POLICY, **HEADERS}.items():
            response.headers.setdefault(name, value)
        return response

    def not_found(_: "Request", error: Exception) -> "Response":
        return JSONResponse({"error": str(error)}, 404)

    for kind in (ReportError, LedgerError):
        app.add_exception_handler(kind, not_found)

    _add_pages(app, script)
    _add_runs(app, dashboard)
    _add_ledger(app, dashboard)
    _add_rows(app, dashboard)
    return app


def _add_pages(app: "FastAPI", script: Path) -> None:
    from fastapi.responses import JSONResponse, Response

    pages = _pages()

    @app.get("/")
    def front() -> Response:
        return Response(pages["index.html"], media_type="text/html")

    @app.get("/plotly.js")
    def plotly() -> Response:
        return Response(
            script.read_bytes(),
            media_type="text/javascript",
            headers={"Cache-Control": "max-age=86400"},
        )

    @app.get("/pages/{name}")
    def asset(name: str) -> Response:
        if name not in pages:
            return JSONResponse({"error": f"page {name!r} not found"}, 404)
        return Response(pages[name], media_type=KINDS[Path(name).suffix])


def _pages() -> dict[str, bytes]:
    """Files served by name. They are read once: a requested name is never used as a path."""
    here = files("paddock.dashboard")
    found = {
        file.name: file.read_bytes()
        for file in here.joinpath("pages").iterdir()
        if Path(file.name).suffix in KINDS
    }
    return {**found, "page.css": here.joinpath("page.css").read_bytes()}


def _json(value: Any) -> "Response":
    """A JSON response; non-finite numbers become null."""
    import orjson
    from fastapi.responses import Response

    return Response(orjson.dumps(value), media_type="application/json")


def _add_runs(app: "FastAPI", dashboard: DashboardApp) -> None:
    from fastapi import Query
    from fastapi.responses import Response

    @app.get("/api/runs")
    def runs() -> Response:
        found, now = [], dashboard.clock()
        for name in dashboard.run_index.names():
            try:
                found.append(summarize_run(name, dashboard.run_index.run(name), now))
            except (ReportError, OSError):  # deleted since the last scan
                continue
        return _json({"runs": found, "engine": dashboard.engine is not None, "now": now})

    @app.get("/api/curves")
    def curves(metric: str, run: list[str] = Query(), smooth: float = 0.0) -> Response:  # noqa: B008
        found = {}
        for name in run:
            folder = dashboard.run_index.run(name)
            if metric in folder.metrics:
                found[name] = curve_data(folder, metric, smooth=smooth)
        return _json(found)

    @app.get("/report")
    def report(run: str) -> Response:
        folder = dashboard.run_index.run(run)
        if any(event.get("kind") == "pipeline_started" for event in folder.events):
            text = page(run, *pipeline_report_page(read_pipeline_report(folder.path)))
        else:
            text = page(run, *run_report(folder, dashboard.clock()))
        own = files("paddock.dashboard").joinpath("page.js").read_bytes()
        digest = base64.b64encode(sha256(own).digest()).decode()
        policy = POLICY.replace("script-src 'self'", f"script-src 'sha256-{digest}'")
        return Response(
            text.encode("utf-8", "replace"),
            media_type="text/html",
            headers={"Content-Security-Policy": policy},
        )


def _add_ledger(app: "FastAPI", dashboard: DashboardApp) -> None:
    from fastapi.responses import Response

    @app.get("/api/rollouts")
    def overview(  # noqa: PLR0913  a query
        run: str,
        task: str = "",
        status: str = "",
        step: Number | None = None,
        before: Number | None = None,
        low: float | None = None,
        high: float | None = None,
    ) -> Response:
        query = rollouts.RolloutQuery(
            task=task, status=status, step=step, before=before, low=low, high=high
        )
        with dashboard.ledger(run) as ledger:
            return _json(rollouts.rollout_overview(ledger, query))

    @app.get("/api/failures")
    def failures(
        run: str, task: str = "", step: Number | None = None, before: Number | None = None
    ) -> Response:
        query = rollouts.RolloutQuery(task=task, step=step, before=before)
        lines = dashboard.run_index.run(run).lines
        names = sorted({name for line in lines for name in line if name.startswith(FAILURES)})
        by_step = {
            "step": [line["step"] for line in lines],
            "kinds": {
                Failure.kind_label(name.removeprefix(FAILURES)): [
                    line.get(name, 0) for line in lines
                ]
                for name in names
            },
        }
        with dashboard.ledger(run) as ledger:
            return _json({**rollouts.failure_summary(ledger, query), "by_step": by_step})

    @app.get("/api/group")
    def group(run: str, ordinal: Number) -> Response:
        with dashboard.ledger(run) as ledger:
            return _json(rollouts.group_detail(ledger, ordinal, dashboard.token_text(run)))

    @app.get("/api/rollout")
    def rollout(run: str, ordinal: Number, rollout: Number, branch: Number = 0) -> Response:
        with dashboard.ledger(run) as ledger:
            return _json(
                rollouts.rollout_detail(ledger, ordinal, rollout, branch, dashboard.token_text(run))
            )

    @app.get("/api/group_id")
    def group_id(run: str, task: str, number: Number) -> Response:
        with dashboard.ledger(run) as ledger:
            return _json({"ordinal": ledger.find_ordinal(task, number)})

    @app.get("/api/prefix_tree")
    def shared_prefixes(run: str, step: Number | None = None) -> Response:
        with dashboard.ledger(run) as ledger:
            return _json(prefix_tree.prefix_tree_view(ledger, step, dashboard.token_text(run)))


def _add_rows(app: "FastAPI", dashboard: DashboardApp) -> None:
    from fastapi.responses import Response

    def read_rows(run: str, file: str, before: int | None) -> tuple[list[jsonl_pages.Row], int]:
        return jsonl_pages.read_page(dashboard.run_index.folder(run) / file, before)

    @app.get("/api/timeline")
    def timeline(run: str, before: Number | None = None) -> Response:
        folder = dashboard.run_index.run(run)
        return _json(jsonl_pages.timeline(folder.path / jsonl_pages.ROLLOUTS, before, folder.lines))

    @app.get("/api/tasks")
    def tasks(run: str) -> Response:
        found = jsonl_pages.read_task_states(dashboard.run_index.folder(run) / TASKS_FILE)
        with dashboard.ledger(run) as ledger:
            rates = ledger.pass_rates()
        return _json({**found, "pass_rates": rates, "now": dashboard.clock()})

    @app.get("/api/engine")
    def engine(run: str, before: Number | None = None) -> Response:
        found, start = read_rows(run, jsonl_pages.ENGINE, before)
        return _json({"rows": found, "before": start or None})

    @app.get("/api/engine/live")
    def live() -> Response:
        if dashboard.engine is None:
            raise ReportError("no live engine: start with --engine-url URL")
        return _json(dashboard.engine.poll())

    @app.get("/api/network")
    def network(run: str) -> Response:
        found, _ = read_rows(run, jsonl_pages.NETWORK, None)
        lines = dashboard.run_index.run(run).lines
        imbalance = [
            (line["step"], line["expert_imbalance"]) for line in lines if "expert_imbalance" in line
        ]
        return _json({"rows": found, "expert_imbalance": imbalance})
