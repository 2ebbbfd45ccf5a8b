"""The verb that makes a model small."""

import json
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from paddock.cli.errors import UserError
from paddock.cli.tables import print_parts, table
from paddock.cli.units import format_bytes
from paddock.launch.calibration_texts import CalibrationBudget, is_run, load_calibration_texts

if TYPE_CHECKING:
    from paddock.evals import EvalResult
    from paddock.quant import CalibrationText, QuantizationProgress, QuantSettings


def quantize(  # noqa: PLR0913  one option each
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A checkpoint or a run.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A folder that is not there yet.")],
    recipe: Annotated[
        str, typer.Option(help="w4a8, rtn (nearest integers alone), qat, or a TOML file.")
    ] = "w4a8",
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="A=B", help="Change one setting.")
    ] = None,
    texts: Annotated[
        list[Path] | None,
        typer.Option(
            "--text",
            help="What to calibrate and measure with: a run, whose text is taken, a folder, .jsonl,"
            " .parquet, .txt; may be repeated.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Of text to calibrate with.")] = 65_536,
    measure: Annotated[int, typer.Option(min=0, help="Tokens of other text to measure on.")] = (
        32_768
    ),
    needles: Annotated[int, typer.Option(min=0, help="Questions about long documents.")] = 128,
    length: Annotated[int, typer.Option(min=64, help="Tokens of a document, at most.")] = 2048,
    worlds: Annotated[
        list[str] | None,
        typer.Option("--world", help="A world to measure both models in; may be repeated."),
    ] = None,
    tasks: Annotated[int, typer.Option(min=1, help="Held-out tasks of each world.")] = 200,
    device: Annotated[str | None, typer.Option(help="Default: the accelerator, else cpu.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved recipe and stop.")
    ] = False,
) -> None:
    """Write FOLDER's model with integer weights to OUT, and what that cost.

    Stopped and called again, it goes on where it was. FOLDER is only read, and without --text says
    itself what it was trained on; OUT appears when it is whole, is served by `paddock serve OUT`,
    and is read by the compressed-tensors library.
    """
    from paddock.checkpoint import latest_model, read_config
    from paddock.config import dump_toml
    from paddock.launch.engines import pick_devices
    from paddock.quant import check_not_quantized, quantize_folder

    settings = _settings(recipe, sets or [])
    if dry_run:
        print_parts(dump_toml(settings).rstrip())
        return
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    source = latest_model(folder)
    check_not_quantized(source)
    within = min(length, read_config(source).context)  # nothing longer will ever be served
    amounts = CalibrationBudget(calibrate=tokens, held_out=measure, needles=needles, length=within)
    passages = _passages(folder, source, texts or [], settings, amounts)
    (place,) = pick_devices(device, 1)
    if device is None and place.startswith("mps"):
        place = "cpu"  # errors are summed in float64, which it does not have
    with QuantizeProgress() as bar:
        report = quantize_folder(
            source, out, settings, passages=passages, device=place, on_progress=bar.update
        )
    if worlds:
        report["worlds"] = compare_in_envs(worlds, tasks, source, out, place)
        (out / "quantization.json").write_text(json.dumps(report, indent=2) + "\n")
    if settings.needs_calibration and not report.get("tokens"):
        print_parts("nothing was held out of that text, so nothing was measured on any")
    print_parts(*_tables(report), f"done: {out}")


def _settings(recipe: str, sets: list[str]) -> "QuantSettings":
    """A recipe by name or file, changed as asked."""
    from paddock.config import SET_FLAG, Recipe, load_recipe, parse_overrides, resolve
    from paddock.quant import RECIPES, QuantSettings

    if recipe not in RECIPES and not Path(recipe).is_file():
        raise UserError(f"'{recipe}' is neither a file nor one of {', '.join(RECIPES)}")
    if recipe not in RECIPES:
        return resolve(QuantSettings, load_recipe(Path(recipe), sets))
    values = RECIPES[recipe].model_dump(mode="json", exclude_none=True)
    changes = parse_overrides(sets)
    return resolve(QuantSettings, Recipe(values | changes, {(key,): SET_FLAG for key in changes}))


