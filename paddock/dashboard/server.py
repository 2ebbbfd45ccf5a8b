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

from paddock.dashboard import episodes, prefixes, rows
from paddock.dashboard.engine import EngineWatch
from paddock.dashboard.folder import ReportError, is_own_file
from paddock.dashboard.html import page
from paddock.dashboard.report import report
from paddock.dashboard.shelf import LEDGER_FILE, Shelf, curve, summary
from paddock.dashboard.story import read_story, story_page
from paddock.dashboard.talk import Numbers, OpenWords, Words
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


class DashError(ValueError):
    """Why there is no dashboard; the message says what to do."""


@dataclass(kw_only=True)
class Sight:
    """What there is to see, and with what eyes."""

    shelf: Shelf
    open_words: OpenWords
    engine: EngineWatch | None = None
    host: str = "127.0.0.1"
    clock: Callable[[], float] = time.time
    _words: dict[Path, Words] = field(default_factory=dict)

    def words(self, name: str) -> Words:
        """The tokenizer of a run: its own, its checkpoints', or that of the run it started from."""
        run = self.shelf.run(name)
        start = run.recipe.get("start")
        parent = start.get("folder") if isinstance(start, Mapping) else None
        folders = [run.path]
        if isinstance(parent, str) and self.shelf.within(Path(parent)):
            folders.append(Path(parent))
        for folder in (place for each in folders for place in tokenizer_places(each)):
            if not self.shelf.within(folder / "tokenizer.json"):  # a link leads elsewhere
                continue
            if folder not in self._words and (found := self.open_words(folder)) is not None:
                self._words[folder] = found
            if folder in self._words:
                return self._words[folder]
        return Numbers()

    @contextmanager
    def ledger(self, name: str) -> Iterator[LedgerView]:
        path = self.shelf.folder(name) / LEDGER_FILE
        if not is_own_file(path):
            raise LedgerError(f"{path}: no such ledger")
        with LedgerView(path) as view:
            yield view


def tokenizer_places(run: Path) -> Iterator[Path]:
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
    raise DashError(f"the dashboard draws with plotly, which is not installed: {INSTALL}")


def build_app(sight: Sight) -> "FastAPI":
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


def _add_runs(app: "FastAPI", sight: Sight) -> None:
    from fastapi import Query
    from fastapi.responses import Response

    @app.get("/api/runs")
    def runs() -> Response:
        found, now = [], sight.clock()
        for name in sight.shelf.names():
            try:
                found.append(summary(name, sight.shelf.run(name), now))
            except (ReportError, OSError):  # gone since it was found
                continue
        return _json({"runs": found, "engine": sight.engine is not None, "now": now})

    @app.get("/api/curves")
    def curves(metric: str, run: list[str] = Query(), smooth: float = 0.0) -> Response:  # noqa: B008
        found = {}
        for name in run:
            folder = sight.shelf.run(name)
            if metric in folder.metrics:
                found[name] = curve(folder, metric, smooth=smooth)
        return _json(found)

    @app.get("/report")
    def told(run: str) -> Response:
        folder = sight.shelf.run(run)
        if any(event.get("kind") == "plan" for event in folder.events):
            text = page(run, *story_page(read_story(folder.path)))
        else:
            text = page(run, *report(folder, sight.clock()))
        own = files("paddock.dashboard").joinpath("page.js").read_bytes()
        digest = base64.b64encode(sha256(own).digest()).decode()
        policy = POLICY.replace("script-src 'self'", f"script-src 'sha256-{digest}'")
        return Response(
            text.encode("utf-8", "replace"),
            media_type="text/html",
            headers={"Content-Security-Policy": policy},
        )


def _add_ledger(app: "FastAPI", sight: Sight) -> None:
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
        wish = episodes.Wish(
            task=task, status=status, update=update, before=before, low=low, high=high
        )
        with sight.ledger(run) as ledger:
            return _json(episodes.overview(ledger, wish))

    @app.get("/api/failures")
    def failures(
        run: str, task: str = "", update: Number | None = None, before: Number | None = None
    ) -> Response:
        wish = episodes.Wish(task=task, update=update, before=before)
        lines = sight.shelf.run(run).lines
        kinds = sorted({name for line in lines for name in line if name.startswith("failed_")})
        by_step = {
            "step": [line["step"] for line in lines],
            "kinds": {k.removeprefix("failed_"): [line.get(k, 0) for line in lines] for k in kinds},
        }
        with sight.ledger(run) as ledger:
            return _json({**episodes.failures(ledger, wish), "by_step": by_step})

    @app.get("/api/group")
    def group(run: str, ordinal: Number) -> Response:
        with sight.ledger(run) as ledger:
            return _json(episodes.group(ledger, ordinal, sight.words(run)))

    @app.get("/api/attempt")
    def attempt(run: str, ordinal: Number, member: Number, branch: Number = 0) -> Response:
        with sight.ledger(run) as ledger:
            return _json(episodes.attempt(ledger, ordinal, member, branch, sight.words(run)))

    @app.get("/api/find")
    def find(run: str, task: str, number: Number) -> Response:
        with sight.ledger(run) as ledger:
            return _json({"ordinal": ledger.find_ordinal(task, number)})

    @app.get("/api/prefixes")
    def shared(run: str, update: Number | None = None) -> Response:
        with sight.ledger(run) as ledger:
            return _json(prefixes.picture(ledger, update, sight.words(run)))


def _add_rows(app: "FastAPI", sight: Sight) -> None:
    from fastapi.responses import Response

    def some(run: str, file: str, before: int | None) -> tuple[list[rows.Row], int]:
        return rows.page(sight.shelf.folder(run) / file, before)

    @app.get("/api/timeline")
    def timeline(run: str, before: Number | None = None) -> Response:
        folder = sight.shelf.run(run)
        return _json(rows.timeline(folder.path / rows.ROLLOUTS, before, folder.lines))

    @app.get("/api/engine")
    def engine(run: str, before: Number | None = None) -> Response:
        found, start = some(run, rows.ENGINE, before)
        return _json({"rows": found, "before": start or None})

    @app.get("/api/engine/live")
    def live() -> Response:
        if sight.engine is None:
            raise ReportError("no engine is watched: start with --engine URL")
        return _json(sight.engine.look())

    @app.get("/api/network")
    def network(run: str) -> Response:
        found, _ = some(run, rows.NETWORK, None)
        lines = sight.shelf.run(run).lines
        uneven = [(line["step"], line["imbalance"]) for line in lines if "imbalance" in line]
        return _json({"rows": found, "imbalance": uneven})
