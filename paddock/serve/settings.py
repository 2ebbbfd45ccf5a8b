"""Settings and API keys of the inference server."""

from dataclasses import dataclass
from hmac import compare_digest
from ipaddress import ip_address

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from paddock.config import BaseSettings, ConfigError


class ServeSettings(BaseSettings):
    host: str = "127.0.0.1"
    allowed_hosts: tuple[
        str, ...
    ] = ()  # host names that clients may use, for example behind a proxy
    served_model_name: str = "paddock"
    served_model_aliases: tuple[str, ...] = ()  # other accepted model names
    model_path: str = ""
    metrics_prefix: str = "sglang:"
    incremental_streaming_output: bool = False  # /generate streams deltas, not the text so far
    max_body_bytes: PositiveInt = 32 << 20  # longer bodies are rejected
    max_weights_body_bytes: PositiveInt = 8 << 30  # of weight updates
    clear_thinking: bool = False  # default of requests; True defeats the prefix cache
    enable_thinking: bool = True  # default of requests
    temperature: float = 1.0  # sampling defaults of chat requests
    top_p: float = 1.0
    top_k: PositiveInt | None = None
    max_stored_responses: NonNegativeInt = 1000  # for previous_response_id; 0 stores none
    stored_responses_ttl_s: PositiveFloat = 3600.0
    max_stored_responses_bytes: PositiveInt = 256 << 20
    health_timeout_s: PositiveFloat = 20.0  # /health_generate fails after this time

    @property
    def served_model_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.served_model_name, *self.served_model_aliases)))

    @property
    def is_public(self) -> bool:
        """Whether the server is reachable from other machines."""
        if self.host == "localhost":
            return False
        try:
            return not ip_address(self.host).is_loopback
        except ValueError:
            return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKeys:
    """API keys that clients must send. `admin` grants everything; `api` grants all but the admin
    routes, and these too if there is no admin key."""

    api: str | None = None
    admin: str | None = None

    def __post_init__(self) -> None:
        for name in ("api", "admin"):
            if getattr(self, name) == "":
                raise ConfigError(f"the {name} key must not be empty")

    def allows(self, key: str | None, *, admin_route: bool) -> bool:
        """Whether `key` grants access, compared in constant time.

        >>> keys = ApiKeys(api="a", admin="b")
        >>> keys.allows("a", admin_route=False), keys.allows("a", admin_route=True)
        (True, False)
        >>> keys.allows("b", admin_route=True), ApiKeys().allows(None, admin_route=True)
        (True, True)
        """
        candidates = [self.admin or self.api] if admin_route else [self.api, self.admin]
        accepted = [key for key in candidates if key is not None]
        if self.api is None and not admin_route:
            return True
        if not accepted:
            return True
        sent = (key or "").encode()
        return any(compare_digest(sent, key.encode()) for key in accepted)
