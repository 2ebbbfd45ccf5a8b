"""`paddock look`: traces a network on one text for the dashboard's network page."""

from pathlib import Path
from typing import Annotated

import typer

from paddock import launch


def look(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder with a checkpoint.")],
    text: Annotated[
        Path | None, typer.Option(help="A text file. Default: a rollout, or held-out text.")
    ] = None,
) -> None:
    """Log which tokens each indexer selected and the load of each expert on one text.

    `paddock dash` shows it on the network page. RL runs do this when they end.
    """
    row = launch.inspect_run(run, text)
    typer.echo(
        f"{len(row['pieces'])} tokens, {len(row['indexer'])} layers with an indexer of their own, "
        f"{len(row['experts'])} with experts: {run / 'network.jsonl'}"
    )