def _passages(
    folder: Path,
    source: Path,
    texts: list[Path],
    settings: "QuantSettings",
    amounts: CalibrationBudget,
) -> "list[CalibrationText]":
    from paddock.text import Tokenizer

    named = texts or ([folder] if is_run(folder) else [])
    if not named and settings.needs_calibration:
        raise UserError(
            f"{folder}: is no run, so it does not say what text to calibrate with; name some "
            "with --text, or take --recipe rtn"
        )
    if not named:
        return []
    try:
        return load_calibration_texts(named, Tokenizer.load(source), amounts)
    except UserError:
        if texts or settings.needs_calibration:
            raise
        return []  # a run by reinforcement knows no text, and none is needed


def compare_in_envs(
    worlds: list[str], tasks: int, source: Path, out: Path, place: str | None = None
) -> list[dict[str, Any]]:
    """Both models at the same held-out tasks, with the same chance."""
    before, after = (rewards_by_task(worlds, tasks, folder, place) for folder in (source, out))
    return [{"world": world, **paired_difference(before[world], after[world])} for world in worlds]


def rewards_by_task(
    worlds: list[str], tasks: int, folder: Path, place: str | None = None
) -> dict[str, dict[str, float]]:
    """Of each world, the reward at each task that could be judged. A world with fewer tasks is
    played several times."""
    from paddock.envs import make
    from paddock.launch.engines import open_model_folder
    from paddock.launch.pipeline import SuiteSettings
    from paddock.launch.suites import open_eval_engine, run_env_suite

    model, found = open_model_folder(folder, None), {}
    with open_eval_engine(model, device=place) as engine:
        for world in worlds:
            size = make(world, {}).size("test") or tasks
            often = max(1, tasks // size)
            skill = SuiteSettings(
                name=world, env=world, num_tasks=tasks, rollouts_per_task=often, from_stage=""
            )
            found[world] = _rewards(run_env_suite(model, engine, skill, seed=0))
    return found


def _rewards(found: "EvalResult") -> dict[str, float]:
    from paddock.evals import scored_reward

    judged = {
        attempts[0].task.id: [
            reward for each in attempts if (reward := scored_reward(each)) is not None
        ]
        for attempts in found.rollouts
    }
    return {task: fmean(rewards) for task, rewards in judged.items() if rewards}


def paired_difference(before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    """Mean rewards, and the standard error of their difference, task by task."""
    tasks = [task for task in before if task in after]
    changes = [after[task] - before[task] for task in tasks]
    error = stdev(changes) / len(changes) ** 0.5 if len(changes) > 1 else 0.0
    rewards = [fmean(side[task] for task in tasks) for side in (before, after)]
    return {"reward": rewards, "error": error, "tasks": len(tasks)}


class QuantizeProgress:
    """How far the work is: a bar on a terminal, lines elsewhere."""

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
        self._progress.stop()

    def update(self, moment: "QuantizationProgress") -> None:
        if self._console.is_terminal:
            self._progress.update(
                self._task, description=moment.what, completed=moment.done, total=moment.of
            )
        else:
            line = f"{moment.done}/{moment.of}  {moment.what}"
            self._console.print(line, highlight=False, soft_wrap=True)


def _tables(report: dict[str, Any]) -> list[Table]:
    quality = table("", numbers=("before", "after", "change"))
    before, after = report["bytes"]
    quality.add_row(
        "weights", format_bytes(before), format_bytes(after), f"{after / before:.0%} of it"
    )
    if "nll" in report:
        one, other = report["nll"]
        quality.add_row("nats a token", f"{one:.4f}", f"{other:.4f}", f"{other - one:+.4f}")
        quality.add_row("the same next token", "", f"{report['top1_agreement']:.1%}", "")
    for bucket, apart in report.get("kl_by_position", {}).items():
        quality.add_row(f"divergence below token {int(bucket):,}", "", f"{apart:.2e} nats", "")
    if "needle_recall" in report:
        one, other = report["needle_recall"]
        points = f"{100 * (other - one):+.1f} points"
        quality.add_row(
            f"needles of {report['needle_tasks']}", f"{one:.1%}", f"{other:.1%}", points
        )
    if "kl_geometric_mean" in report:
        typical = f"{report['kl_geometric_mean']:.2e} nats"
        quality.add_row("typical divergence of a token", "", typical, "")
    for found in report.get("worlds", []):
        one, other = found["reward"]
        doubt = f"{other - one:+.3f} ± {found['error']:.3f}"
        name = f"{found['world']}, {found['tasks']} tasks"
        quality.add_row(name, f"{one:.3f}", f"{other:.3f}", doubt)
    layers = table("layer", numbers=("own error", "error so far", "smoothed", "gain", "unseen"))
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
