"""MTP during RL: acceptance length before and after a stage, with the layer frozen and trained.

    python -m benchmarks.rl_mtp --base runs/nano/sft --out runs/rl_mtp

Every run is one call of `paddock rl` on recipes/nano/reasoning.toml from the same model, with three
draft tokens in the rollout engine. Reported are the metric `accept_length` (greedy) and what the
engine counted in the first and last fifth of the stage, at temperature 1. A second call resumes.
"""

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rl_learn import paddock
from benchmarks.table import Claim, print_claims

RECIPE = "recipes/nano/reasoning.toml"
ARMS = {"frozen": (), "trained": ("train_mtp=true",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceOutcome:
    """Acceptance lengths before and after one run, and its last reward."""

    greedy: tuple[float, float]
    sampled: tuple[float, float]
    reward: float


def lines(file: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def engine_acceptance(run: Path) -> tuple[float, float]:
    """Tokens per decode step that the engine counted in the first and last fifth of a run."""
    rows = lines(run / "engine.jsonl")
    whole = max(row["generated_tokens"] for row in rows)
    while rows[-1]["generated_tokens"] < whole:  # of a second call, whose engine did nothing
        rows.pop()

    def between(low: float, high: float) -> float:
        inside = [row for row in rows if low * whole <= row["generated_tokens"] <= high * whole]
        first, last = inside[0], inside[-1]
        tokens = last["generated_tokens"] - first["generated_tokens"]
        return tokens / (last["verify_steps"] - first["verify_steps"])

    return between(0.0, 0.2), between(0.8, 1.0)


def run(arm: str, seed: int, base: Path, out: Path) -> AcceptanceOutcome:
    folder = out / f"{arm}-{seed}"
    overrides = [f"init.checkpoint={base}", f"seed={seed}", "engines.num_speculative_tokens=3"]
    options = [word for each in (*overrides, *ARMS[arm]) for word in ("--set", each)]
    paddock("rl", RECIPE, "--out", str(folder), *options)
    rows = lines(folder / "metrics.jsonl")
    greedy = [row["accept_length"] for row in rows if "accept_length" in row]
    return AcceptanceOutcome(
        greedy=(greedy[0], greedy[-1]),
        sampled=engine_acceptance(folder),
        reward=statistics.fmean(row["reward"] for row in rows[-3:]),
    )


def claims(
    base: Path = Path("runs/nano/sft"), out: Path = Path("runs/rl_mtp"), seeds: int = 3
) -> list[Claim]:
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[AcceptanceOutcome]] = {arm: [] for arm in ARMS}
    for seed in range(seeds):
        for arm in ARMS:
            found[arm].append(run(arm, seed, base, out))
            print(f"{arm:<8} seed {seed}: {found[arm][-1]}", flush=True)

    def change(arm: str, name: str) -> str:
        pairs = [getattr(each, name) for each in found[arm]]
        return ", ".join(f"{before:.2f} -> {after:.2f}" for before, after in pairs)

    def rewards(arm: str) -> str:
        return " ".join(f"{each.reward:.3f}" for each in found[arm])

    both = list(zip(found["trained"], found["frozen"], strict=True))
    return [
        Claim(
            name=f"acceptance length, greedy, over a stage: trained / frozen, {seeds} seeds",
            target="trained ends higher",
            measured=f"{change('trained', 'greedy')} / {change('frozen', 'greedy')}",
            holds=all(trained.greedy[1] > frozen.greedy[1] for trained, frozen in both),
        ),
        Claim(
            name="the same, counted by the engine at temperature 1",
            target="trained ends higher",
            measured=f"{change('trained', 'sampled')} / {change('frozen', 'sampled')}",
            holds=all(trained.sampled[1] > frozen.sampled[1] for trained, frozen in both),
        ),
        Claim(
            name="reward at the end",
            measured=f"{rewards('trained')} / {rewards('frozen')}",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, default=Path("runs/nano/sft"))
    parser.add_argument("--out", type=Path, default=Path("runs/rl_mtp"))
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    print_claims(claims(options.base, options.out, options.seeds))


if __name__ == "__main__":
    main()
