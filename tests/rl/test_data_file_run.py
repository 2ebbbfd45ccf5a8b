"""RL from a data file with a reward function of one's own: a recipe and the function, no glue."""

import json

from paddock.cli.rl import run_rl
from paddock.journal import Ledger
from paddock.launch.rollouts import LEDGER_FILE
from paddock.records import Verdict
from tests.rl.vault_runs import SYNCHRONOUS, numbers, recipe_in

RECIPE = """
stage = "agentic"
steps = 2
[init]
checkpoint = "{start}"
[tasks.short]
env = "ask"
group_size = 4
[tasks.short.args]
train_file = "ROWS"
reward_funcs = ["FOLDER/my_rewards.py:brevity"]
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
"""


def test_a_data_file_and_a_reward_function_train_a_model(start, tmp_path):
    rows = "\n".join(json.dumps({"prompt": f"Vault {n} .", "limit": 40 + n}) for n in range(10))
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "my_rewards.py").write_text(
        "def brevity(completions, limit, **kwargs):\n"
        "    return [-len(text) / most for text, most in zip(completions, limit)]\n"
    )
    text = RECIPE.replace("ROWS", str(tmp_path / "rows.jsonl")).replace("FOLDER", str(tmp_path))
    run_rl(recipe_in(tmp_path, start, text), tmp_path / "run", [*SYNCHRONOUS])
    assert sorted(numbers(tmp_path / "run")) == [1, 2]
    with Ledger(tmp_path / "run" / LEDGER_FILE) as ledger:
        branches = [b for g in ledger.groups() for b in ledger.rollouts(g.ordinal).values()]
    found = [branch.outcome for branch, *_ in branches]
    assert len(found) >= 16 and all(isinstance(outcome, Verdict) for outcome in found)
    assert len({outcome.reward for outcome in found}) > 2
    assert all(outcome.reward == outcome.parts["brevity"] for outcome in found)
