"""POST of JSON to an HTTP endpoint, with retries."""

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
    """The endpoint gave no usable reply; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonEndpoint:
    url: str
    key_file: str = ""  # bearer token; a file, so that recipes contain no keys
    seconds: float = 60.0  # per try
    tries: int = 3
    pause_s: float = 0.5  # before the second try; doubled before each further one
    sleep: Callable[[float], Awaitable[None]] = field(default=asyncio.sleep, repr=False)

    async def post(self, body: Mapping[str, Any], parse: Callable[[Any], T]) -> T:
        """POST `body` and return `parse(reply)`. Connection errors, 5xx and retryable 4xx statuses,
        and replies for which `parse` raises ValueError are retried; other 4xx statuses are not."""
        error_text = ""
        for attempt in range(self.tries):
            if attempt:
                await self.sleep(self.pause_s * 2 ** (attempt - 1))
            try:
                return parse(await self._once(body))
            except (_RetryableError, ValueError) as error:
                error_text = str(error)
        raise EndpointError(f"{self.url}: {error_text} (tried {self.tries} times)")

    async def _once(self, body: Mapping[str, Any]) -> Any:
        headers = {"authorization": f"Bearer {self._key()}"} if self.key_file else {}
        try:
            async with httpx.AsyncClient(verify=_ssl_context(), timeout=self.seconds) as client:
                # httpx limits each read; this limits the whole reply of a slow server.
                async with asyncio.timeout(self.seconds):
                    reply = await client.post(self.url, json=body, headers=headers)
        except (httpx.TimeoutException, TimeoutError):
            raise _RetryableError(f"no reply within {self.seconds:g} s") from None
        except httpx.HTTPError as error:
            raise _RetryableError(f"{type(error).__name__}: {error}") from None
        if reply.status_code in (408, 409, 425, 429) or reply.status_code >= 500:
            raise _RetryableError(f"HTTP {reply.status_code}: {reply.text[:200]}")
        if reply.status_code >= 400:
            raise EndpointError(f"{self.url}: HTTP {reply.status_code}: {reply.text[:200]}")
        return reply.json()

    def _key(self) -> str:
        try:
            return Path(self.key_file).read_text().strip()
        except OSError as error:
            raise EndpointError(
                f"{self.key_file}: {error.strerror}; cannot read the API key"
            ) from None


class _RetryableError(Exception):
    pass


@cache
def _ssl_context() -> ssl.SSLContext:
    return httpx.create_ssl_context()  # slow to create
