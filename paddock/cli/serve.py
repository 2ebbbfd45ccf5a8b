"""The verb that serves a model over HTTP."""

import logging
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paddock.cli.errors import UserError
from paddock.cli.units import format_bytes, format_count, parse_size
from paddock.http import bind_socket, socket_url
from paddock.launch.engines import (
    CACHE_BYTES,
    ModelFolder,
    default_sampling,
    load_engines,
    open_model_folder,
    pick_devices,
    pick_dtype,
)
from paddock.launch.engines import default_prefill_tokens as tokens_of_a_step

if TYPE_CHECKING:
    from paddock.engine import Engine, EngineSettings
    from paddock.serve import ApiKeys, ServeSettings

SHUTDOWN_TIMEOUT_S = 3  # for requests that still run when the server is told to stop


def serve(  # noqa: PLR0913  the command line
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A checkpoint with tokenizer, or a run.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = 8000,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A name it is reached by, behind a proxy say."),
    ] = None,
    dp: Annotated[int, typer.Option(min=1, help="Replicas, each with its own weights.")] = 1,
    api_key: Annotated[
        str | None, typer.Option(envvar="PADDOCK_API_KEY", help="What clients must show.")
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(envvar="PADDOCK_ADMIN_KEY", help="What control routes must be shown."),
    ] = None,
    mtp: Annotated[int, typer.Option(min=0, max=5, help="Tokens drafted ahead.")] = 0,
    memory: Annotated[
        str | None, typer.Option(help="The cache of a replica, such as 4GB. Default: what is free.")
    ] = None,
    pages: Annotated[int | None, typer.Option(min=1, help="The same, in pages.")] = None,
    context: Annotated[int | None, typer.Option(min=2, help="Tokens of a request at most.")] = None,
    max_running: Annotated[int, typer.Option(min=1, help="Requests answered at once.")] = 32,
    step_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Prompt tokens of one step. Default: by the device's memory."),
    ] = None,
    served_name: Annotated[
        list[str] | None,
        typer.Option(help="What clients call it, several times if they differ. Default: FOLDER's."),
    ] = None,
    template_version: Annotated[
        Literal["5", "5.1", "5.2", "5.3"] | None,
        typer.Option(help="GLM-5's chat template, in place of the folder's."),
    ] = None,
    dtype: Annotated[Literal["float32", "bfloat16"] | None, typer.Option()] = None,
    device: Annotated[str | None, typer.Option(help="Default: accelerators, else cpu.")] = None,
    replay: Annotated[bool, typer.Option(help="Keep experts and keys for trainers.")] = False,
    clear_thinking: Annotated[
        bool, typer.Option(help="Forget thoughts before the last user message, by default.")
    ] = False,
    keep_responses: Annotated[
        int, typer.Option(min=0, help="For previous_response_id, an hour long; 0: none.")
    ] = 1000,
    metrics_prefix: Annotated[str, typer.Option(help="Of the names of metrics.")] = "sglang:",
    log_requests: Annotated[bool, typer.Option(help="A line for every request.")] = True,
) -> None:
    """Serve a model: OpenAI, Anthropic and SGLang clients, trainers, and a chat page."""
    from paddock.engine import EngineSettings
    from paddock.serve import ApiKeys, ServeSettings

    if memory is not None and pages is not None:
        raise UserError("--memory and --pages say the same thing: give one of them")
    _log(log_requests)
    model = open_model_folder(folder, template_version)
    stops = tuple(dict.fromkeys((*model.config.eos, *model.renderer.stop_token_ids)))
    settings = EngineSettings(
        kv_cache_bytes=parse_size(memory) if memory else CACHE_BYTES,
        num_pages=pages,
        context_length=context,
        max_running_requests=max_running,
        max_prefill_tokens=step_tokens or tokens_of_a_step(pick_devices(device, dp)[0]),
        num_speculative_tokens=mtp,
        capture_routing=replay,
        stop_token_ids=stops or None,
    )
    names = served_name or [folder.resolve().name]
    shown = ServeSettings(
        host=host,
        allowed_hosts=tuple(allowed_host or ()),
        served_model_name=names[0],
        served_model_aliases=tuple(names[1:]),
        model_path=str(folder),
        metrics_prefix=metrics_prefix,
        clear_thinking=clear_thinking,
        max_stored_responses=keep_responses,
        **default_sampling(folder),
    )
    keys = ApiKeys(api=api_key, admin=admin_key)
    _warn(shown, keys)
    with bind_socket(host, port) as sock:
        _run(
            model, settings, shown, keys, ServerPlacement(sock, dp, device, dtype, memory or pages)
        )


