"""Cross-stage distillation: restores a task that a later stage erased, and keeps the new one.

    python -m benchmarks.rl_distill --first runs/nano/reasoning --out runs/rl_distill

The nano model after reasoning RL solves chains of sums (--first). A second RL stage trains it on
rules, at a learning rate at which it forgets the chains. Both are then teachers of the second one:
`paddock distill`, with one teacher per task. Scores are from `paddock eval` on held-out tasks.
"""

import argparse
import json
from pathlib import Path

from benchmarks.rl_learn import paddock
from benchmarks.table import Claim, print_claims

# Four times the learning rate of recipes/nano: the rules are learnt, the chains are forgotten.
# (Eight times the rate loses the rules too.)
FORGETS = ("optim.lr=2e-3", "steps=30", "stop_at_reward=9.9")
RECIPE = """
extends = "{rl}"
stage = "distill"
steps = 24
[init]
checkpoint = "{second}"
[rollout]
groups_per_batch = 80
[loss]
teacher_clip = 5.0
[teachers.chains]
checkpoint = "{first}"
[teachers.rules]
checkpoint = "{second}"
[tasks.chain]
env = "nano-chain"
teacher = "chains"
[tasks.rules]
env = "nano-rules"
teacher = "rules"
"""


def scores(model: Path) -> dict[str, float]:
    """Mean rewards: 200 tasks of chains, every held-out task of rules five times."""
    chain = paddock("eval", str(model), "nano-chain", "--num-tasks", "200", "--json")
    rules = paddock(
        "eval", str(model), "nano-rules", "--num-tasks", "35", "--rollouts-per-task", "5", "--json"
    )
    found = {"chain": json.loads(chain)["mean_reward"], "rules": json.loads(rules)["mean_reward"]}
    print(f"{model}: " + ", ".join(f"{k} {v:.3f}" for k, v in found.items()), flush=True)
    return found


def claims(
    first: Path = Path("runs/nano/reasoning"), out: Path = Path("runs/rl_distill")
) -> list[Claim]:
    out.mkdir(parents=True, exist_ok=True)
    second, last = out / "second", out / "distilled"
    overrides = [f"init.checkpoint={first.resolve()}", *FORGETS]
    options = [word for each in overrides for word in ("--set", each)]
    paddock("rl", "recipes/nano/general.toml", "--out", str(second), *options)
    recipe = out / "distill.toml"
    recipe.write_text(
        RECIPE.format(
            rl=Path("recipes/nano/rl.toml").resolve(),
            first=first.resolve(),
            second=second.resolve(),
        )
    )
    paddock("distill", str(recipe), "--out", str(last))
    before, between, after = map(scores, (first, second, last))
    erased = between["chain"] / before["chain"]
    return [
        Claim(
            name="the second stage erases the first task",
            target="< 0.8 of its reward left",
            measured=f"{before['chain']:.3f} -> {between['chain']:.3f}",
            holds=erased < 0.8,
        ),
        Claim(
            name="distillation restores the first task",
            target=">= 90 % of its teacher",
            measured=f"{after['chain']:.3f}, {after['chain'] / before['chain']:.0%}",
            holds=after["chain"] >= 0.9 * before["chain"],
        ),
        Claim(
            name="and keeps the second task",
            target=">= 95 % of its teacher",
            measured=f"{between['rules']:.3f} -> {after['rules']:.3f}, "
            f"{after['rules'] / between['rules']:.0%}",
            holds=after["rules"] >= 0.95 * between["rules"],
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=Path, default=Path("runs/nano/reasoning"))
    parser.add_argument("--out", type=Path, default=Path("runs/rl_distill"))
    options = parser.parse_args()
    print_claims(claims(options.first, options.out))


if __name__ == "__main__":
    main()
