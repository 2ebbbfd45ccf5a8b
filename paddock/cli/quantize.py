"""`paddock quantize`: a model with integer weights, and what that cost."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from paddock import launch
from paddock.cli.tables import print_parts, table
from paddock.launch import units

if TYPE_CHECKING:
    from paddock.quant import QuantizationProgress

LAYER_COLUMNS = (
    *("layer error", "cumulative error", "smoothed", "smoothing gain", "uncalibrated experts"),
)


def quantize(  # noqa: PLR0913  one option each
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A checkpoint or a run.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A folder that does not exist yet.")],
    recipe: Annotated[
        str, typer.Option(help="w4a8, rtn (round to nearest), qat, or a TOML file.")
    ] = "w4a8",
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="A=B", help="Override one setting.")
    ] = None,
    calibration_data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text to calibrate and evaluate with: a run, whose text is used, a folder, .jsonl,"
            " .parquet, .txt; may be repeated.",
        ),
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(min=0, help="Tokens to calibrate with.")] = (
        65_536
    ),
    eval_tokens: Annotated[int, typer.Option(min=0, help="Tokens of other text to evaluate.")] = (
        32_768
    ),
    needles: Annotated[int, typer.Option(min=0, help="Needle-in-a-haystack tasks.")] = 128,
    max_seq_length: Annotated[int, typer.Option(min=64, help="Max tokens of a document.")] = 2048,
    envs: Annotated[
        list[str] | None,
        typer.Option("--env", help="An environment to evaluate both models in; may be repeated."),
    ] = None,
    num_tasks: Annotated[int, typer.Option(min=1, help="Held-out tasks per environment.")] = 200,
    device: Annotated[str | None, typer.Option(help="Default: the accelerator, else cpu.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved recipe and stop.")
    ] = False,
) -> None:
    """Write FOLDER's model with integer weights to OUT, and report the loss of quality.

    Run it again to resume. FOLDER is only read; a run folder also supplies the calibration text.
    OUT appears when it is complete; `paddock serve OUT` and the compressed-tensors library read it.
    """
    from paddock.config import dump_toml

    settings = launch.settings.load_quant_settings(recipe, sets or [])
    if dry_run:
        print_parts(dump_toml(settings).rstrip())
        return
    with QuantizeProgress() as progress:
        report = launch.quantize(
            folder,
            out,
            recipe=recipe,
            overrides=sets or [],
            calibration_data=calibration_data or [],
            calibration_tokens=calibration_tokens,
            eval_tokens=eval_tokens,
            needles=needles,
            max_seq_length=max_seq_length,
            envs=envs or [],
            num_tasks=num_tasks,
            device=device,
            on_update=progress.update,
        )
    if settings.needs_calibration and not report.get("tokens"):
        print_parts("the text has no held-out split, so nothing was evaluated on text")
    print_parts(*_tables(report), f"done: {out}")


class QuantizeProgress:
    """A progress bar on a terminal, lines elsewhere."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._task = self._progress.add_task("opening", total=None)

    def __enter__(self) -> "QuantizeProgress":
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:  # a bar that never started would print an empty line
            self._progress.stop()

    def update(self, progress: "QuantizationProgress") -> None:
        if self._console.is_terminal:
            self._progress.update(
                self._task, description=progress.what, completed=progress.done, total=progress.of
            )
        else:
            line = f"{progress.done}/{progress.of}  {progress.what}"
            self._console.print(line, highlight=False, soft_wrap=True)


def _tables(report: dict[str, Any]) -> list[Table]:
    quality = table("", numbers=("before", "after", "change"))
    before, after = report["bytes"]
    quality.add_row(
        "weights", units.format_bytes(before), units.format_bytes(after), f"{after / before:.0%}"
    )
    if "nll" in report:
        one, other = report["nll"]
        quality.add_row("nats/token", f"{one:.4f}", f"{other:.4f}", f"{other - one:+.4f}")
        quality.add_row("top-1 agreement", "", f"{report['top1_agreement']:.1%}", "")
    for bucket, kl in report.get("kl_by_position", {}).items():
        quality.add_row(f"KL up to token {int(bucket):,}", "", f"{kl:.2e} nats", "")
    if "needle_recall" in report:
        one, other = report["needle_recall"]
        points = f"{100 * (other - one):+.1f} points"
        quality.add_row(
            f"needle recall ({report['needle_tasks']} tasks)", f"{one:.1%}", f"{other:.1%}", points
        )
    if "kl_geometric_mean" in report:
        kl = f"{report['kl_geometric_mean']:.2e} nats"
        quality.add_row("KL (geometric mean)", "", kl, "")
    for found in report.get("envs", report.get("worlds", [])):
        one, other = found["reward"]
        change = f"{other - one:+.3f} ± {found['error']:.3f} SE"
        name = f"{found.get('env') or found['world']}, {found['tasks']} tasks"
        quality.add_row(name, f"{one:.3f}", f"{other:.3f}", change)
    layers = table("layer", numbers=LAYER_COLUMNS)
    for layer in report["layers"]:
        layers.add_row(
            str(layer["layer"]),
            f"{layer['layer_error']:.4f}",
            f"{layer['cumulative_error']:.4f}",
            f"{layer['smoothed']} of {layer['smoothing_candidates']}"
            if "smoothing_candidates" in layer
            else "",
            f"{layer['smoothing_gain']:.0%}" if "smoothing_gain" in layer else "",
            str(layer.get("uncalibrated_experts", "")),
        )
    return [quality, layers] if report.get("tokens") or report.get("needle_tasks") else [quality]
