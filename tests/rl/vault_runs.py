"""RL runs on the vault environment: recipe, registration, reading metrics and events."""

import json
from dataclasses import replace
from pathlib import Path

from paddock.checkpoint.weight_sync import weight_digests
from paddock.config import load_recipe, resolve
from paddock.envs.registry import REGISTRY
from paddock.rl.learner import Learner
from paddock.rl.settings import RLSettings
from paddock.rl.stages import with_stage_defaults

RECIPE = """
stage = "agentic"
steps = 4
[init]
checkpoint = "{start}"
[tasks.vault]
env = "vault"
group_size = 4
[rollout]
groups_per_batch = 2
[sampling]
max_new_tokens = 24
[optim]
type = "muon"
lr = 2e-3
weight_decay = 0.0
[compute]
device = "cpu"
[engines]
kv_cache_bytes = 8388608
[checkpoint]
every = 1
keep_last = 100
"""
DETERMINISTIC = ("rollout.deterministic=true", "rollout.order=in_order")
SYNCHRONOUS = ("rollout.pipeline_depth=0", "rollout.max_staleness=0")
ONE_STEP_OFF = ("rollout.pipeline_depth=1", "rollout.max_staleness=1")


def register():
    """Register the vault environment under its recipe name."""
    REGISTRY["vault"] = replace(
        REGISTRY["logic"], settings="tests.rl.vault_env:VaultSettings", needs=""
    )


def recipe_in(folder: Path, start: Path, text: str = RECIPE) -> Path:
    file = folder / "recipe.toml"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(text.format(start=start))
    return file


def settings_of(recipe: Path, *sets: str) -> RLSettings:
    return resolve(RLSettings, with_stage_defaults(load_recipe(recipe, sets)))


class Hashes:
    """Records weight digests after each batch by wrapping `Learner.train`."""

    def __init__(self, monkeypatch):
        self.after: dict[int, dict[str, str]] = {}
        train = Learner.train

        def recorded(learner, groups):
            found = train(learner, groups)
            self.after[learner.updates] = weight_digests(learner.trainer.network)
            return found

        monkeypatch.setattr(Learner, "train", recorded)

    def take(self):
        found, self.after = self.after, {}
        return found


def numbers(run: Path) -> dict[int, dict]:
    """The metrics of each update without timings; the last line of an update counts."""
    clock = {"time", "step_time_s", "weight_sync_s", "trainer_idle", "engine_idle"}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: {k: v for k, v in line.items() if k not in clock} for line in lines}


def events(run: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]
