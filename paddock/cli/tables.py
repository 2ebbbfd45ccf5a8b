"""Tables that read well on a terminal and in a pipe."""

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table


def table(*words: str, numbers: tuple[str, ...] = ()) -> Table:
    """An empty table with columns of words, then columns of numbers."""
    made = Table(*words, box=SIMPLE_HEAD, show_edge=False, collapse_padding=True)
    for name in numbers:
        made.add_column(name, justify="right")
    return made


def print_parts(*parts: RenderableType) -> None:
    """Print to stdout with blank lines between, taking nothing in the text for markup."""
    console = Console(markup=False, emoji=False, highlight=False)
    for i, part in enumerate(parts):
        if i:
            console.print()
        console.print(part, soft_wrap=isinstance(part, str))
