"""The verb that shows run folders in a browser."""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paddock.cli.errors import UserError
from paddock.http import bind_socket, socket_url

if TYPE_CHECKING:
    from paddock.dashboard import TokenText
    from paddock.text import Tokenizer


def dash(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUNS]...", help="Folders of runs, or runs. Default: runs"),
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="A small run that is bundled.")] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = 8001,
    engine: Annotated[
        str | None, typer.Option(metavar="URL", help="A running server to watch too.")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open a browser.")] = False,
) -> None:
    """Look at runs while they go on, or after: curves, rollouts down to the token, the engine, the
    network. Nothing is ever written to them.

    PADDOCK_API_KEY is shown to the server of --engine, where it is set.
    """
    from contextlib import ExitStack
    from tempfile import TemporaryDirectory

    from paddock.dashboard import write_demo_runs

    if demo and runs:
        raise UserError("--demo shows the bundled run alone: leave RUNS out")
    with ExitStack() as stack:
        folders = runs or [Path("runs")]
        if demo:
            folders = [write_demo_runs(Path(stack.enter_context(TemporaryDirectory())))]
        sock = stack.enter_context(bind_socket(host, port))
        _serve(folders, sock, host, engine, open_)
    typer.echo("stopped")


def _serve(
    folders: Sequence[Path], sock: socket.socket, host: str, engine: str | None, open_: bool
) -> None:
    import os
    import webbrowser
    from contextlib import suppress

    import uvicorn

    from paddock.dashboard import DashboardApp, EngineMonitor, RunIndex, build_app
    from paddock.http import uvicorn_config

    shelf = RunIndex(folders)
    watch = EngineMonitor(engine, os.environ.get("PADDOCK_API_KEY")) if engine else None
    app = build_app(DashboardApp(run_index=shelf, open_token_text=open_token_text, engine=watch, host=host))
    config = uvicorn_config(app)
    sock.listen(config.backlog)  # whoever reads the address may already knock
    url = socket_url(sock)
    found = len(shelf.names())
    where = ", ".join(map(str, folders))
    typer.echo(f"{found} run{'s' * (found != 1)} in {where}\n{url}\nCtrl-C ends it")
    if open_:
        webbrowser.open(url)
    with suppress(KeyboardInterrupt):  # uvicorn has closed everything and passes the signal on
        uvicorn.Server(config).run(sockets=[sock])


def open_token_text(folder: Path) -> "TokenText | None":
    """The tokenizer in a folder, for a reader's eyes; None where there is none that can be read."""
    from paddock.text import Tokenizer, TokenizerError

    try:
        return TokenizerText(Tokenizer.load(folder))
    except (TokenizerError, OSError):
        return None


class TokenizerText:
    """A tokenizer as `dashboard` asks for one."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer

    def pieces(self, ids: Sequence[int]) -> list[str]:
        from paddock.text import IncrementalDetokenizer

        growing = IncrementalDetokenizer(self._tokenizer)
        found = [growing.push(token) for token in ids]
        if found:
            found[-1] += growing.flush()
        return found

    def is_special(self, token_id: int) -> bool:
        return self._tokenizer.is_added(token_id)
