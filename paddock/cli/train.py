"""`paddock train`: one stage of training, its estimate and its progress table."""

import statistics
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from paddock import launch
from paddock.cli.tables import print_parts, table
from paddock.launch import units

if TYPE_CHECKING:
    from paddock.train import StepMetrics, TrainingEstimate, TrainSettings


def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A TOML recipe of a stage.")],
    out: Annotated[
        Path | None, typer.Option(help="Run folder. Default: runs/RECIPE'S FOLDER/NAME.")
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override one setting.")
    ] = None,
    tracker: Annotated[
        launch.Tracker | None, typer.Option("--track", help="Also log metrics to a tracker.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved recipe and an estimate, and stop.")
    ] = False,
) -> None:
    """Train one stage; run the same command to resume from the newest checkpoint.

    Many processes: torchrun --nproc-per-node 8 -m paddock.cli train RECIPE --set parallel.data=8
    """
    from paddock.config import dump_toml
    from paddock.dashboard import write_report
    from paddock.parallel import is_rank_zero
    from paddock.train import CHECKPOINTS

    settings = launch.settings.load_train_settings(recipe, sets or [])
    folder = out or launch.settings.default_run_dir(recipe)
    if not is_rank_zero():  # torchrun's other processes print nothing
        if not dry_run:
            launch.train(settings, out=folder)
        return
    estimate = launch.estimate.estimate_train(settings)
    if dry_run:
        print_parts(
            dump_toml(settings).rstrip(),
            _estimate_table(estimate),
            _estimated_time(settings, estimate),
        )
        return
    print_parts(_estimate_table(estimate))
    with TrainProgress(estimate, settings.compute.device) as progress:
        launch.train(
            settings,
            out=folder,
            tracker=tracker,
            on_message=progress.show_text,
            on_update=progress.on_update,
        )
    print_parts(f"done: {folder / CHECKPOINTS}\nreport: {write_report(folder)}")


def _estimate_table(estimate: "TrainingEstimate") -> Table:
    made, alone, size = table("estimate", numbers=("",)), estimate.ranks == 1, units.format_bytes
    made.add_row("parameters", units.format_count(estimate.parameters))
    made.add_row("active parameters (no embeddings)", units.format_count(estimate.active))
    made.add_row("tokens", units.format_count(estimate.tokens))
    made.add_row("FLOPs/token (forward + backward)", f"{estimate.flops_per_token:.3g}")
    made.add_row("total FLOPs", f"{estimate.flops:.3g}")
    made.add_row("weights" if alone else "all-gathered weights", size(estimate.weight_bytes))
    made.add_row("master weights, gradients, optimizer state", size(estimate.state_bytes))
    made.add_row("activations per micro-batch (approx.)", size(estimate.activation_bytes))
    if not alone:
        made.add_row(f"total per rank ({estimate.ranks:,} ranks)", size(estimate.rank_bytes))
    return made


def _estimated_time(settings: "TrainSettings", estimate: "TrainingEstimate") -> str:
    """How long the run takes here; a few steps are timed if they fit in memory."""
    from paddock.train import peak_flops, pick_device

    device = pick_device(settings.compute.device)
    seconds = launch.estimate.estimate_step_s(settings, estimate)
    if seconds is not None:
        span = _span(seconds * settings.steps)
        return f"estimated time: {span} on {device} ({seconds:.3g} s per step)"
    peak = peak_flops(device) or 989e12
    hours = estimate.flops / (0.4 * peak) / 3600
    speed = f"40 % of {peak / 1e12:.0f} TFLOP/s"
    if estimate.ranks > 1:
        days = hours / 24 / estimate.ranks
        return f"estimated time: {days:,.3g} days on {estimate.ranks:,} accelerators at {speed}"
    return f"estimated time: {hours:,.3g} accelerator-hours at {speed}; too big for this machine"


class TrainProgress:
    """A live table on a terminal; elsewhere a plain line from time to time."""

    def __init__(self, estimate: "TrainingEstimate", device: str | None) -> None:
        self._estimate, self._device = estimate, device
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, transient=True, refresh_per_second=4)
        self._seconds: deque[float] = deque(maxlen=50)
        self._tokens: deque[int] = deque(maxlen=50)
        self._val_loss = ""
        self._printed_at = 0.0
        self._peak: float | None = None

    def __enter__(self) -> "TrainProgress":
        from paddock.train import peak_flops, pick_device

        peak = peak_flops(pick_device(self._device))
        self._peak = None if peak is None else peak * self._estimate.ranks
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show_text(self, text: str) -> None:
        if self._console.is_terminal:
            self._live.update(text)
        elif time.monotonic() - self._printed_at >= 2:
            self._printed_at = time.monotonic()
            self._console.print(text, highlight=False)

    def on_update(self, metrics: "StepMetrics") -> None:
        self._seconds.append(metrics.seconds)
        self._tokens.append(metrics.output.tokens)
        if metrics.validation is not None:
            self._val_loss = f"{metrics.validation.loss:.4f}"
        cells = self._cells(metrics)
        if self._console.is_terminal:
            made = table(*cells)
            made.add_row(*cells.values())
            self._live.update(made)
        elif self._worth_a_line(metrics):
            self._printed_at = time.monotonic()
            line = "  ".join(f"{name} {value}" for name, value in cells.items() if value)
            self._console.print(line, highlight=False, soft_wrap=True)

    def _worth_a_line(self, metrics: "StepMetrics") -> bool:
        notable = metrics.validation is not None or metrics.step == metrics.steps
        return notable or time.monotonic() - self._printed_at >= 10

    def _cells(self, metrics: "StepMetrics") -> dict[str, str]:
        from paddock.model import cost
        from paddock.train import peak_memory_bytes

        rate = sum(self._tokens) / sum(self._seconds)
        remaining = statistics.median(self._seconds) * (metrics.steps - metrics.step)
        cells = {"step": f"{metrics.step}/{metrics.steps}"}
        cells |= {name: f"{value:.4f}" for name, value in metrics.output.losses.items()}
        cells |= {"val loss": self._val_loss, "lr": f"{metrics.output.lr:.2e}"}
        cells |= {"grad norm": f"{metrics.output.grad_norm:.2f}", "tok/s": f"{rate:,.0f}"}
        if self._peak is not None:
            cells["MFU"] = f"{cost.mfu(self._estimate.flops_per_token, rate, self._peak):.1%}"
        cells |= {"memory": units.format_bytes(peak_memory_bytes()), "ETA": _span(remaining)}
        return cells


def _span(seconds: float) -> str:
    """
    >>> _span(59), _span(3700), _span(200_000)
    ('59 s', '1 h 01 min', '2 d 7 h')
    """
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if minutes < 1:
        return f"{seconds:.0f} s"
    if hours < 1:
        return f"{minutes} min {int(seconds % 60):02d} s"
    if hours < 48:
        return f"{hours} h {minutes % 60:02d} min"
    return f"{hours // 24} d {hours % 24} h"
