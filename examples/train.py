"""Train one stage from a recipe and watch its loss.

    python examples/train.py [OUT]

OUT is the run folder (default: runs/examples/tiny). Run it again to resume; raise `steps` with an
override to train for longer.
"""

import sys
from pathlib import Path

from paddock import launch

RECIPE = Path(__file__).with_name("tiny.toml")


def main(out: str = "runs/examples/tiny") -> None:
    run = launch.train(
        RECIPE,
        out=out,
        overrides=["steps=10", "optim.lr=2e-3"],
        on_update=lambda step: print(f"step {step.step}: loss {step.output.losses['loss']:.3f}"),
    )
    print(f"run folder: {run}")


if __name__ == "__main__":
    main(*sys.argv[1:])
