"""Prompts weighted by their running pass rate against all alike: zero-variance groups at equal
rollouts.

    python -m benchmarks.rl_prompt_weights --base runs/nano/sft --out runs/rl_prompt_weights

Both arms sample the same number of groups of nano-rules, from the same prompts: most are learnt,
some colours are not. Zero-variance groups take part in a batch (they have no gradient), so that
equal updates are equal rollouts. A second call resumes.
"""

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rl_learn import paddock
from benchmarks.table import Claim, print_claims
from paddock.journal import LedgerView

RECIPE = """
extends = "{recipe}"
stage = "reasoning"
steps = {updates}

[init]
checkpoint = "{base}"

[credit]
keep_zero_variance = true

[tasks.rules]
env = "nano-rules"
group_size = 8
num_tasks = {prompts}
"""
UPDATES, PROMPTS, TASKS = 32, 32, 300
ARMS = {
    "uniform": (),
    "weighted": ("tasks.rules.prompt_weights.min_weight=0.1",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightingOutcome:
    """Groups of one run, and the held-out reward after it."""

    groups: int
    zero_variance: int
    second_half: float  # share of zero-variance groups in the second half
    held_out: float


def zero_variance_groups(run: Path) -> list[bool]:
    """Whether all rewards of a group are equal, of every group in the order of issue."""
    with LedgerView(run / "ledger.sqlite") as ledger:
        ordinals = [group.ordinal for group in ledger.groups("trained")]
        rewards: dict[int, set[float]] = {ordinal: set() for ordinal in ordinals}
        for rollout in ledger.rollout_summaries(ordinals):
            # A failure of the policy is trained with reward 0.
            rewards[rollout.ordinal].add(0.0 if rollout.reward is None else rollout.reward)
    return [len(found) == 1 for found in rewards.values()]


def run(arm: str, seed: int, base: Path, out: Path) -> WeightingOutcome:
    folder = out / f"{arm}-{seed}"
    recipe = out / "recipe.toml"
    shared = Path("recipes/nano/rl.toml").resolve()
    recipe.write_text(RECIPE.format(recipe=shared, updates=UPDATES, base=base, prompts=PROMPTS))
    overrides = [f"seed={seed}", *ARMS[arm]]
    paddock("rl", str(recipe), "--out", str(folder), *(w for s in overrides for w in ("--set", s)))
    equal = zero_variance_groups(folder)
    found = paddock("eval", str(folder), "nano-rules", "--num-tasks", str(TASKS), "--json")
    return WeightingOutcome(
        groups=len(equal),
        zero_variance=sum(equal),
        second_half=statistics.fmean(equal[len(equal) // 2 :]),
        held_out=json.loads(found)["mean_reward"],
    )


def claims(
    base: Path = Path("runs/nano/sft"), out: Path = Path("runs/rl_prompt_weights"), seeds: int = 3
) -> list[Claim]:
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[WeightingOutcome]] = {arm: [] for arm in ARMS}
    for seed in range(seeds):
        for arm in ARMS:
            found[arm].append(run(arm, seed, base, out))
            print(f"{arm:<9} seed {seed}: {found[arm][-1]}", flush=True)

    def shares(arm: str) -> list[float]:
        return [each.zero_variance / each.groups for each in found[arm]]

    def late(arm: str) -> str:
        return " ".join(f"{each.second_half:.0%}" for each in found[arm])

    def held_out(arm: str) -> str:
        return " ".join(f"{each.held_out:.3f}" for each in found[arm])

    (groups,) = {each.groups for runs in found.values() for each in runs}
    text = {arm: " ".join(f"{share:.0%}" for share in shares(arm)) for arm in ARMS}
    return [
        Claim(
            name=f"zero-variance groups of {groups}, prompts weighted / all alike, {seeds} seeds",
            target="fewer with weights",
            measured=f"{text['weighted']} / {text['uniform']}",
            holds=all(
                weighted < uniform
                for weighted, uniform in zip(shares("weighted"), shares("uniform"), strict=True)
            ),
        ),
        Claim(
            name="the same in the second half",
            measured=f"{late('weighted')} / {late('uniform')}",
        ),
        Claim(
            name="held-out reward",
            measured=f"{held_out('weighted')} / {held_out('uniform')}",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, default=Path("runs/nano/sft"))
    parser.add_argument("--out", type=Path, default=Path("runs/rl_prompt_weights"))
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    print_claims(claims(options.base, options.out, options.seeds))


if __name__ == "__main__":
    main()
