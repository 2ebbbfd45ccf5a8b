"""JSON to an HTTP endpoint and back, tried again where that may help."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import httpx

T = TypeVar("T")


class EndpointError(Exception):
    """No usable answer came, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonEndpoint:
    url: str
    key_file: str = ""  # of a bearer token; a file, so that no recipe holds the key
    seconds: float = 60.0  # for one try
    tries: int = 3
    pause_s: float = 0.5  # before the second try, twice as long before each further one
    sleep: Callable[[float], Awaitable[None]] = field(default=asyncio.sleep, repr=False)

    async def post(self, body: Mapping[str, Any], read: Callable[[Any], T]) -> T:
        """What `read` makes of the reply. A lost connection, a busy or broken server and a reply
        that `read` refuses with ValueError are tried again; a refusal of ours is not."""
        said = ""
        for attempt in range(self.tries):
            if attempt:
                await self.sleep(self.pause_s * 2 ** (attempt - 1))
            try:
                return read(await self._once(body))
            except (_Again, ValueError) as error:
                said = str(error)
        raise EndpointError(f"{self.url}: {said} (tried {self.tries} times)")

    async def _once(self, body: Mapping[str, Any]) -> Any:
        headers = {"authorization": f"Bearer {self._key()}"} if self.key_file else {}
        try:
            async with httpx.AsyncClient(verify=_certificates(), timeout=self.seconds) as client:
                # httpx limits each read; a server that drips bytes is limited here.
                async with asyncio.timeout(self.seconds):
                    reply = await client.post(self.url, json=body, headers=headers)
        except (httpx.TimeoutException, TimeoutError):
            raise _Again(f"no reply within {self.seconds:g} s") from None
        except httpx.HTTPError as error:
            raise _Again(f"{type(error).__name__}: {error}") from None
        if reply.status_code in (408, 409, 425, 429) or reply.status_code >= 500:
            raise _Again(f"HTTP {reply.status_code}: {reply.text[:200]}")
        if reply.status_code >= 400:
            raise EndpointError(f"{self.url}: HTTP {reply.status_code}: {reply.text[:200]}")
        return reply.json()

    def _key(self) -> str:
        try:
            return Path(self.key_file).read_text().strip()
        except OSError as error:
            raise EndpointError(f"{self.key_file}: {error.strerror}, so there is no key") from None


class _Again(Exception):
    pass


@cache
def _certificates() -> ssl.SSLContext:
    return httpx.create_ssl_context()  # slow to make, the same for all
