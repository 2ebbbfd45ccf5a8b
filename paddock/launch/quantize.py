"""Quantization of a checkpoint, and the comparison of both models in environments."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from paddock.launch.calibration_texts import CalibrationBudget, is_run, load_calibration_texts
from paddock.launch.errors import UserError
from paddock.launch.settings import StrPath, load_quant_settings

if TYPE_CHECKING:
    from paddock.evals import EvalResult
    from paddock.quant import CalibrationText, QuantizationProgress, QuantSettings

REPORT_FILE = "quantization.json"


def quantize(  # noqa: PLR0913  keyword options of one command
    folder: StrPath,
    out: StrPath,
    *,
    recipe: str = "w4a8",
    overrides: Sequence[str] = (),
    calibration_data: Sequence[StrPath] = (),
    calibration_tokens: int = 65_536,
    eval_tokens: int = 32_768,
    needles: int = 128,
    max_seq_length: int = 2048,
    envs: Sequence[str] = (),
    num_tasks: int = 200,
    device: str | None = None,
    on_update: "Callable[[QuantizationProgress], None] | None" = None,
) -> dict[str, Any]:
    """Write the model of a checkpoint or run with integer weights to `out`; returns the report.

    `recipe` is the name of a recipe or a TOML file. `calibration_data` are runs, whose text is
    used, folders or files; by default the run `folder` itself. With `envs` both models are
    evaluated there. Called again, it resumes; `out` appears when it is complete.
    """
    from paddock.checkpoint import latest_model, read_config
    from paddock.launch.engines import pick_devices
    from paddock.quant import check_not_quantized, quantize_folder

    settings, run, target = load_quant_settings(recipe, overrides), Path(folder), Path(out)
    if not run.is_dir():
        raise UserError(f"{run}: folder not found")
    source = latest_model(run)
    check_not_quantized(source)
    budget = CalibrationBudget(
        calibrate=calibration_tokens,
        held_out=eval_tokens,
        needles=needles,
        length=min(max_seq_length, read_config(source).context),
    )
    texts = _calibration_texts(
        run, source, [Path(path) for path in calibration_data], settings, budget
    )
    (chosen,) = pick_devices(device, 1)
    if device is None and chosen.startswith("mps"):
        chosen = "cpu"  # errors are summed in float64, which MPS does not support
    report = quantize_folder(
        source,
        target,
        settings,
        passages=texts,
        device=chosen,
        on_progress=on_update or (lambda _: None),
    )
    if envs:
        report["envs"] = compare_in_envs(envs, num_tasks, source, target, chosen)
        (target / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n")
    return report


def _calibration_texts(
    folder: Path,
    source: Path,
    named: list[Path],
    settings: "QuantSettings",
    budget: CalibrationBudget,
) -> "list[CalibrationText]":
    from paddock.text import Tokenizer

    paths = named or ([folder] if is_run(folder) else [])
    if not paths and settings.needs_calibration:
        raise UserError(
            f"{folder} is not a run folder, so its training text is unknown; pass text with "
            "--calibration-data, or use --recipe rtn"
        )
    if not paths:
        return []
    try:
        return load_calibration_texts(paths, Tokenizer.load(source), budget)
    except UserError:
        if named or settings.needs_calibration:
            raise
        return []  # an RL run has no text of its own, and none is needed


def compare_in_envs(
    envs: Sequence[str], num_tasks: int, source: Path, out: Path, device: str | None = None
) -> list[dict[str, Any]]:
    """Mean rewards of both models on the same held-out tasks with the same seeds."""
    before, after = (rewards_by_task(envs, num_tasks, folder, device) for folder in (source, out))
    return [{"env": env, **paired_difference(before[env], after[env])} for env in envs]


def rewards_by_task(
    envs: Sequence[str], num_tasks: int, folder: Path, device: str | None = None
) -> dict[str, dict[str, float]]:
    """The mean reward of every task that could be scored, by environment. Tasks of an environment
    with fewer than `num_tasks` are run several times."""
    from paddock.envs import make
    from paddock.launch.engines import open_model_folder
    from paddock.launch.pipeline import SuiteSettings
    from paddock.launch.suites import open_eval_engine, run_env_suite

    model, rewards = open_model_folder(folder, None), {}
    with open_eval_engine(model, device=device) as engine:
        for env in envs:
            size = make(env, {}).size("test") or num_tasks
            suite = SuiteSettings(
                name=env,
                env=env,
                num_tasks=num_tasks,
                rollouts_per_task=max(1, num_tasks // size),
                from_stage="",
            )
            rewards[env] = _mean_rewards(run_env_suite(model, engine, suite, seed=0))
    return rewards


def _mean_rewards(result: "EvalResult") -> dict[str, float]:
    from paddock.evals import scored_reward

    scored = {
        rollouts[0].task.id: [
            reward for each in rollouts if (reward := scored_reward(each)) is not None
        ]
        for rollouts in result.rollouts
    }
    return {task: fmean(rewards) for task, rewards in scored.items() if rewards}


def paired_difference(before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    """Mean rewards, and the standard error of their difference, task by task."""
    tasks = [task for task in before if task in after]
    changes = [after[task] - before[task] for task in tasks]
    error = stdev(changes) / len(changes) ** 0.5 if len(changes) > 1 else 0.0
    rewards = [fmean(side[task] for task in tasks) for side in (before, after)]
    return {"reward": rewards, "error": error, "tasks": len(tasks)}
