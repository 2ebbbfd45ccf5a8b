"""`paddock serve`: a model over HTTP."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from paddock import launch
from paddock.cli.options import QuantOption
from paddock.launch import units

if TYPE_CHECKING:
    from paddock.serve import ServeSettings

AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="A host name of this server, for example of a proxy."),
]
ApiKey = Annotated[
    str | None, typer.Option(envvar="PADDOCK_API_KEY", help="API key that clients must send.")
]
AdminKey = Annotated[
    str | None,
    typer.Option(envvar="PADDOCK_ADMIN_KEY", help="API key that admin routes require."),
]
SpeculativeTokens = Annotated[
    int, typer.Option(min=0, max=5, help="Speculative (MTP) tokens per step.")
]
MaxPrefillTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Prefill tokens per step. Default: by the device's memory."),
]
ServedNames = Annotated[
    list[str] | None,
    typer.Option(help="Model name in the API; may be repeated. Default: FOLDER's."),
]
ChatTemplate = Annotated[
    Literal["5", "5.1", "5.2", "5.3"] | None,
    typer.Option(help="A version of GLM-5's chat template, in place of the folder's."),
]


def serve(  # noqa: PLR0913  one option each
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A checkpoint with tokenizer, or a run.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = 8000,
    allowed_host: AllowedHosts = None,
    dp_size: Annotated[int, typer.Option(min=1, help="Replicas, each with its own weights.")] = 1,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
    num_speculative_tokens: SpeculativeTokens = 0,
    kv_cache_memory: Annotated[
        str | None, typer.Option(help="KV cache per replica, such as 4GB. Default: what is free.")
    ] = None,
    num_pages: Annotated[int | None, typer.Option(min=1, help="The same, in pages.")] = None,
    context_length: Annotated[
        int | None, typer.Option(min=2, help="Max tokens of a request.")
    ] = None,
    max_running_requests: Annotated[
        int, typer.Option(min=1, help="Max running requests per replica.")
    ] = 32,
    max_prefill_tokens: MaxPrefillTokens = None,
    served_model_name: ServedNames = None,
    chat_template: ChatTemplate = None,
    dtype: Annotated[Literal["float32", "bfloat16"] | None, typer.Option()] = None,
    quant: QuantOption = None,
    device: Annotated[str | None, typer.Option(help="Default: accelerators, else cpu.")] = None,
    capture_routing: Annotated[
        bool, typer.Option(help="Return routed experts and selected tokens to trainers.")
    ] = False,
    clear_thinking: Annotated[
        bool, typer.Option(help="Drop reasoning from before the last user message by default.")
    ] = False,
    max_stored_responses: Annotated[
        int, typer.Option(min=0, help="For previous_response_id, kept for an hour; 0: none.")
    ] = 1000,
    metrics_prefix: Annotated[str, typer.Option(help="Prefix of metric names.")] = "sglang:",
    log_requests: Annotated[bool, typer.Option(help="Log a line for every request.")] = True,
) -> None:
    """Serve a model: OpenAI, Anthropic and SGLang clients, trainers, and a chat page."""
    options = launch.ServeOptions(
        host=host,
        port=port,
        allowed_hosts=tuple(allowed_host or ()),
        dp_size=dp_size,
        api_key=api_key,
        admin_key=admin_key,
        num_speculative_tokens=num_speculative_tokens,
        kv_cache_memory=kv_cache_memory,
        num_pages=num_pages,
        context_length=context_length,
        max_running_requests=max_running_requests,
        max_prefill_tokens=max_prefill_tokens,
        served_model_names=tuple(served_model_name or ()),
        chat_template=chat_template,
        dtype=dtype,
        quant=quant,
        device=device,
        capture_routing=capture_routing,
        clear_thinking=clear_thinking,
        max_stored_responses=max_stored_responses,
        metrics_prefix=metrics_prefix,
    )
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("paddock").setLevel(logging.INFO if log_requests else logging.WARNING)

    def on_ready(info: launch.ServerInfo) -> None:
        _warn(info.settings, options)
        _print_info(info)
        typer.echo(f"ready in {info.startup_s:.1f} s; press Ctrl-C to stop")

    launch.serve(folder, options, on_ready=on_ready)
    typer.echo("stopped")


def _print_info(info: launch.ServerInfo) -> None:
    from paddock.model import cost

    engine, replicas, url = info.engines[0], len(info.engines), info.url
    capacity = engine.capacity
    parameters = cost.count_parameters(info.model.config).total
    memory = units.format_bytes(capacity.tokens * capacity.bytes_per_token)
    max_running = engine.settings.max_running_requests
    at_full_context = min(max_running, capacity.tokens // capacity.context_length)
    curl = (
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"""-d '{{"messages": [{{"role": "user", "content": "Hello"}}]}}'"""
    )
    template = getattr(info.model.renderer, "version", None)
    for name, text in {
        "model": f"{info.settings.served_model_name}: {info.model.config.family}, "
        f"{units.format_count(parameters)} parameters, {info.dtype} on "
        f"{', '.join(dict.fromkeys(info.devices))}, {replicas} replica{'s' * (replicas > 1)}",
        "template": f"GLM-{template}" if template else "the folder's own",
        "context": f"{capacity.context_length:,} tokens",
        "KV cache": f"{capacity.tokens:,} tokens in {capacity.num_pages:,} pages, {memory} "
        "per replica",
        "requests": f"max {max_running} running per replica, {at_full_context} at full context",
        "chunked prefill": f"{engine.settings.max_prefill_tokens:,} tokens per step",
        "speculative": f"{engine.settings.num_speculative_tokens} draft tokens (MTP)",
        **({"kernels": _cpu_kernels()} if "cpu" in info.devices else {}),
        "chat page": url,
        "OpenAI": f"{url}/v1",
        "Anthropic": url,
        "SGLang": f"{url}/generate",
        "try": curl,
    }.items():
        typer.echo(f"{name:<15} {text}")


def _cpu_kernels() -> str:
    from paddock.kernels import cpu

    if cpu.is_loaded():
        return "compiled for this CPU"
    if not cpu.can_compile():
        return "references (apt install g++ for compiled ones)"
    return "references; compiling in the background, for the next start"


def _warn(settings: "ServeSettings", options: launch.ServeOptions) -> None:
    if settings.is_public and options.api_key is None:
        typer.echo(
            f"warning: anyone who can reach {settings.host} may use this; see --api-key", err=True
        )
    if settings.is_public and options.admin_key is None:
        typer.echo("admin routes are disabled: a public address needs --admin-key", err=True)
