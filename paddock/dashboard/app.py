"""Run folders in a browser, while they grow or long after: read, never written.

Whatever a run holds is hostile: a model wrote it. Pages get it as JSON and put it into the document
as text; a policy of the browser (CSP) forbids scripts other than ours; and only requests that name
this machine by its address are answered, so that no page from elsewhere can ask in its place.
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
from paddock.journal import LedgerError, LedgerView

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


# What SQLite can hold; FastAPI refuses the rest.
Number = Annotated[int, Interval(ge=0, lt=2**63)]


class DashboardError(ValueError):
    """Why there is no dashboard; the message says what to do."""


@dataclass(kw_only=True)
class DashboardApp:
    """What there is to see, and with what eyes."""

    shelf: RunIndex
    open_words: OpenTokenText
    engine: EngineMonitor | None = None
    host: str = "127.0.0.1"
    clock: Callable[[], float] = time.time
    _words: dict[Path, TokenText] = field(default_factory=dict)

    def token_text(self, name: str) -> TokenText:
        """The tokenizer of a run: its own, its checkpoints', or that of the run it started from."""
        run = self.shelf.run(name)
        start = run.recipe.get("start")
        parent = start.get("folder") if isinstance(start, Mapping) else None
        folders = [run.path]
        if isinstance(parent, str) and self.shelf.contains(Path(parent)):
            folders.append(Path(parent))
        for folder in (place for each in folders for place in find_tokenizer_folders(each)):
            if not self.shelf.contains(folder / "tokenizer.json"):  # a link leads elsewhere
                continue
            if folder not in self._words and (found := self.open_words(folder)) is not None:
                self._words[folder] = found
            if folder in self._words:
                return self._words[folder]
        return TokenIdText()

    @contextmanager
    def ledger(self, name: str) -> Iterator[LedgerView]:
        path = self.shelf.folder(name) / LEDGER_FILE
        if not is_own_file(path):
            raise LedgerError(f"{path}: no such ledger")
        with LedgerView(path) as view:
            yield view


def find_tokenizer_folders(run: Path) -> Iterator[Path]:
    yield run / "tokenizer"
    yield from sorted(run.glob("checkpoints/step-*/model"), reverse=True)[:1]
    yield run / "model"


def plotly_script() -> Path:
    """Plotly's script, as its Python package brings it."""
    spec = find_spec("plotly")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    for folder in folders:
        script = Path(folder) / "package_data" / "plotly.min.js"
        if script.is_file():
            return script
    raise DashboardError(f"the dashboard draws with plotly, which is not installed: {INSTALL}")


def build_app(sight: DashboardApp) -> "FastAPI":
    """The dashboard as an application."""
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse

    script = plotly_script()
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def guard(
        request: "Request", forward: Callable[["Request"], Awaitable["Response"]]
    ) -> "Response":
        if not is_allowed_host(request.headers.get("host"), [sight.host]):
            answer: Response = JSONResponse({"error": "this host name is not ours"}, 403)
        elif request.method not in ("GET", "HEAD"):
            answer = JSONResponse({"error": "only to be read"}, 405)
        else:
            answer = await forward(request)
        for name, value in {"Content-Security-Policy": POLICY, **HEADERS}.items():
            answer.headers.setdefault(name, value)
        return answer

    def explained(_: "Request", error: Exception) -> "Response":
        return JSONResponse({"error": str(error)}, 404)

    for kind in (ReportError, LedgerError):
        app.add_exception_handler(kind, explained)

    _add_pages(app, script)
    _add_runs(app, sight)
    _add_ledger(app, sight)
    _add_rows(app, sight)
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
            return JSONResponse({"error": f"there is no page {name!r}"}, 404)
        return Response(pages[name], media_type=KINDS[Path(name).suffix])


def _pages() -> dict[str, bytes]:
    """What may be asked for by name: read once, so that no name is ever a path."""
    here = files("paddock.dashboard")
    found = {
        file.name: file.read_bytes()
        for file in here.joinpath("pages").iterdir()
        if Path(file.name).suffix in KINDS
    }
    return {**found, "page.css": here.joinpath("page.css").read_bytes()}


def _json(value: Any) -> "Response":
    """Numbers that are not finite become null."""
    import orjson
    from fastapi.responses import Response

    return Response(orjson.dumps(value), media_type="application/json")


