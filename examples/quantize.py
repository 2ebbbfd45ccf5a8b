"""Quantize a model to W4A8 and compare its loss with the original.

    python examples/quantize.py [OUT]

Trains a tiny model in the folder OUT first. The quantized folder is served by `paddock serve` and
read by `paddock.checkpoint.load_pretrained`.
"""

import sys
from pathlib import Path

from paddock import launch


def main(out: str = "runs/examples/quantize") -> None:
    model = launch.train(Path(__file__).with_name("tiny.toml"), out=f"{out}/model")
    report = launch.quantize(
        model,
        f"{out}/w4a8",
        overrides=["n_grid=2", "calibration_rows=16"],
        calibration_tokens=500,
        eval_tokens=300,
        needles=0,
        max_seq_length=128,
    )
    before, after = report["bytes"]
    print(f"weights: {before:,} bytes -> {after:,} bytes")
    print(f"report: {out}/w4a8/quantization.json")


if __name__ == "__main__":
    main(*sys.argv[1:])
