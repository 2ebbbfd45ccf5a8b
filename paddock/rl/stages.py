"""Default settings of each RL stage: a recipe names its stage and sets what differs.

reasoning  advantages normalised by the group's std, IcePop with clip-higher, on-policy
agentic    advantages normalised by the group's mean only, double-sided importance sampling,
           asynchronous, optimizer state reset at each weight sync
general    as reasoning, with a token-level loss
distill    teachers from earlier stages, one rollout per prompt, no group baseline

Values that the paper does not give (clip range of the agentic loss, staleness, learning rates) are
our own.
"""

from collections.abc import Mapping
from typing import Any

from paddock.config import ConfigError, Recipe

_OPTIM: dict[str, Any] = {
    "type": "adamw",
    "lr": 2e-6,
    "betas": [0.9, 0.98],
    "schedule": "constant",
    "warmup_ratio": 0.0,
}
_SYNCHRONOUS: dict[str, Any] = {"pipeline_depth": 0, "max_staleness": 0}
_ICEPOP: dict[str, Any] = {
    "kind": "icepop",
    "clip_low": 0.2,
    "clip_high": 0.28,
    "icepop_beta": 2.0,
}

STAGE_DEFAULTS: dict[str, dict[str, Any]] = {
    "reasoning": {
        "rollout": {"groups_per_batch": 32, **_SYNCHRONOUS},
        "group_size": 32,
        "credit": {"advantage_norm": "std"},
        "loss": {**_ICEPOP, "aggregate": "sequence"},
        "optim": _OPTIM,
    },
    "agentic": {
        "rollout": {"groups_per_batch": 32, "pipeline_depth": 1, "max_staleness": 4},
        "group_size": 8,
        "credit": {"advantage_norm": "mean"},
        "loss": {"kind": "double_sided", "aggregate": "token", "clip_low": 0.5, "clip_high": 1.0},
        "optim": _OPTIM,
        "reset_optimizer": True,
    },
    "general": {
        "rollout": {"groups_per_batch": 32, **_SYNCHRONOUS},
        "group_size": 32,
        "credit": {"advantage_norm": "std"},
        "loss": {**_ICEPOP, "aggregate": "token"},
        "optim": _OPTIM,
    },
    "distill": {
        "rollout": {"groups_per_batch": 1024, **_SYNCHRONOUS},
        "group_size": 1,
        "credit": {"keep_zero_variance": True},
        "loss": {**_ICEPOP, "aggregate": "sequence"},
        "optim": _OPTIM,
    },
}


def with_stage_defaults(recipe: Recipe) -> Recipe:
    """The recipe merged over the defaults of its stage. Raises ConfigError for an unknown stage."""
    stage = recipe.values.get("stage")
    if stage not in STAGE_DEFAULTS:
        problem = "'stage' is missing" if stage is None else f"unknown stage {stage!r}"
        raise ConfigError(f"{problem}; must be one of {', '.join(STAGE_DEFAULTS)}")
    defaults = {
        name: value for name, value in STAGE_DEFAULTS[stage].items() if name != "group_size"
    }
    group_size = STAGE_DEFAULTS[stage]["group_size"]
    tasks = recipe.values.get("tasks")
    if isinstance(tasks, Mapping):
        defaults["tasks"] = {name: {"group_size": group_size} for name in tasks}
    return Recipe(_merge(defaults, recipe.values), recipe.origins)


def _merge(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in override.items():
        below = merged.get(name)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[name] = _merge(below, value) if both else value  # type: ignore[arg-type]
    return merged
