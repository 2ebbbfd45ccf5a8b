"""Who may come in: keys, and pages of other sites."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from paddock.api import protocol_for_path
from paddock.http import api_key_from_headers, error_response, is_allowed_host, is_cross_site
from paddock.records import ApiError
from paddock.serve.routes.admin import ADMIN_PATHS
from paddock.serve.settings import ApiKeys, ServeSettings

PUBLIC_PATHS = frozenset({"/", "/health", "/ping"})  # they tell nothing and cost nothing
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class AuthMiddleware:
    """Stands before every route."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, settings: ServeSettings) -> None:
        self.app, self.keys, self.settings = app, keys, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        error = self.find_error(scope["method"], scope["path"], Headers(scope=scope))
        if error is None:
            await self.app(scope, receive, send)
        else:
            await error_response(protocol_for_path(scope["path"]), error)(scope, receive, send)

    def find_error(self, method: str, path: str, headers: Headers) -> ApiError | None:
        """Why a request may not pass, if it may not."""
        if path in PUBLIC_PATHS and method in SAFE_METHODS:
            return None
        control = path.rstrip("/") in ADMIN_PATHS
        # Control routes change things whatever the method: SGLang's clients flush with a GET.
        if (control or method not in SAFE_METHODS) and is_cross_site(headers):
            return ApiError("requests from pages of other sites are refused", status=403)
        if self._is_rebound(headers):
            return ApiError(
                f"the Host header must name this machine by address, as localhost or by a name "
                f"given with --allowed-host, got {headers.get('host', '')!r:.80}",
                status=403,
            )
        if control and self.settings.is_public and self.keys.admin is None:
            return ApiError(
                f"{path} is closed: on a public address control routes need an admin key",
                status=403,
            )
        if not self.keys.allows(api_key_from_headers(headers), control=control):
            kind = "admin " if control and self.keys.admin else ""
            return ApiError(
                f"the {kind}key is missing or wrong", status=401, code="invalid_api_key"
            )
        return None

    def _is_rebound(self, headers: Headers) -> bool:
        """Whether a page may have pointed its own name here (DNS rebinding). No page knows a key,
        and a public address is reached by names that we cannot know."""
        settings = self.settings
        if settings.is_public or self.keys.api is not None:
            return False
        return not is_allowed_host(headers.get("host"), settings.allowed_hosts)
