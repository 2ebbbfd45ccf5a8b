"""Nano models to quantize: the runs of `paddock run recipes/nano`, and what is made of them."""

import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.train_ablations import RECIPES as RECIPE_FOLDER
from paddock.checkpoint.training_state import latest_model
from paddock.data import Tokenizer
from paddock.launch.calibration_texts import CalibrationBudget, load_calibration_texts
from paddock.quant import RECIPES, CalibrationText, QuantSettings, quantize_folder

FULL = RECIPES["w4a8"]
LENGTH = 512  # tokens per text: nano's training context
SEEDS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """A folder with the stages `sparse`, `sft` and, if it got that far, `distill`."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    def stage(self, name: str) -> Path:
        return self.folder / name

    @property
    def last(self) -> Path:
        """The run of the last stage."""
        distilled = self.stage("distill")
        return distilled if distilled.is_dir() else self.stage("sft")

    def texts(self, budget: CalibrationBudget, *stages: str) -> list[CalibrationText]:
        """Training text of these stages, and text held out of it."""
        runs = [self.stage(name) for name in stages]
        return load_calibration_texts(runs, Tokenizer.load(latest_model(runs[0])), budget)


def train_pipeline(runs: Path, seed: int) -> PipelineRun:
    """The nano pipeline of a seed; runs it unless it is finished. The first seed runs all stages,
    the others end after fine-tuning."""
    out = runs / f"seed-{seed}"
    command = [sys.executable, "-m", "paddock.cli", "run", str(RECIPE_FOLDER / "nano")]
    command += ["--out", str(out), "--set", f"seed={seed}", "--until", "sft" if seed else "distill"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=one_thread
    )
    if done.returncode:
        raise SystemExit(f"{out}: {done.stderr.decode()[-2000:]}")
    return PipelineRun(out)


def quantize_once(
    source: Path, out: Path, settings: QuantSettings, texts: Sequence[CalibrationText] = ()
) -> dict[str, Any]:
    """The quantization report of a model or run; quantizes it unless `out` exists."""
    return quantize_folder(latest_model(source), out, settings, passages=texts)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return statistics.fmean(values), spread / len(values) ** 0.5
