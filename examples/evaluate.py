"""Evaluate a model in environments: mean reward, standard error and pass@k.

    python examples/evaluate.py [OUT]

Trains a tiny model in the folder OUT first; pass any checkpoint or run folder to `evaluate`.
"""

import sys
from pathlib import Path

from paddock import launch


def main(out: str = "runs/examples/evaluate") -> None:
    model = launch.train(Path(__file__).with_name("tiny.toml"), out=out)
    results = launch.evaluate(model, ["nano-chain"], num_tasks=4, rollouts_per_task=2)
    for env, result in results.items():
        found = result.metrics
        print(f"{env}: reward {found.mean_reward:.3f} ± {found.stderr:.3f} SE")
        print(f"pass@k: {found.pass_at_k}, not scored: {found.failures or 'none'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
