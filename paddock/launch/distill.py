"""On-policy cross-stage distillation: earlier stages' checkpoints teach the last one."""

from collections.abc import Sequence
from pathlib import Path

from paddock.launch.rl import RLCallbacks, rl
from paddock.launch.settings import StrPath, check_distill_recipe


def distill(
    recipe: StrPath,
    *,
    out: StrPath | None = None,
    overrides: Sequence[str] = (),
    callbacks: RLCallbacks | None = None,
) -> Path:
    """Distil the recipe's teachers into one student on the student's own rollouts.

    Returns the run folder; called again, it resumes. Raises UserError if the recipe's stage is not
    "distill".
    """
    check_distill_recipe(recipe, overrides)
    return rl(recipe, out=out, overrides=overrides, callbacks=callbacks)
