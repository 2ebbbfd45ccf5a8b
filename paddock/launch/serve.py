"""A model served over HTTP: sockets, engines, the app and uvicorn."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paddock.launch.engines import (
    CACHE_BYTES,
    ModelFolder,
    Quant,
    default_prefill_tokens,
    default_sampling,
    load_engines,
    open_model_folder,
    pick_devices,
    pick_dtype,
)
from paddock.launch.errors import UserError
from paddock.launch.settings import StrPath
from paddock.launch.units import parse_size

if TYPE_CHECKING:
    from uvicorn import Server

    from paddock.engine import Engine, EngineSettings
    from paddock.serve import ApiKeys, ServeSettings
    from paddock.text import GlmVersion

SHUTDOWN_TIMEOUT_S = 3  # for requests that still run when the server is stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of a server, as `paddock serve` names them."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    allowed_hosts: tuple[str, ...] = ()
    dp_size: int = 1
    api_key: str | None = None
    admin_key: str | None = None
    num_speculative_tokens: int = 0
    kv_cache_memory: str | None = None  # such as "4GB"; by default what is free
    num_pages: int | None = None
    context_length: int | None = None
    max_running_requests: int = 32
    max_prefill_tokens: int | None = None
    served_model_names: tuple[str, ...] = ()  # by default the folder's name
    chat_template: "GlmVersion | None" = None
    dtype: str | None = None
    quant: Quant | None = None
    device: str | None = None
    capture_routing: bool = False
    clear_thinking: bool = False
    max_stored_responses: int = 1000
    metrics_prefix: str = "sglang:"


@dataclass(frozen=True, slots=True)
class LoadedEngines:
    """Engines with their weights, and the bound socket of their server."""

    sock: socket.socket
    model: ModelFolder
    engines: "list[Engine]"
    devices: list[str]
    dtype: str
    started: float  # of the monotonic clock, before loading

    @property
    def url(self) -> str:
        from paddock.http import socket_url

        return socket_url(self.sock)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """A server that is ready for requests."""

    url: str
    model: ModelFolder
    engines: "list[Engine]"
    settings: "ServeSettings"
    devices: list[str]
    dtype: str
    startup_s: float


def serve(
    folder: StrPath,
    options: ServeOptions | None = None,
    *,
    on_ready: Callable[[ServerInfo], None] | None = None,
) -> None:
    """Serve a checkpoint or a run's newest one until interrupted (Ctrl-C, SIGTERM).

    `on_ready` is called once requests are accepted. Raises UserError for options that contradict
    each other or a folder that cannot chat.
    """
    with _prepared(Path(folder), options or ServeOptions()) as (server, info, sock):
        if on_ready is not None:
            on_ready(info)
        with suppress(KeyboardInterrupt):  # uvicorn has shut down and raises the signal again
            server.run(sockets=[sock])


@contextmanager
def open_server(folder: StrPath, options: ServeOptions | None = None) -> Iterator[ServerInfo]:
    """A server in a thread of this process, for scripts and notebooks; it stops at the end."""
    chosen = options or ServeOptions(port=0)
    with _prepared(Path(folder), chosen) as (server, info, sock):
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        try:
            while not server.started and thread.is_alive():
                time.sleep(0.01)
            yield info
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def _prepared(
    folder: Path, options: ServeOptions
) -> "Iterator[tuple[Server, ServerInfo, socket.socket]]":
    """Loaded engines behind a listening socket; both are closed at the end."""
    import uvicorn

    from paddock.engine import EngineWeightUpdater
    from paddock.http import uvicorn_config
    from paddock.serve import build_app

    settings, keys = serve_settings(folder, options), _api_keys(options)
    with open_engines(folder, options) as loaded:
        weights = [EngineWeightUpdater(engine) for engine in loaded.engines]
        model = loaded.model
        app = build_app(
            loaded.engines, model.tokenizer, model.renderer, settings, keys=keys, weights=weights
        )
        config = uvicorn_config(app, timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S)
        loaded.sock.listen(config.backlog)  # connections are accepted as soon as on_ready is called
        info = ServerInfo(
            url=loaded.url,
            model=model,
            engines=loaded.engines,
            settings=settings,
            devices=loaded.devices,
            dtype=loaded.dtype,
            startup_s=time.monotonic() - loaded.started,
        )
        yield uvicorn.Server(config), info, loaded.sock


@contextmanager
def open_engines(folder: Path, options: ServeOptions) -> "Iterator[LoadedEngines]":
    """Engines with the weights of a folder, and the socket their server will listen on."""
    from paddock.engine import resolve_kv_cache_config
    from paddock.http import bind_socket

    if options.kv_cache_memory is not None and options.num_pages is not None:
        raise UserError("--kv-cache-memory and --num-pages exclude each other")
    model = open_model_folder(folder, options.chat_template)
    engine_settings = _engine_settings(model, options)
    with bind_socket(options.host, options.port) as sock:
        fits = (options.kv_cache_memory or options.num_pages) is None
        devices, started = pick_devices(options.device, options.dp_size), time.monotonic()
        dtype = pick_dtype(model.folder, devices[0], options.dtype)
        if not fits:  # refuse an impossible cache before the weights are loaded
            itemsize = 2 if dtype == "bfloat16" else 4
            resolve_kv_cache_config(engine_settings, model.config, itemsize)
        engines = load_engines(
            *(model, devices, dtype, engine_settings),
            fits=fits,
            compile_kernels=False,
            quant=options.quant,
        )
        try:
            yield LoadedEngines(sock, model, engines, devices, dtype, started)
        finally:
            for engine in engines:
                engine.close()


def _engine_settings(model: ModelFolder, options: ServeOptions) -> "EngineSettings":
    from paddock.engine import EngineSettings

    first, *_ = pick_devices(options.device, options.dp_size)
    stops = tuple(dict.fromkeys((*model.config.eos, *model.renderer.stop_token_ids)))
    memory = options.kv_cache_memory
    return EngineSettings(
        kv_cache_bytes=parse_size(memory) if memory else CACHE_BYTES,
        num_pages=options.num_pages,
        context_length=options.context_length,
        max_running_requests=options.max_running_requests,
        max_prefill_tokens=options.max_prefill_tokens or default_prefill_tokens(first),
        num_speculative_tokens=options.num_speculative_tokens,
        capture_routing=options.capture_routing,
        stop_token_ids=stops or None,
    )


def serve_settings(folder: Path, options: ServeOptions) -> "ServeSettings":
    """The settings of the HTTP server."""
    from paddock.serve import ServeSettings

    names = options.served_model_names or (folder.resolve().name,)
    return ServeSettings(
        host=options.host,
        allowed_hosts=options.allowed_hosts,
        served_model_name=names[0],
        served_model_aliases=tuple(names[1:]),
        model_path=str(folder),
        metrics_prefix=options.metrics_prefix,
        clear_thinking=options.clear_thinking,
        max_stored_responses=options.max_stored_responses,
        **default_sampling(folder),
    )


def _api_keys(options: ServeOptions) -> "ApiKeys":
    from paddock.serve import ApiKeys

    return ApiKeys(api=options.api_key, admin=options.admin_key)
