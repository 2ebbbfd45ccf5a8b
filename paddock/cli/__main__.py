"""The table of verbs."""

from collections.abc import Callable
from typing import Annotated

import typer

from paddock import __version__
from paddock.cli import chat, doctor, model, report, serve, train
from paddock.cli.errors import Explaining

VERBS: dict[str, typer.Typer | Callable[..., None]] = {
    "model": model.app,
    "train": train.train,
    "serve": serve.serve,
    "chat": chat.chat,
    "report": report.report,
    "doctor": doctor.doctor,
}

app = typer.Typer(
    cls=Explaining,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a traceback is for us, not for decoration
)
for name, verb in VERBS.items():
    if isinstance(verb, typer.Typer):
        app.add_typer(verb, name=name)
    else:
        app.command(name)(verb)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paddock {__version__}")
        raise typer.Exit


@app.callback()
def _front_door(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """The open, complete GLM-5 recipe, from raw text to a served agent."""


def main() -> None:
    app()


if __name__ == "__main__":
    main()
