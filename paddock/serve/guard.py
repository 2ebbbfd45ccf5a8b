"""Who may come in: keys, and pages of other sites."""

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from paddock.api.dialect import dialect_of, refusal
from paddock.api.errors import ApiError
from paddock.api.keys import sent_key
from paddock.serve.doors.control import PATHS
from paddock.serve.settings import Keys, ServeSettings

OPEN = frozenset({"/", "/health", "/ping"})  # they tell nothing and cost nothing
HARMLESS = frozenset({"GET", "HEAD", "OPTIONS"})


class Guard:
    """Stands before every route."""

    def __init__(self, app: ASGIApp, keys: Keys, settings: ServeSettings) -> None:
        self.app, self.keys, self.settings = app, keys, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        error = self.objection(scope["method"], scope["path"], Headers(scope=scope))
        if error is None:
            await self.app(scope, receive, send)
        else:
            await refusal(dialect_of(scope["path"]), error)(scope, receive, send)

    def objection(self, method: str, path: str, headers: Headers) -> ApiError | None:
        """Why a request may not pass, if it may not."""
        if path in OPEN and method in HARMLESS:
            return None
        if method not in HARMLESS and _foreign(headers):
            return ApiError("requests from pages of other sites are refused", status=403)
        control = path.rstrip("/") in PATHS
        if control and self.settings.is_public and self.keys.admin is None:
            return ApiError(
                f"{path} is closed: on a public address control routes need an admin key",
                status=403,
            )
        if not self.keys.admits(sent_key(headers), control=control):
            kind = "admin " if control and self.keys.admin else ""
            return ApiError(
                f"the {kind}key is missing or wrong", status=401, code="invalid_api_key"
            )
        return None


def _foreign(headers: Headers) -> bool:
    """Whether a browser sends it on behalf of a page that is not ours. Other clients send no
    Origin."""
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != headers.get("host")
