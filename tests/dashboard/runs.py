"""Run folders for tests, written by the journal."""

from itertools import count
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from paddock.journal import Journal

RECIPE = """stage = "pretrain"
steps = {steps}
seed = {seed}
[init]
preset = "nano"
[optim]
lr = {lr}
"""


def write_run(
    folder: Path,
    losses: list[float],
    *,
    seed: int = 0,
    lr: float = 0.1,
    steps: int | None = None,
    facts: dict[str, Any] | None = None,
    held_out: dict[int, float] | None = None,
) -> Path:
    """Started at second 1001, one second and a hundred tokens per step; with fewer losses than
    `steps` it was killed."""
    folder.mkdir(parents=True)
    steps = len(losses) if steps is None else steps
    (folder / "recipe.toml").write_text(RECIPE.format(steps=steps, seed=seed, lr=lr))
    ticks = map(float, count(1000))  # the journal reads the clock once when it opens
    with Journal(folder, clock=lambda: next(ticks)) as journal:
        journal.log_event("started", step=0, of=steps, **(facts or {}))
        for step, loss in enumerate(losses, start=1):
            measured = {"val_loss": held_out[step]} if step in (held_out or {}) else {}
            journal.log_metrics(step, loss=loss, tokens=100, step_time_s=0.5, lr=lr, **measured)
        if len(losses) == steps:
            journal.log_event("finished", step=steps)
    return folder


def body(page: Path | str) -> ElementTree.Element:
    """The <main> element; it must be well-formed."""
    text = page.read_text() if isinstance(page, Path) else page
    return ElementTree.fromstring(text[text.index("<main>") : text.index("</main>") + 7])


def words(element: ElementTree.Element) -> str:
    return " ".join(" ".join(element.itertext()).split())


def of_class(element: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [found for found in element.iter() if name in (found.get("class") or "").split()]


def points(path: ElementTree.Element) -> list[list[tuple[float, float]]]:
    """The segments of a drawn line, in units of the drawing."""
    pieces = (path.get("d") or "").removesuffix("Z").split("M")[1:]
    return [
        [(float(x), float(y)) for x, y in (pair.split() for pair in piece.split("h")[0].split("L"))]
        for piece in pieces
    ]
