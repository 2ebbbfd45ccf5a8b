"""Nano models to quantize: what `paddock run recipes/nano` raised, and arms made of it."""

import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.raise_base import RECIPES as RECIPE_FOLDER
from paddock.checkpoint.training_state import latest_model
from paddock.data import Tokenizer
from paddock.launch.calibration_texts import CalibrationBudget, load_calibration_texts
from paddock.quant import RECIPES, CalibrationText, QuantSettings, quantize_folder

FULL = RECIPES["w4a8"]
LENGTH = 512  # tokens of a text: the context nano was trained with
SEEDS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Story:
    """A folder with the stages `sparse`, `sft` and, where it went so far, `distill`."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    def stage(self, name: str) -> Path:
        return self.folder / name

    @property
    def last(self) -> Path:
        """The model at its end."""
        distilled = self.stage("distill")
        return distilled if distilled.is_dir() else self.stage("sft")

    def text(self, amounts: CalibrationBudget, *stages: str) -> list[CalibrationText]:
        """What these stages were trained on, and what was held out of it."""
        runs = [self.stage(name) for name in stages]
        return load_calibration_texts(runs, Tokenizer.load(latest_model(runs[0])), amounts)


def raised(runs: Path, seed: int) -> Story:
    """The nano model of a seed, raised unless it is there: the first one as far as the plan goes,
    the others up to fine-tuning."""
    out = runs / f"story-{seed}"
    command = [sys.executable, "-m", "paddock.cli", "run", str(RECIPE_FOLDER / "nano")]
    command += ["--out", str(out), "--set", f"seed={seed}", "--to", "sft" if seed else "distill"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=one_thread
    )
    if done.returncode:
        raise SystemExit(f"{out}: {done.stderr.decode()[-2000:]}")
    return Story(out)


def quantized(
    source: Path, out: Path, settings: QuantSettings, passages: Sequence[CalibrationText] = ()
) -> dict[str, Any]:
    """The report of a model's or run's quantized folder, made unless it is there."""
    return quantize_folder(latest_model(source), out, settings, passages=passages)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """And its standard error."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return statistics.fmean(values), spread / len(values) ** 0.5
