"""Options that several commands share."""

from typing import Annotated

import typer

from paddock.launch import engines

QuantOption = Annotated[
    engines.Quant | None,
    typer.Option(help="Round the weights to 8 bits when the model is loaded, on a CPU."),
]
