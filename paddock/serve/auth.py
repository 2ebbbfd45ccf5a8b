"""Authentication middleware: API keys, cross-site requests, DNS rebinding."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from paddock.api import protocol_for_path
from paddock.http import api_key_from_headers, error_response, is_allowed_host, is_cross_site
from paddock.records import ApiError
from paddock.serve.routes.admin import ADMIN_PATHS
from paddock.serve.settings import ApiKeys, ServeSettings

PUBLIC_PATHS = frozenset({"/", "/health", "/ping"})  # they reveal nothing and cost nothing
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class AuthMiddleware:
    """Checks every HTTP request before it reaches a route."""

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
        """The error for a request that is not allowed, or None."""
        if path in PUBLIC_PATHS and method in SAFE_METHODS:
            return None
        admin = path.rstrip("/") in ADMIN_PATHS
        # Admin routes have side effects whatever the method: SGLang clients flush with GET.
        if (admin or method not in SAFE_METHODS) and is_cross_site(headers):
            return ApiError("cross-site requests are not allowed", status=403)
        if self._is_rebound(headers):
            return ApiError(
                f"the Host header must name this machine by address, as localhost or by a name "
                f"given with --allowed-host, got {headers.get('host', '')!r:.80}",
                status=403,
            )
        if admin and self.settings.is_public and self.keys.admin is None:
            return ApiError(
                f"{path} is disabled: admin routes on a public address require an admin key "
                "(--admin-key)",
                status=403,
            )
        if not self.keys.allows(api_key_from_headers(headers), admin_route=admin):
            kind = "admin " if admin and self.keys.admin else ""
            return ApiError(f"missing or invalid {kind}API key", status=401, code="invalid_api_key")
        return None

    def _is_rebound(self, headers: Headers) -> bool:
        """Whether the Host header may belong to a DNS rebinding attack. A required API key already
        stops it, and a public address has names that are not known here."""
        settings = self.settings
        if settings.is_public or self.keys.api is not None:
            return False
        return not is_allowed_host(headers.get("host"), settings.allowed_hosts)
