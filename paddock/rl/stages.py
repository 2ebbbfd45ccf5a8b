"""What each RL stage of the paper is by default: a recipe names its stage and says what differs.

reasoning  groups compared in standard deviations, IcePop with clip-higher, on-policy
agentic    groups compared by their mean, double-sided importance sampling, asynchronous, the
           optimizer begun anew at each hand-over of weights
general    as reasoning, every token alike
distill    teachers from earlier stages, one attempt a prompt, no comparison

Numbers that the paper does not give (windows of the agentic loss, staleness, learning rates) are
ours.
"""

from collections.abc import Mapping
from typing import Any

from paddock.config import ConfigError, Recipe

_RATES: dict[str, Any] = {
    "type": "adamw",
    "lr": 2e-6,
    "betas": [0.9, 0.98],
    "schedule": "constant",
    "warmup_ratio": 0.0,
}
_SYNCHRONOUS: dict[str, Any] = {"pipeline_depth": 0, "max_staleness": 0}

STAGE_DEFAULTS: dict[str, dict[str, Any]] = {
    "reasoning": {
        "rollout": {"groups_per_batch": 32, **_SYNCHRONOUS},
        "group_size": 32,
        "credit": {"advantage_norm": "std"},
        "loss": {
            "kind": "icepop",
            "aggregate": "sequence",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "icepop_beta": 2.0,
        },
        "optim": _RATES,
    },
    "agentic": {
        "rollout": {"groups_per_batch": 32, "pipeline_depth": 1, "max_staleness": 4},
        "group_size": 8,
        "credit": {"advantage_norm": "mean"},
        "loss": {"kind": "double_sided", "aggregate": "token", "clip_low": 0.5, "clip_high": 1.0},
        "optim": _RATES,
        "reset_optimizer": True,
    },
    "general": {
        "rollout": {"groups_per_batch": 32, **_SYNCHRONOUS},
        "group_size": 32,
        "credit": {"advantage_norm": "std"},
        "loss": {
            "kind": "icepop",
            "aggregate": "token",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "icepop_beta": 2.0,
        },
        "optim": _RATES,
    },
    "distill": {
        "rollout": {"groups_per_batch": 1024, **_SYNCHRONOUS},
        "group_size": 1,
        "credit": {"keep_zero_variance": True},
        "loss": {
            "kind": "icepop",
            "aggregate": "sequence",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "icepop_beta": 2.0,
        },
        "optim": _RATES,
    },
}


def with_stage_defaults(recipe: Recipe) -> Recipe:
    """The recipe laid over what its stage is by default."""
    stage = recipe.values.get("stage")
    if stage not in STAGE_DEFAULTS:
        said = "names no 'stage'" if stage is None else f"has the 'stage' {stage!r}"
        raise ConfigError(f"the recipe {said}; there are {', '.join(STAGE_DEFAULTS)}")
    defaults = {
        name: value for name, value in STAGE_DEFAULTS[stage].items() if name != "group_size"
    }
    size = STAGE_DEFAULTS[stage]["group_size"]
    tasks = recipe.values.get("tasks")
    if isinstance(tasks, Mapping):
        defaults["tasks"] = {name: {"group_size": size} for name in tasks}
    return Recipe(_over(defaults, recipe.values), recipe.origins)


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(below)
    for name, value in above.items():
        under = found.get(name)
        both = isinstance(value, Mapping) and isinstance(under, Mapping)
        found[name] = _over(under, value) if both else value  # type: ignore[arg-type]
    return found
