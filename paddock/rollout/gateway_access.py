"""API key checks of the gateway's routes."""

from dataclasses import dataclass

from starlette.requests import Request

from paddock.http import api_key_from_headers, has_api_key
from paddock.records import ApiError
from paddock.rollout.session_manager import LiveSession, SessionManager

SESSION_PATH = "/sessions/{session}"
AGENT_BASES = ("", SESSION_PATH)  # of an agent's routes: its key alone finds its session


@dataclass(frozen=True, slots=True)
class GatewayAccess:
    """Who may use a route. Each check raises ApiError if the key is missing or invalid."""

    sessions: SessionManager
    admin_key: str | None = None
    worker_key: str | None = None  # of those who take rollouts for agents

    def admin(self, http: Request) -> None:
        if self.admin_key is None:
            what = "disabled: this gateway was started without an admin key"
            raise ApiError(f"{http.url.path} is {what}", status=403)
        if not has_api_key(http.headers, self.admin_key):
            raise ApiError("missing or invalid admin key", status=401, code="invalid_api_key")

    def worker(self, http: Request) -> None:
        if not any(has_api_key(http.headers, key) for key in (self.worker_key, self.admin_key)):
            raise ApiError("missing or invalid worker key", status=401, code="invalid_api_key")

    def agent(self, http: Request) -> None:
        self.session_of(http).touch()

    def grader(self, http: Request) -> None:
        session = http.path_params["session"]
        live = self.sessions.get(session)
        known = (self.admin_key, None if live is None else live.verdict_key)
        if not any(has_api_key(http.headers, key) for key in known):
            raise _no_access(session)

    def agent_or_admin(self, http: Request) -> None:
        if not has_api_key(http.headers, self.admin_key):
            self.session_of(http)

    def session_of(self, http: Request) -> LiveSession:
        """The session of an agent's request."""
        named, key = http.path_params.get("session"), api_key_from_headers(http.headers)
        live = self.sessions.with_key(key)
        if live is None or named not in (None, live.session.id):
            raise _no_access(named)
        return live


def _no_access(session: str | None) -> ApiError:
    # The same error if the session does not exist: it reveals nothing about other sessions.
    where = "" if session is None else f"session {session!r:.80}: "
    what = "missing or invalid API key, or the session is closed"
    return ApiError(f"{where}{what}", status=401, code="invalid_api_key")
