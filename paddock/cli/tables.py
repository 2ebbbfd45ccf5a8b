"""Tables for terminals and pipes."""

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table


def table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """An empty table with text columns, then right-aligned columns of numbers."""
    made = Table(*columns, box=SIMPLE_HEAD, show_edge=False, collapse_padding=True)
    for name in numbers:
        made.add_column(name, justify="right")
    return made


def print_parts(*parts: RenderableType) -> None:
    """Print to stdout with blank lines between; text is not parsed as markup."""
    console = Console(markup=False, emoji=False, highlight=False)
    for i, part in enumerate(parts):
        if i:
            console.print()
        console.print(part, soft_wrap=isinstance(part, str))
