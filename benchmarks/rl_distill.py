"""Does distillation bring back what a later stage erased, and keep what that stage taught?

    python -m benchmarks.rl_distill --first runs/nano/reasoning --out runs/rl_distill

The laptop's model can work through chains of sums (--first). A second stage teaches it to keep to
rules, at a rate at which it forgets the chains. Both then teach the second: `paddock distill`, with
a teacher for each kind of prompt. Scores are `paddock eval`'s, on held-out tasks.
"""

import argparse
import json
from pathlib import Path

from benchmarks.rl_learn import paddock
from benchmarks.table import Claim, print_claims

# Four times the rate of the story: the rules are learnt all the same, the chains are lost. (Eight
# times the rate loses the rules too.)
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
    """Of chains, 200 tasks; of rules, every held-out question five times."""
    chain = paddock("eval", str(model), "nano-chain", "--num-tasks", "200", "--json")
    rules = paddock(
        "eval", str(model), "nano-rules", "--num-tasks", "35", "--rollouts-per-task", "5", "--json"
    )
    found = {"chain": json.loads(chain)["mean"], "rules": json.loads(rules)["mean"]}
    print(f"{model}: " + ", ".join(f"{k} {v:.3f}" for k, v in found.items()), flush=True)
    return found


def claims(
    first: Path = Path("runs/nano/reasoning"), out: Path = Path("runs/rl_distill")
) -> list[Claim]:
    out.mkdir(parents=True, exist_ok=True)
    second, last = out / "second", out / "distilled"
    sets = [f"init.checkpoint={first.resolve()}", *FORGETS]
    words = [word for each in sets for word in ("--set", each)]
    paddock("rl", "recipes/nano/general.toml", "--out", str(second), *words)
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
            name="the second stage erases the first skill",
            target="< 0.8 of it left",
            measured=f"{before['chain']:.3f} -> {between['chain']:.3f}",
            holds=erased < 0.8,
        ),
        Claim(
            name="distillation restores it",
            target=">= 90 % of its teacher",
            measured=f"{after['chain']:.3f}, {after['chain'] / before['chain']:.0%}",
            holds=after["chain"] >= 0.9 * before["chain"],
        ),
        Claim(
            name="and keeps the new skill",
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
