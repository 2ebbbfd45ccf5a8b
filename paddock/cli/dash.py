"""`paddock dash`: run folders in a browser."""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from paddock.launch import UserError, token_text

open_token_text = token_text.open_token_text


def dash(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUNS]...", help="Folders of runs, or runs. Default: runs"),
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Show the bundled run.")] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = 8001,
    engine_url: Annotated[
        str | None, typer.Option(metavar="URL", help="A running server to monitor too.")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open a browser.")] = False,
) -> None:
    """Show live and finished runs (read-only): curves, rollouts down to the token, the engine, the
    network.

    PADDOCK_API_KEY, if set, is sent to the server of --engine-url.
    """
    from contextlib import ExitStack
    from tempfile import TemporaryDirectory

    from paddock.dashboard import write_demo_runs
    from paddock.http import bind_socket

    if demo and runs:
        raise UserError("--demo shows only the bundled run: omit RUNS")
    with ExitStack() as stack:
        folders = runs or [Path("runs")]
        if demo:
            folders = [write_demo_runs(Path(stack.enter_context(TemporaryDirectory())))]
        sock = stack.enter_context(bind_socket(host, port))
        _serve(folders, sock, host, engine_url, open_)
    typer.echo("stopped")


def _serve(
    folders: Sequence[Path], sock: socket.socket, host: str, engine_url: str | None, open_: bool
) -> None:
    import os
    import webbrowser
    from contextlib import suppress

    import uvicorn

    from paddock.dashboard import DashboardApp, EngineMonitor, RunIndex, build_app
    from paddock.http import socket_url, uvicorn_config

    runs = RunIndex(folders)
    key = os.environ.get("PADDOCK_API_KEY")
    engine = EngineMonitor(engine_url, key) if engine_url else None
    app = build_app(
        DashboardApp(run_index=runs, open_token_text=open_token_text, engine=engine, host=host)
    )
    config = uvicorn_config(app)
    sock.listen(config.backlog)  # connections are accepted as soon as the address is printed
    url = socket_url(sock)
    found = len(runs.names())
    where = ", ".join(map(str, folders))
    typer.echo(f"{found} run{'s' * (found != 1)} in {where}\n{url}\npress Ctrl-C to stop")
    if open_:
        webbrowser.open(url)
    with suppress(KeyboardInterrupt):  # uvicorn has shut down and raises the signal again
        uvicorn.Server(config).run(sockets=[sock])