def _add_runs(app: "FastAPI", sight: DashboardApp) -> None:
    from fastapi import Query
    from fastapi.responses import Response

    @app.get("/api/runs")
    def runs() -> Response:
        found, now = [], sight.clock()
        for name in sight.shelf.names():
            try:
                found.append(summarize_run(name, sight.shelf.run(name), now))
            except (ReportError, OSError):  # gone since it was found
                continue
        return _json({"runs": found, "engine": sight.engine is not None, "now": now})

    @app.get("/api/curves")
    def curves(metric: str, run: list[str] = Query(), smooth: float = 0.0) -> Response:  # noqa: B008
        found = {}
        for name in run:
            folder = sight.shelf.run(name)
            if metric in folder.metrics:
                found[name] = curve_data(folder, metric, smooth=smooth)
        return _json(found)

    @app.get("/report")
    def told(run: str) -> Response:
        folder = sight.shelf.run(run)
        if any(event.get("kind") == "plan" for event in folder.events):
            text = page(run, *pipeline_report_page(read_pipeline_report(folder.path)))
        else:
            text = page(run, *run_report(folder, sight.clock()))
        own = files("paddock.dashboard").joinpath("page.js").read_bytes()
        digest = base64.b64encode(sha256(own).digest()).decode()
        policy = POLICY.replace("script-src 'self'", f"script-src 'sha256-{digest}'")
        return Response(
            text.encode("utf-8", "replace"),
            media_type="text/html",
            headers={"Content-Security-Policy": policy},
        )


def _add_ledger(app: "FastAPI", sight: DashboardApp) -> None:
    from fastapi.responses import Response

    @app.get("/api/rl")
    def overview(  # noqa: PLR0913  a query
        run: str,
        task: str = "",
        status: str = "",
        update: Number | None = None,
        before: Number | None = None,
        low: float | None = None,
        high: float | None = None,
    ) -> Response:
        wish = rollouts.RolloutQuery(
            task=task, status=status, update=update, before=before, low=low, high=high
        )
        with sight.ledger(run) as ledger:
            return _json(rollouts.rollout_overview(ledger, wish))

    @app.get("/api/failures")
    def failures(
        run: str, task: str = "", update: Number | None = None, before: Number | None = None
    ) -> Response:
        wish = rollouts.RolloutQuery(task=task, update=update, before=before)
        lines = sight.shelf.run(run).lines
        kinds = sorted({name for line in lines for name in line if name.startswith("failed_")})
        by_step = {
            "step": [line["step"] for line in lines],
            "kinds": {k.removeprefix("failed_"): [line.get(k, 0) for line in lines] for k in kinds},
        }
        with sight.ledger(run) as ledger:
            return _json({**rollouts.failure_summary(ledger, wish), "by_step": by_step})

    @app.get("/api/group")
    def group(run: str, ordinal: Number) -> Response:
        with sight.ledger(run) as ledger:
            return _json(rollouts.group_detail(ledger, ordinal, sight.token_text(run)))

    @app.get("/api/attempt")
    def attempt(run: str, ordinal: Number, member: Number, branch: Number = 0) -> Response:
        with sight.ledger(run) as ledger:
            return _json(
                rollouts.rollout_detail(ledger, ordinal, member, branch, sight.token_text(run))
            )

    @app.get("/api/find")
    def find(run: str, task: str, number: Number) -> Response:
        with sight.ledger(run) as ledger:
            return _json({"ordinal": ledger.find_ordinal(task, number)})

    @app.get("/api/prefixes")
    def shared(run: str, update: Number | None = None) -> Response:
        with sight.ledger(run) as ledger:
            return _json(prefix_tree.prefix_tree_view(ledger, update, sight.token_text(run)))


def _add_rows(app: "FastAPI", sight: DashboardApp) -> None:
    from fastapi.responses import Response

    def some(run: str, file: str, before: int | None) -> tuple[list[jsonl_pages.Row], int]:
        return jsonl_pages.read_page(sight.shelf.folder(run) / file, before)

    @app.get("/api/timeline")
    def timeline(run: str, before: Number | None = None) -> Response:
        folder = sight.shelf.run(run)
        return _json(jsonl_pages.timeline(folder.path / jsonl_pages.ROLLOUTS, before, folder.lines))

    @app.get("/api/engine")
    def engine(run: str, before: Number | None = None) -> Response:
        found, start = some(run, jsonl_pages.ENGINE, before)
        return _json({"rows": found, "before": start or None})

    @app.get("/api/engine/live")
    def live() -> Response:
        if sight.engine is None:
            raise ReportError("no engine is watched: start with --engine URL")
        return _json(sight.engine.poll())

    @app.get("/api/network")
    def network(run: str) -> Response:
        found, _ = some(run, jsonl_pages.NETWORK, None)
        lines = sight.shelf.run(run).lines
        uneven = [(line["step"], line["imbalance"]) for line in lines if "imbalance" in line]
        return _json({"rows": found, "imbalance": uneven})
