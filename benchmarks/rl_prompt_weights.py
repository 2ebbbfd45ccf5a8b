"""Prompts weighted by their running pass rate against all alike: zero-variance groups at equal
rollouts.

    python -m benchmarks.rl_prompt_weights --runs runs/nano --out runs/rl_prompt_weights

Both arms sample the same number of groups of nano-rules, from the same prompts: most are learnt,
some colours are not. Zero-variance groups take part in a batch (they have no gradient), so that
equal updates are equal rollouts. Once more without training, from a model that has learnt most of
it: there nothing but the draws differs. A second call resumes.
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


def train(arm: str, seed: int, base: Path, out: Path, *options: str) -> tuple[Path, list[bool]]:
    """A run and whether each of its groups has equal rewards."""
    folder = out / f"{arm}-{seed}"
    recipe = out / "recipe.toml"
    shared = Path("recipes/nano/rl.toml").resolve()
    recipe.write_text(RECIPE.format(recipe=shared, updates=UPDATES, base=base, prompts=PROMPTS))
    sets = [word for each in (f"seed={seed}", *ARMS[arm]) for word in ("--set", each)]
    paddock("rl", str(recipe), "--out", str(folder), *sets, *options)
    return folder, zero_variance_groups(folder)


def run(arm: str, seed: int, base: Path, out: Path) -> WeightingOutcome:
    folder, equal = train(arm, seed, base, out)
    found = paddock("eval", str(folder), "nano-rules", "--num-tasks", str(TASKS), "--json")
    return WeightingOutcome(
        groups=len(equal),
        zero_variance=sum(equal),
        second_half=statistics.fmean(equal[len(equal) // 2 :]),
        held_out=json.loads(found)["mean_reward"],
    )


def fixed_policy(base: Path, out: Path, seeds: int) -> Claim:
    """The same from a model that is not trained any more."""
    out.mkdir(parents=True, exist_ok=True)
    shares: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for seed in range(seeds):
        for arm in ARMS:
            _, equal = train(arm, seed, base, out, "--debug", "rollout-only")
            shares[arm].append(statistics.fmean(equal))
            print(f"{arm:<9} seed {seed}, fixed: {shares[arm][-1]:.3f}", flush=True)
    text = {arm: " ".join(f"{share:.0%}" for share in found) for arm, found in shares.items()}
    return Claim(
        name=f"zero-variance groups, fixed policy: prompts weighted / all alike, {seeds} seeds",
        target="fewer with weights",
        measured=f"{text['weighted']} / {text['uniform']}",
        holds=all(a < b for a, b in zip(shares["weighted"], shares["uniform"], strict=True)),
    )


def claims(
    runs: Path = Path("runs/nano"), out: Path = Path("runs/rl_prompt_weights"), seeds: int = 3
) -> list[Claim]:
    fixed = fixed_policy(runs / "general", out / "fixed", seeds)
    found: dict[str, list[WeightingOutcome]] = {arm: [] for arm in ARMS}
    for seed in range(seeds):
        for arm in ARMS:
            found[arm].append(run(arm, seed, runs / "sft", out))
            print(f"{arm:<9} seed {seed}: {found[arm][-1]}", flush=True)

    def show(name: str, form: str) -> str:
        cells = [" ".join(format(getattr(each, name), form) for each in found[arm]) for arm in ARMS]
        return " / ".join(reversed(cells))

    (groups,) = {each.groups for each_arm in found.values() for each in each_arm}
    return [
        fixed,
        Claim(
            name=f"zero-variance groups of {groups} while training, {seeds} seeds",
            measured=show("zero_variance", ""),
        ),
        Claim(name="their share of the second half", measured=show("second_half", ".0%")),
        Claim(name="held-out reward", measured=show("held_out", ".3f")),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/nano"))
    parser.add_argument("--out", type=Path, default=Path("runs/rl_prompt_weights"))
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    print_claims(claims(options.runs, options.out, options.seeds))


if __name__ == "__main__":
    main()
