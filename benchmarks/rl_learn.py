"""Does it learn? The laptop's agent on a tool-use task, synchronously, asynchronously, and without
the mask that makes staleness bearable.

    python -m benchmarks.rl_learn --base runs/nano/sparse --out runs/rl_learn

The base model (or one of several, by seed) is fine-tuned as recipes/nano does it, but nearly
all demonstrations of the tools guess, so that there is something to learn. Every arm is then
one call of `paddock rl` from that model; what it learnt is measured by `paddock eval` on held-out
tasks. Called again, it goes on.
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

RECIPE = "recipes/nano/agentic.toml"
TUNING = Path("recipes/nano/sft.toml")
STYLES, GUESSING = "{ full = 0.38, guess = 0.62 }", "{ full = 0.08, guess = 0.92 }"
KINDS = 'kinds=["file"]'  # the kind of look-up that fine-tuning leaves worst
UPDATES = 30  # at most
GOAL = 0.95  # mean reward of three batches in a row, at which a run ends
TASKS = 200
MINUTES = 5

FRESH = ("rollout.pipeline_depth=0", "rollout.max_staleness=0")
STALE = ("rollout.pipeline_depth=2", "rollout.max_staleness=4")
# However fast the engine is, nobody gets new weights before eight updates are done; and these are
# twice as large, or even so stale a policy would still be nearly the one that learns.
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
    """One run: held-out reward before and after, the curve of training, what it took."""

    before: float
    after: float
    curve: list[float]
    lag: float
    wall_s: float
    cpu_s: float | None = None  # of one core; what counts where others use the machine too

    @property
    def worst_late(self) -> float:
        """The lowest mean of five batches in a row in the second half: collapse shows here."""
        half = self.curve[len(self.curve) // 2 :]
        return min(statistics.fmean(half[i : i + 5]) for i in range(max(1, len(half) - 4)))


def paddock(*words: str, may_end: bool = False) -> str:
    """`may_end`: a task with nothing left to teach ends a run with an error, and no crash."""
    command = [sys.executable, "-m", "paddock.cli", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=not may_end)
    return done.stdout


def cpu_s() -> float:
    """Of all processes called so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def held_out(model: Path) -> float:
    found = paddock(
        "eval", str(model), "nano-tools", "--num-tasks", str(TASKS), "--set", KINDS, "--json"
    )
    return float(json.loads(found)["mean"])


def tuned(base: Path, seed: int, out: Path) -> Path:
    """The base model after a fine-tuning that mostly shows guesses where tools could be used."""
    recipe, folder = out / "sft.toml", out / f"sft-{seed}"
    said = TUNING.read_text()
    assert STYLES in said, f"{TUNING} no longer says {STYLES}"
    said = said.replace(STYLES, GUESSING)
    recipe.write_text(said.replace('"base.toml"', f'"{TUNING.with_name("base.toml").resolve()}"'))
    paddock(
        *("train", str(recipe), "--out", str(folder)),
        *("--set", f"init.checkpoint={base}", "--set", f"seed={seed}"),
    )
    return folder


def run(arm: str, seed: int, start: Path, out: Path) -> Outcome:
    folder = out / f"{arm.replace(', ', '-').replace(' ', '-')}-{seed}"
    noted = folder / "outcome.json"
    if not noted.is_file():
        sets = [
            f"init.checkpoint={start}",
            f"seed={seed}",
            f"steps={UPDATES}",
            f"stop_at_reward={GOAL}",
            f"tasks.tools.args.{KINDS}",
            *ARMS[arm],
        ]
        before, began, used = held_out(start), time.perf_counter(), cpu_s()
        words = [word for each in sets for word in ("--set", each)]
        paddock("rl", RECIPE, "--out", str(folder), *words, may_end=True)
        took = {"wall_s": time.perf_counter() - began, "cpu_s": cpu_s() - used}
        noted.write_text(json.dumps({"before": before, "after": held_out(folder), **took}))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Outcome(
        curve=[line["reward"] for line in lines if "reward" in line],
        lag=statistics.fmean(line["staleness"] for line in lines),
        **json.loads(noted.read_text()),
    )


def show(arm: str, seed: int, found: Outcome) -> None:
    curve = " ".join(f"{reward:.2f}" for reward in found.curve[::3])
    print(
        f"{arm:<20} seed {seed}: held out {found.before:.3f} -> {found.after:.3f} after "
        f"{len(found.curve)} updates, mean lag {found.lag:.1f}, {found.wall_s:.0f} s, "
        f"{found.cpu_s or 0:.0f} of CPU; {curve}",
        flush=True,
    )


def claims(
    bases: list[Path] | None = None, out: Path = Path("runs/rl_learn"), seeds: int = 3
) -> list[Claim]:
    """Three seeds an arm; from one model, or each from its own."""
    bases = bases or [Path("runs/nano/sparse")]
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Outcome]] = {arm: [] for arm in ARMS}
    for seed in range(seeds):
        start = tuned(bases[seed % len(bases)], seed, out)
        for arm in ARMS:
            found[arm].append(run(arm, seed, start, out))
            show(arm, seed, found[arm][-1])
    return [*_learnt(found), *_same(found), *_worse(found)]


def _learnt(found: dict[str, list[Outcome]]) -> list[Claim]:
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


def _same(found: dict[str, list[Outcome]]) -> list[Claim]:
    sync, apart = ([o.after for o in found[arm]] for arm in ("sync", "async"))
    # Of a mean of three runs, each measured on TASKS tasks.
    noise = 2 * (0.5 / TASKS**0.5 / 3**0.5 + statistics.pstdev([*sync, *apart]) / 3**0.5)
    difference = abs(statistics.fmean(sync) - statistics.fmean(apart))
    return [
        Claim(
            name="synchronous and asynchronous end alike",
            target=f"within noise, {noise:.3f}",
            measured=f"{difference:.3f} apart",
            holds=difference <= noise,
        )
    ]


def _worse(found: dict[str, list[Outcome]]) -> list[Claim]:
    masked, bare = (found[arm] for arm in ("very stale, masked", "very stale, no mask"))
    said = [
        f"{a.after:.2f} / {b.after:.2f}, lowest late {a.worst_late:.2f} / {b.worst_late:.2f}"
        for a, b in zip(masked, bare, strict=True)
    ]
    kept, lost = (statistics.fmean(o.after for o in runs) for runs in (masked, bare))
    return [
        Claim(
            name="very stale: with mask / without",
            target="without is worse by 0.05",
            measured="; ".join(said),
            holds=kept - lost >= 0.05,
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, nargs="+", help="base models, one a seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/rl_learn"))
    options = parser.parse_args()
    print_claims(claims(options.base, options.out, options.seeds))


if __name__ == "__main__":
    main()
