"""The `paddock` command: the table of its commands."""

import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from paddock import __version__
from paddock.cli import (
    bench,
    chat,
    dash,
    distill,
    doctor,
    env,
    eval,
    gateway,
    look,
    model,
    quantize,
    report,
    rl,
    run,
    sample,
    serve,
    train,
)
from paddock.cli.errors import ErrorReportingGroup
from paddock.launch import event_loop

COMMANDS: dict[str, typer.Typer | Callable[..., None]] = {
    "run": run.run,
    "model": model.app,
    "train": train.train,
    "rl": rl.rl,
    "distill": distill.distill,
    "quantize": quantize.quantize,
    "serve": serve.serve,
    "chat": chat.chat,
    "gateway": gateway.gateway,
    "sample": sample.sample,
    "eval": eval.evaluate,
    "env": env.app,
    "bench": bench.app,
    "report": report.report,
    "dash": dash.dash,
    "look": look.look,
    "doctor": doctor.doctor,
}

app = typer.Typer(
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for name, command in COMMANDS.items():
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        app.command(name)(command)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"paddock {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """The open, complete GLM-5 recipe, from raw text to a served agent."""


def main() -> None:
    sys.path.append(os.getcwd())  # for environments and hooks that recipes name by module
    event_loop.run_and_exit(app)


if __name__ == "__main__":
    main()