class ServerPlacement:
    """Where the server listens and its engines run."""

    def __init__(
        self, sock: socket.socket, dp: int, device: str | None, dtype: str | None, cache: Any
    ) -> None:
        self.sock, self.devices = sock, pick_devices(device, dp)
        self.dtype, self.fits = dtype, cache is None

    @property
    def url(self) -> str:
        return socket_url(self.sock)


def _run(
    model: ModelFolder,
    settings: "EngineSettings",
    shown: "ServeSettings",
    keys: "ApiKeys",
    place: ServerPlacement,
) -> None:
    import uvicorn

    from paddock.engine import EngineWeightUpdater, resolve_kv_cache_config
    from paddock.http import uvicorn_config
    from paddock.serve import build_app

    started = time.monotonic()
    dtype = pick_dtype(model.folder, place.devices[0], place.dtype)
    if not place.fits:  # refuse what cannot be before the weights are read
        resolve_kv_cache_config(settings, model.config, 2 if dtype == "bfloat16" else 4)
    engines = load_engines(model, place.devices, dtype, settings, fits=place.fits)
    try:
        weights = [EngineWeightUpdater(engine) for engine in engines]
        app = build_app(engines, model.tokenizer, model.renderer, shown, keys=keys, weights=weights)
        config = uvicorn_config(app, timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S)
        _introduce(model, engines, shown, place, dtype)
        place.sock.listen(config.backlog)  # whoever reads "ready" may already knock
        typer.echo(f"ready in {time.monotonic() - started:.1f} s; Ctrl-C ends it")
        uvicorn.Server(config).run(sockets=[place.sock])
    except KeyboardInterrupt:
        pass  # uvicorn has closed everything and passes the signal on
    finally:
        for engine in engines:
            engine.close()
    typer.echo("stopped")


def _introduce(
    model: ModelFolder,
    engines: "list[Engine]",
    shown: "ServeSettings",
    place: ServerPlacement,
    dtype: str,
) -> None:
    found, url = engines[0].capacity, place.url
    parameters = sum(
        p.numel() for p in engines[0].run_between_steps(lambda n: list(n.parameters())).result()
    )
    cache = format_bytes(found.tokens * found.bytes_per_token)
    most = engines[0].settings.max_running_requests
    whole = min(most, found.tokens // found.context_length)
    where = ", ".join(dict.fromkeys(place.devices))
    curl = (
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"""-d '{{"messages": [{{"role": "user", "content": "Hello"}}]}}'"""
    )
    template = getattr(model.renderer, "version", None)
    for name, text in {
        "model": f"{shown.served_model_name}: {model.config.family}, {format_count(parameters)} parameters, "
        f"{dtype} on {where}, {len(engines)} replica{'s' * (len(engines) > 1)}",
        "template": f"GLM-{template}" if template else "the folder's own",
        "context": f"{found.context_length:,} tokens",
        "cache": f"{found.tokens:,} tokens in {found.num_pages:,} pages, {cache} a replica",
        "requests": f"{most} at once a replica, {whole} of them at full context",
        "prefill": f"{engines[0].settings.max_prefill_tokens:,} prompt tokens a step",
        "drafts": f"{engines[0].settings.num_speculative_tokens} tokens ahead",
        "chat page": url,
        "OpenAI": f"{url}/v1",
        "Anthropic": url,
        "SGLang": f"{url}/generate",
        "try": curl,
    }.items():
        typer.echo(f"{name:<10} {text}")


def _warn(shown: "ServeSettings", keys: "ApiKeys") -> None:
    if shown.is_public and keys.api is None:
        typer.echo(
            f"warning: anyone who reaches {shown.host} may use this; see --api-key", err=True
        )
    if shown.is_public and keys.admin is None:
        typer.echo("control routes are closed: no --admin-key on a public address", err=True)


def _log(requests: bool) -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("paddock").setLevel(logging.INFO if requests else logging.WARNING)
