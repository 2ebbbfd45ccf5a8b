"""RL learning curves: nano on a tool-use task, synchronous, asynchronous, and very stale with and
without the IcePop mask.

    python -m benchmarks.rl_learn --base runs/nano/sparse --out runs/rl_learn

The base model (or one per seed) is fine-tuned as in recipes/nano, except that nearly all tool
demonstrations guess, which leaves something to learn. Every arm is then one call of `paddock rl`
from that model, measured by `paddock eval` on held-out tasks. A second call resumes.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.table import Claim, print_claims

RL_RECIPE = "recipes/nano/agentic.toml"
SFT_RECIPE = Path("recipes/nano/sft.toml")
STYLES, GUESSING = "{ full = 0.38, guess = 0.62 }", "{ full = 0.08, guess = 0.92 }"
KINDS = 'kinds=["file"]'  # the kind of look-up with the lowest reward after fine-tuning
MAX_UPDATES = 30
STOP_AT_REWARD = 0.95  # mean over three batches
TASKS = 200
MINUTES = 5

FRESH = ("rollout.pipeline_depth=0", "rollout.max_staleness=0")
STALE = ("rollout.pipeline_depth=2", "rollout.max_staleness=4")
# Engines get new weights only every eight updates. The learning rate is doubled: otherwise even so
# stale a policy would differ little from the trained one.
VERY_STALE = (
    "optim.lr=1e-3",
    "rollout.pipeline_depth=4",
    "rollout.max_staleness=16",
    "rollout.sync_weights_every=8",
    "checkpoint.every=8",
)
ARMS: dict[str, tuple[str, ...]] = {
    "sync": FRESH,
    "async": STALE,
    "very stale, masked": VERY_STALE,
    "very stale, no mask": (*VERY_STALE, "loss.kind=reinforce"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run: held-out reward before and after, training rewards, time."""

    before: float
    after: float
    curve: list[float]
    staleness: float  # mean, in updates
    wall_s: float
    cpu_s: float | None = None  # unlike wall_s, independent of other load on the machine

    @property
    def worst_late(self) -> float:
        """The lowest mean of five consecutive batches in the second half: shows a collapse."""
        half = self.curve[len(self.curve) // 2 :]
        return min(statistics.fmean(half[i : i + 5]) for i in range(max(1, len(half) - 4)))


def paddock(*arguments: str, may_fail: bool = False) -> str:
    """`may_fail`: a run may end with an error when only zero-variance groups are left."""
    command = [sys.executable, "-m", "paddock.cli", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=not may_fail)
    return done.stdout


def cpu_s() -> float:
    """CPU seconds of all child processes so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def held_out_reward(model: Path) -> float:
    found = paddock(
        "eval", str(model), "nano-tools", "--num-tasks", str(TASKS), "--set", KINDS, "--json"
    )
    return float(json.loads(found)["mean_reward"])


def fine_tune(base: Path, seed: int, out: Path) -> Path:
    """Fine-tune the base model on demonstrations that mostly guess instead of using tools."""
    recipe, folder = out / "sft.toml", out / f"sft-{seed}"
    text = SFT_RECIPE.read_text()
    assert STYLES in text, f"{SFT_RECIPE} has no {STYLES}"
    text = text.replace(STYLES, GUESSING)
    recipe.write_text(
        text.replace('"base.toml"', f'"{SFT_RECIPE.with_name("base.toml").resolve()}"')
    )
    paddock(
        *("train", str(recipe), "--out", str(folder)),
        *("--set", f"init.checkpoint={base}", "--set", f"seed={seed}"),
    )
    return folder


def run(arm: str, seed: int, start: Path, out: Path) -> Outcome:
    folder = out / f"{arm.replace(', ', '-').replace(' ', '-')}-{seed}"
    outcome = folder / "outcome.json"
    if not outcome.is_file():
        overrides = [
            f"init.checkpoint={start}",
            f"seed={seed}",
            f"steps={MAX_UPDATES}",
            f"stop_at_reward={STOP_AT_REWARD}",
            f"tasks.tools.args.{KINDS}",
            *ARMS[arm],
        ]
        before, started, cpu_before = held_out_reward(start), time.perf_counter(), cpu_s()
        options = [word for each in overrides for word in ("--set", each)]
        paddock("rl", RL_RECIPE, "--out", str(folder), *options, may_fail=True)
        times = {"wall_s": time.perf_counter() - started, "cpu_s": cpu_s() - cpu_before}
        after = held_out_reward(folder)
        outcome.write_text(json.dumps({"before": before, "after": after, **times}))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Outcome(
        curve=[line["reward"] for line in lines if "reward" in line],
        staleness=statistics.fmean(line["staleness"] for line in lines),
        **json.loads(outcome.read_text()),
    )


def show(arm: str, seed: int, found: Outcome) -> None:
    curve = " ".join(f"{reward:.2f}" for reward in found.curve[::3])
    print(
        f"{arm:<20} seed {seed}: held-out reward {found.before:.3f} -> {found.after:.3f} after "
        f"{len(found.curve)} updates, mean staleness {found.staleness:.1f}, {found.wall_s:.0f} s, "
        f"{found.cpu_s or 0:.0f} s of CPU; {curve}",
        flush=True,
    )


def claims(
    bases: list[Path] | None = None, out: Path = Path("runs/rl_learn"), seeds: int = 3
) -> list[Claim]:
    """Each arm on all seeds, from one base model or one per seed."""
    bases = bases or [Path("runs/nano/sparse")]
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Outcome]] = {arm: [] for arm in ARMS}
    for seed in range(seeds):
        start = fine_tune(bases[seed % len(bases)], seed, out)
        for arm in ARMS:
            found[arm].append(run(arm, seed, start, out))
            show(arm, seed, found[arm][-1])
    return [*_reward_claims(found), *_async_claims(found), *_mask_claims(found)]


def _reward_claims(found: dict[str, list[Outcome]]) -> list[Claim]:
    return [
        Claim(
            name=f"tool task, {arm}, three seeds: held-out reward",
            target=f"< 0.3 -> > 0.9 in {MINUTES} min",
            measured="; ".join(f"{o.before:.2f} -> {o.after:.2f} ({o.wall_s:.0f} s)" for o in runs),
            holds=all(o.before < 0.3 and o.after > 0.9 and o.wall_s < 60 * MINUTES for o in runs),
        )
        for arm, runs in found.items()
        if arm in ("sync", "async")
    ]


def _async_claims(found: dict[str, list[Outcome]]) -> list[Claim]:
    sync, asynchronous = ([o.after for o in found[arm]] for arm in ("sync", "async"))
    # Of the mean of three runs, each measured on TASKS tasks.
    noise = 2 * (0.5 / TASKS**0.5 / 3**0.5 + statistics.pstdev([*sync, *asynchronous]) / 3**0.5)
    difference = abs(statistics.fmean(sync) - statistics.fmean(asynchronous))
    return [
        Claim(
            name="synchronous against asynchronous: held-out reward",
            target=f"within noise, {noise:.3f}",
            measured=f"difference {difference:.3f}",
            holds=difference <= noise,
        )
    ]


def _mask_claims(found: dict[str, list[Outcome]]) -> list[Claim]:
    masked, unmasked = (found[arm] for arm in ("very stale, masked", "very stale, no mask"))
    parts = [
        f"{a.after:.2f} / {b.after:.2f}, lowest late {a.worst_late:.2f} / {b.worst_late:.2f}"
        for a, b in zip(masked, unmasked, strict=True)
    ]
    with_mask, without = (statistics.fmean(o.after for o in runs) for runs in (masked, unmasked))
    return [
        Claim(
            name="very stale: with mask / without",
            target="without is worse by 0.05",
            measured="; ".join(parts),
            holds=with_mask - without >= 0.05,
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, nargs="+", help="base models, one per seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/rl_learn"))
    options = parser.parse_args()
    print_claims(claims(options.base, options.out, options.seeds))


if __name__ == "__main__":
    main()
