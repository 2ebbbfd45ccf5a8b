"""`paddock gateway`: sessions for agents that speak OpenAI's or Anthropic's API."""

from pathlib import Path
from secrets import token_urlsafe
from typing import Annotated, Literal

import typer

from paddock import launch
from paddock.cli.serve import ChatTemplate, MaxPrefillTokens, ServedNames, SpeculativeTokens


def gateway(  # noqa: PLR0913  one option each
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A checkpoint with tokenizer, or a run.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="JSONL that closed sessions are appended to.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = 8002,
    admin_key: Annotated[
        str | None,
        typer.Option(envvar="PADDOCK_ADMIN_KEY", help="API key that opens and scores sessions."),
    ] = None,
    admin_key_file: Annotated[
        Path | None, typer.Option(help="A file with that key. Default: a new key is printed.")
    ] = None,
    num_speculative_tokens: SpeculativeTokens = 0,
    kv_cache_memory: Annotated[
        str | None, typer.Option(help="KV cache, such as 4GB. Default: what is free.")
    ] = None,
    context_length: Annotated[
        int | None, typer.Option(min=2, help="Max tokens of prompt and reply.")
    ] = None,
    max_running_requests: Annotated[int, typer.Option(min=1, help="Max running requests.")] = 32,
    max_prefill_tokens: MaxPrefillTokens = None,
    idle_timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds until an unused session is closed.")
    ] = launch.gateway.IDLE_TIMEOUT_S,
    served_model_name: ServedNames = None,
    chat_template: ChatTemplate = None,
    dtype: Annotated[Literal["float32", "bfloat16"] | None, typer.Option()] = None,
    device: Annotated[str | None, typer.Option(help="Default: an accelerator, else cpu.")] = None,
) -> None:
    """Serve sessions for agents: rollouts token by token, without training.

    An agent needs only the printed URL as its base URL and the key of a session.
    """
    key, origin = _admin_key(admin_key, admin_key_file)
    options = launch.ServeOptions(
        host=host,
        port=port,
        admin_key=key,
        num_speculative_tokens=num_speculative_tokens,
        kv_cache_memory=kv_cache_memory,
        context_length=context_length,
        max_running_requests=max_running_requests,
        max_prefill_tokens=max_prefill_tokens,
        served_model_names=tuple(served_model_name or ()),
        chat_template=chat_template,
        dtype=dtype,
        device=device,
    )

    def on_ready(info: launch.gateway.GatewayInfo) -> None:
        for name, text in {
            "model": f"{info.model_name}, {info.context_length:,} tokens of context",
            "OpenAI": f"OPENAI_BASE_URL={info.url}/v1",
            "Anthropic": f"ANTHROPIC_BASE_URL={info.url}",
            "admin key": origin,
            "new session": f"curl -X POST {info.url}/sessions -H 'x-api-key: ADMIN_KEY' -d '{{}}'",
        }.items():
            typer.echo(f"{name:<15} {text}")
        typer.echo(f"ready in {info.startup_s:.1f} s; press Ctrl-C to stop")

    launch.gateway.run_gateway(
        model, options, out=out, idle_timeout_s=idle_timeout, on_ready=on_ready
    )
    typer.echo("stopped")


def _admin_key(key: str | None, file: Path | None) -> tuple[str, str]:
    """The admin key, and where it comes from."""
    if key:
        return key, "of --admin-key or PADDOCK_ADMIN_KEY"
    if file is None:
        made = token_urlsafe(32)
        return made, f"{made} (new)"
    try:
        return file.read_text().strip(), f"of {file}"
    except OSError as error:
        raise launch.UserError(f"--admin-key-file: {error}") from None
