"""Training a dense model on a CPU against a plain transformers loop: same rows, one run.

    python -m benchmarks.cpu_training MODEL [--dtypes float32,bfloat16] [--shape 8x512] [--steps 3]
        [--arms paddock,transformers,transformers_fused]

MODEL is a checkpoint folder such as SmolLM2-135M's. Every arm runs in a process of its own, starts
from the same weights and takes the same steps of AdamW, clipping included; `transformers_fused` is
the loop with torch's fused AdamW. transformers trains in bfloat16 under torch.autocast. Arms take
turns after one step of warm-up; medians. Losses are printed side by side, with the largest
difference from transformers'. The target is against the faster of the transformers loops.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.table import Claim, print_claims

TARGET = 1.1
LR = 1e-4


class Arm:
    """A training loop in a process of its own."""

    def __init__(self, name: str, model: str, dtype: str) -> None:
        self.name = name
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.rss_mb = 0.0
        command = [sys.executable, "-m", "benchmarks.cpu_training_peer", name, model, dtype]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        if self._line() != "ready":
            raise SystemExit(f"{name} did not start: run {' '.join(command[1:])}")

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def step(self, rows: list[list[int]]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"rows": rows, "lr": LR}) + "\n")
        self._process.stdin.flush()
        found = json.loads(self._line())
        self.seconds.append(found["seconds"])
        self.losses.append(found["loss"])
        self.rss_mb = found["rss_mb"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def rows_of(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    """Rows in which every token stands twice in a row: there is something to learn."""
    rng = random.Random(seed)
    return [
        [token for _ in range(length // 2) for token in [rng.randrange(100, vocab)] * 2]
        for _ in range(count)
    ]


def measure(model: str, dtype: str, shape: tuple[int, int], steps: int, names: list[str]) -> None:
    vocab = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    arms = [Arm(name, model, dtype) for name in names]
    for number in range(steps + 1):
        rows = rows_of(*shape, vocab, seed=number)
        for i in range(len(arms)):
            arms[(i + number) % len(arms)].step(rows)
    for arm in arms:
        arm.close()
    print_claims(claims(arms, dtype, shape))


def claims(arms: list[Arm], dtype: str, shape: tuple[int, int]) -> list[Claim]:
    tokens = shape[0] * shape[1]
    speed = {arm.name: tokens / statistics.median(arm.seconds[1:]) for arm in arms}
    title = f"{dtype} {shape[0]} x {shape[1]}"
    rows = [
        Claim(
            name=f"{title}: {arm.name}",
            measured=f"{speed[arm.name]:.1f} tokens/s, peak RSS {arm.rss_mb / 1024:.2f} GiB, "
            f"losses {' '.join(f'{loss:.4f}' for loss in arm.losses)}",
        )
        for arm in arms
    ]
    ours = next((arm for arm in arms if arm.name == "paddock"), None)
    peers = [arm for arm in arms if arm is not ours]
    if ours is None or not peers:
        return rows
    best = max(peers, key=lambda arm: speed[arm.name])
    ratio = speed["paddock"] / speed[best.name]
    memory = ours.rss_mb / best.rss_mb
    apart = max(abs(a - b) for a, b in zip(ours.losses, best.losses, strict=True))
    return [
        *rows,
        Claim(
            name=f"{title}: tokens/s against {best.name}",
            target=f">= {TARGET:g}x",
            measured=f"{ratio:.2f}x",
            holds=ratio >= TARGET,
        ),
        Claim(
            name=f"{title}: peak RSS against {best.name}",
            target="<= 1x",
            measured=f"{memory:.2f}x",
            holds=memory <= 1,
        ),
        Claim(name=f"{title}: largest difference of a loss", measured=f"{apart:.1e}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--shape", default="8x512")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--arms", default="paddock,transformers,transformers_fused")
    chosen = parser.parse_args()
    count, length = map(int, chosen.shape.split("x"))
    for dtype in chosen.dtypes.split(","):
        measure(chosen.model, dtype, (count, length), chosen.steps, chosen.arms.split(","))


if __name__ == "__main__":
    main()
