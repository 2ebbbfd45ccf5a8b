"""A real server on a free local port, in a thread of the test."""

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import uvicorn

from paddock.checkpoint import load_pretrained
from paddock.engine import Engine, EngineSettings
from paddock.serve import ApiKeys, ServeSettings, build_app
from paddock.text import Renderer, Tokenizer, get_renderer
from tests.patience import PATIENCE_S, until


@dataclass(frozen=True, slots=True)
class Live:
    url: str
    engines: list[Engine]
    tokenizer: Tokenizer
    renderer: Renderer
    service: Any
    loops: list[
        asyncio.AbstractEventLoop
    ]  # event loop of the server thread, after its first request
    http: httpx.Client

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return self.http.post(path, json=body, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.http.get(path, **more)

    def settle(self) -> None:
        """Wait until no request is running."""
        busy = lambda e: e.stats().running + e.stats().waiting  # noqa: E731
        until(lambda: not self.service.live and not any(map(busy, self.engines)))

    def audit(self) -> list[str]:
        """Leftover resources once no request is running; should be empty."""
        self.settle()
        left = [line for engine in self.engines for line in engine.audit()]
        left += [f"session {name}" for name in self.service.sessions]
        left += [f"replica {i} load {n}" for i, n in enumerate(self.service.replicas.loads) if n]
        return left

    def tasks(self) -> list[str]:
        """Tasks of the server's event loop, except those of uvicorn."""

        async def ours() -> list[str]:
            every = (task.get_coro().__qualname__ for task in asyncio.all_tasks())
            return [name for name in every if "uvicorn" not in name and "Server" not in name]

        found = asyncio.run_coroutine_threadsafe(ours(), self.loops[0]).result(timeout=PATIENCE_S)
        found.remove("Live.tasks.<locals>.ours")
        return found


@contextmanager
def serving(
    folder: Path,
    *,
    replicas: int = 1,
    keys: ApiKeys | None = None,
    engine: dict[str, Any] | None = None,
    weights: Callable[[Engine], Any] | None = None,
    **settings: Any,
) -> Iterator[Live]:
    tokenizer = Tokenizer.load(folder)
    renderer = get_renderer(tokenizer)
    chosen = EngineSettings(
        **({"kv_cache_bytes": 1 << 22, "max_running_requests": 8} | (engine or {}))
    )
    engines = [Engine(load_pretrained(folder), tokenizer, chosen) for _ in range(replicas)]
    names = {"served_model_name": "tiny", "served_model_aliases": ("m", "glm-5[1m]")}
    values = names | {"model_path": str(folder)} | settings
    updaters = [weights(each) for each in engines] if weights else []
    serve_settings = ServeSettings(**values)
    app = build_app(engines, tokenizer, renderer, serve_settings, keys=keys, weights=updaters)
    loops: list[asyncio.AbstractEventLoop] = []

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        loops[:] = [asyncio.get_running_loop()]
        await app(scope, receive, send)

    with listening(watched) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield Live(url, engines, tokenizer, renderer, app.state.service, loops, http)
    for each in engines:
        each.close()


@contextmanager
def listening(app: Any) -> Iterator[str]:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=PATIENCE_S)
        sock.close()
        assert not thread.is_alive(), "the server did not stop"
