"""Evaluation of a model in environments, on held-out tasks."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddock.launch.engines import Quant, open_model_folder
from paddock.launch.pipeline import SuiteSettings
from paddock.launch.settings import StrPath
from paddock.launch.suites import open_eval_engine, run_env_suite, validate_suites

if TYPE_CHECKING:
    from paddock.evals import EvalResult


def evaluate(  # noqa: PLR0913  keyword options of one command
    model: StrPath,
    envs: Sequence[str],
    *,
    num_tasks: int = 200,
    rollouts_per_task: int = 1,
    args: Mapping[str, Any] | None = None,
    enable_thinking: bool = True,
    context_management: Mapping[str, Any] | None = None,
    context_length: int | None = None,
    quant: Quant | None = None,
    seed: int = 0,
    on_result: "Callable[[str, EvalResult], None] | None" = None,
) -> "dict[str, EvalResult]":
    """Mean reward, standard error and pass@k of a checkpoint or run folder, by environment.

    `args` override the environments' settings; `context_management` are the settings of
    `paddock.rollout.ContextSettings`, `context_length` limits prompt and reply together. Tasks are
    always the same; `seed` is that of the sampling. `on_result` gets each result as soon as it is
    known.
    """
    opened, results = open_model_folder(Path(model), None), {}
    with open_eval_engine(opened, quant=quant) as engine:
        for name in envs:
            suite = SuiteSettings(
                name=name,
                env=name,
                args=args or {},
                num_tasks=num_tasks,
                rollouts_per_task=rollouts_per_task,
                enable_thinking=enable_thinking,
                context_management=context_management or {},
                context_length=context_length,
                from_stage="",
            )
            validate_suites([suite])
            results[name] = run_env_suite(opened, engine, suite, seed)
            if on_result is not None:
                on_result(name, results[name])
    return results
