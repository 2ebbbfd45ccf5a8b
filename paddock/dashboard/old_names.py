"""Names in the files of older runs, translated to the current ones when they are read."""

from collections.abc import Mapping
from typing import Any

METRICS = {
    "held_out": "val_loss",
    "mtp": "mtp_loss",
    "balance": "balance_loss",
    "indexer": "indexer_loss",
    "imbalance": "expert_imbalance",
    "seconds": "step_time_s",
    "gap": "logprob_diff",
    "gap_kl": "train_inference_kl",
    "routed_apart": "routing_mismatch",
    "teacher_gap": "teacher_kl",
    "flat": "zero_variance",
    "pushed_s": "weight_sync_s",
}
METRIC_PREFIXES = {"reward_": "reward/", "failed_": "failures/"}
EVENTS = {
    "plan": "pipeline_started",
    "plan_done": "pipeline_finished",
    "stage_begun": "stage_started",
    "stage_done": "stage_finished",
    "stage_undone": "stage_reset",
    "skill": "suite_result",
    "held_out": "validation",
}
EVENT_FIELDS = {  # by the current kind of the event
    "started": {"machine": "hardware", "flops_token": "flops_per_token"},
    "validation": {"nats": "loss"},
    "stage_finished": {"about": "description", "verb": "command"},
    "suite_result": {"skill": "suite", "error": "stderr", "told": "detail"},
}
ENGINE = {
    "retractions": "preemptions",
    "page_tokens": "page_size",
    "pages_spare": "pages_evictable",
    "hit_tokens": "prefix_cache_hit_tokens",
    "asked_tokens": "prefix_cache_query_tokens",
    "read_tokens": "prefill_tokens",
    "thinking_tokens": "reasoning_tokens",
    "drafts_proposed": "draft_tokens",
    "drafts_accepted": "accepted_draft_tokens",
    "drafts_at": "draft_acceptance_per_position",
}
ROLLOUTS = {"began": "started", "ended": "finished", "member": "rollout", "failed": "failure"}
NETWORK = {
    "pieces": "tokens",
    "picks": "selected",
    "load": "expert_load",
    "acceptance": "acceptance_rate",
}
REASONS = {  # why a group was not trained, in ledgers
    "flat": "zero variance",
    "too few valid": "too few valid rollouts",
    "nothing to train": "no trained tokens",
}
RECIPE = {"start": "init", "machine": "compute", "folder": "checkpoint"}  # keys that are read here


def metric_name(name: str) -> str:
    """
    >>> metric_name("gap"), metric_name("reward_tools"), metric_name("loss")
    ('logprob_diff', 'reward/tools', 'loss')
    """
    for old, new in METRIC_PREFIXES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return METRICS.get(name, name)


def rename_event(event: Mapping[str, Any]) -> dict[str, Any]:
    """The event with current names of its kind and fields."""
    kind = event.get("kind")
    if not isinstance(kind, str):
        return dict(event)
    kind = EVENTS.get(kind, kind)
    fields = EVENT_FIELDS.get(kind, {})
    renamed = {fields.get(name, name): value for name, value in event.items()}
    return {**renamed, "kind": kind}


def rename_keys(value: Any, names: Mapping[str, str]) -> Any:
    """The value with renamed keys, also of tables within it.

    >>> rename_keys({"experts": [{"layer": 1, "load": [3]}]}, NETWORK)
    {'experts': [{'layer': 1, 'expert_load': [3]}]}
    """
    if isinstance(value, Mapping):
        return {names.get(key, key): rename_keys(inner, names) for key, inner in value.items()}
    if isinstance(value, list):
        return [rename_keys(inner, names) for inner in value]
    return value
