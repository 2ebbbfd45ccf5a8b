"""How a server presents itself, decided before it starts."""

from dataclasses import dataclass
from hmac import compare_digest
from ipaddress import ip_address

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from paddock.config import BaseSettings, ConfigError


class ServeSettings(BaseSettings):
    host: str = "127.0.0.1"
    allowed_hosts: tuple[str, ...] = ()  # names it is reached by, behind a proxy say
    served_model_name: str = "paddock"
    served_model_aliases: tuple[
        str, ...
    ] = ()  # other names under which clients may ask for the model
    model_path: str = ""
    metrics_prefix: str = "sglang:"
    incremental_streaming_output: bool = False  # /generate streams what is new, not all so far
    max_body_bytes: PositiveInt = 32 << 20  # longer requests are refused
    max_weights_body_bytes: PositiveInt = 8 << 30  # but for weights
    clear_thinking: bool = False  # where a request says nothing; True breaks the prefix cache
    enable_thinking: bool = True  # likewise
    temperature: float = 1.0  # of chats that bring none, and so on
    top_p: float = 1.0
    top_k: PositiveInt | None = None
    max_stored_responses: NonNegativeInt = 1000  # for previous_response_id; 0: none
    stored_responses_ttl_s: PositiveFloat = 3600.0
    max_stored_responses_bytes: PositiveInt = 256 << 20
    health_timeout_s: PositiveFloat = 20.0  # how long one token may take before health is doubted

    @property
    def served_model_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.served_model_name, *self.served_model_aliases)))

    @property
    def is_public(self) -> bool:
        """Whether others than this machine can reach it."""
        if self.host == "localhost":
            return False
        try:
            return not ip_address(self.host).is_loopback
        except ValueError:
            return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKeys:
    """What callers must show. `admin` opens everything, `api` all but control routes unless there
    is no admin key."""

    api: str | None = None
    admin: str | None = None

    def __post_init__(self) -> None:
        for name in ("api", "admin"):
            if getattr(self, name) == "":
                raise ConfigError(f"the {name} key is empty")

    def allows(self, shown: str | None, *, control: bool) -> bool:
        """Compared in constant time.

        >>> keys = ApiKeys(api="a", admin="b")
        >>> keys.allows("a", control=False), keys.allows("a", control=True)
        (True, False)
        >>> keys.allows("b", control=True), ApiKeys().allows(None, control=True)
        (True, True)
        """
        needed = [self.admin or self.api] if control else [self.api, self.admin]
        known = [key for key in needed if key is not None]
        if self.api is None and not control:
            return True
        if not known:
            return True
        given = (shown or "").encode()
        return any(compare_digest(given, key.encode()) for key in known)
