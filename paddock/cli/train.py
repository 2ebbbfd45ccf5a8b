"""The verb that trains one stage of a base model."""

import os
import statistics
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from paddock.cli.tables import print_parts, table
from paddock.cli.units import format_bytes, format_count
from paddock.launch.trackers import Tracker, open_tracker

if TYPE_CHECKING:
    from paddock.model import ModelConfig
    from paddock.train import StepMetrics, TrainingEstimate, TrainingRun, TrainSettings


def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A TOML recipe of a stage.")],
    out: Annotated[
        Path | None, typer.Option(help="Run folder. Default: runs/RECIPE'S FOLDER/NAME.")
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change one setting.")
    ] = None,
    tracker: Annotated[
        Tracker | None, typer.Option("--track", help="Copy the numbers to a tracker.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved recipe and its cost, and stop.")
    ] = False,
) -> None:
    """Train one stage; called again, it goes on from the newest checkpoint.

    Many processes: torchrun --nproc-per-node 8 -m paddock.cli train RECIPE --set parallel.data=8
    """
    from paddock.config import dump_toml, load_recipe, resolve
    from paddock.dashboard import write_report
    from paddock.parallel import is_rank_zero
    from paddock.train import TrainingRun, TrainSettings
    from paddock.train import train as run_stage

    settings = resolve(TrainSettings, load_recipe(recipe, sets or []))
    folder = out or Path("runs") / recipe.resolve().parent.name / recipe.stem
    run = TrainingRun(
        folder=folder,
        corpora_dir=folder.parent / "corpora",
        settings=settings,
        processes=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
    )
    if not is_rank_zero():  # torchrun's other processes only work
        if not dry_run:
            run_stage(run)
        return
    config, planned = _planned(run)
    if dry_run:
        print_parts(
            dump_toml(settings).rstrip(), _plan_table(planned), _expected(settings, config, planned)
        )
        return
    print_parts(_plan_table(planned))
    with (
        open_tracker(tracker, folder, settings.model_dump(mode="json")) as track,
        TrainProgress(planned, settings.compute.device) as progress,
    ):

        def watch(moment: "StepMetrics") -> None:
            track(moment)
            progress.on_update(moment)

        run_stage(run, log=progress.show_text, on_update=watch)
    print_parts(f"done: {run.checkpoints}\nreport: {write_report(folder)}")


def _planned(run: "TrainingRun") -> "tuple[ModelConfig, TrainingEstimate]":
    from paddock.train import estimate_training, load_init_config

    config = load_init_config(run.settings)
    return config, estimate_training(run.settings, config)


def _plan_table(planned: "TrainingEstimate") -> Table:
    made, alone = table("plan", numbers=("",)), planned.ranks == 1
    made.add_row("parameters", format_count(planned.parameters))
    made.add_row("active without embeddings", format_count(planned.active))
    made.add_row("tokens", format_count(planned.tokens))
    made.add_row("FLOPs needed a token, forward and backward", f"{planned.flops_per_token:.3g}")
    made.add_row("FLOPs in all", f"{planned.flops:.3g}")
    made.add_row(
        "weights" if alone else "weights gathered at a time", format_bytes(planned.weight_bytes)
    )
    made.add_row("exact weights, gradients, optimizer", format_bytes(planned.state_bytes))
    made.add_row("activations of a micro-batch, roughly", format_bytes(planned.activation_bytes))
    if not alone:
        made.add_row(f"each of {planned.ranks:,} ranks, in all", format_bytes(planned.rank_bytes))
    return made


def _expected(settings: "TrainSettings", config: "ModelConfig", planned: "TrainingEstimate") -> str:
    """How long the run will take here: a few steps are timed where they fit into memory."""
    from paddock.train import fits_in_memory, measure_step_time, peak_flops, pick_device

    device = pick_device(settings.compute.device)
    if fits_in_memory(planned, device):
        seconds = measure_step_time(settings, config)
        return f"expected: {_span(seconds * settings.steps)} on {device} ({seconds:.3g} s a step)"
    peak = peak_flops(device) or 989e12
    hours = planned.flops / (0.4 * peak) / 3600
    speed = f"40 % of {peak / 1e12:.0f} TFLOP/s"
    if planned.ranks > 1:
        days = hours / 24 / planned.ranks
        return f"expected: {days:,.3g} days on {planned.ranks:,} chips at {speed}"
    return f"expected: {hours:,.3g} chip-hours at {speed}; too big for this machine"


class TrainProgress:
    """A live table on a terminal, a plain line now and then elsewhere."""

    def __init__(self, planned: "TrainingEstimate", device: str | None) -> None:
        self._planned, self._device = planned, device
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, transient=True, refresh_per_second=4)
        self._seconds: deque[float] = deque(maxlen=50)
        self._tokens: deque[int] = deque(maxlen=50)
        self._held_out = ""
        self._said_at = 0.0
        self._peak: float | None = None

    def __enter__(self) -> "TrainProgress":
        from paddock.train import peak_flops, pick_device

        peak = peak_flops(pick_device(self._device))
        self._peak = None if peak is None else peak * self._planned.ranks
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show_text(self, text: str) -> None:
        if self._console.is_terminal:
            self._live.update(text)
        elif time.monotonic() - self._said_at >= 2:
            self._said_at = time.monotonic()
            self._console.print(text, highlight=False)

    def on_update(self, moment: "StepMetrics") -> None:
        self._seconds.append(moment.seconds)
        self._tokens.append(moment.output.tokens)
        if moment.validation is not None:
            self._held_out = f"{moment.validation.loss:.4f}"
        cells = self._cells(moment)
        if self._console.is_terminal:
            made = table(*cells)
            made.add_row(*cells.values())
            self._live.update(made)
        elif self._worth_a_line(moment):
            self._said_at = time.monotonic()
            line = "  ".join(f"{name} {value}" for name, value in cells.items() if value)
            self._console.print(line, highlight=False, soft_wrap=True)

    def _worth_a_line(self, moment: "StepMetrics") -> bool:
        ended = moment.validation is not None or moment.step == moment.steps
        return ended or time.monotonic() - self._said_at >= 10

    def _cells(self, moment: "StepMetrics") -> dict[str, str]:
        from paddock.model import cost
        from paddock.train import peak_memory_bytes

        rate = sum(self._tokens) / sum(self._seconds)
        left = statistics.median(self._seconds) * (moment.steps - moment.step)
        cells = {"step": f"{moment.step}/{moment.steps}"}
        cells |= {name: f"{value:.4f}" for name, value in moment.output.losses.items()}
        cells |= {"held out": self._held_out, "lr": f"{moment.output.lr:.2e}"}
        cells |= {"grad": f"{moment.output.grad_norm:.2f}", "tokens/s": f"{rate:,.0f}"}
        if self._peak is not None:
            cells["MFU"] = f"{cost.mfu(self._planned.flops_per_token, rate, self._peak):.1%}"
        cells |= {"memory": format_bytes(peak_memory_bytes()), "left": _span(left)}
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
