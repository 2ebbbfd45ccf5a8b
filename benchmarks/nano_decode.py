"""Decoding nano on a CPU: tokens/s by number of sequences, also of another checkout.

    python -m benchmarks.nano_decode [--baseline FOLDER] [--requests 1,16,128] [--repeats 5]
        [--temperature 1.0] [--prompt 64] [--new 64]

Each arm is an engine in a process of its own, with the same random weights of the preset; FOLDER is
another checkout of this repository, 7a3193d or later. Arms take turns on the same prompts; medians.
A repetition generates one token for every prompt, which fills the prefix cache, then `--new` more:
what the second call takes beyond the first, again behind cached prompts, is decoding. Contexts
exceed nano's top-k of 64 keys, so that every layer scores and selects.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.table import Claim, print_claims, speedup
from paddock.checkpoint import save_pretrained
from paddock.model import Transformer, preset

Prompts = list[list[int]]
VOCAB = 960
PEER = Path(__file__).with_name("nano_decode_peer.py")
TARGETS = {1: None, 16: 2.0, 128: 2.5}  # requests -> min ratio to the baseline 7a3193d


class Arm:
    """An engine of one checkout in a process of its own."""

    def __init__(self, checkout: Path, model: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(PEER), str(model)],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("an arm ended; its message is above")
        return line

    def step_ms(self, prompts: Prompts, new: int, temperature: float) -> float:
        """Milliseconds of a decode step of all prompts."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([prompts, new, temperature]) + "\n")
        self._process.stdin.flush()
        return float(json.loads(self._line()))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def measure(arms: dict[str, Arm], count: int, options: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds of a decode step, by arm."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for repeat in range(options.repeats + 1):
        rng = random.Random(1000 * count + repeat)
        prompts = [[rng.randrange(VOCAB) for _ in range(options.prompt)] for _ in range(count)]
        for i in range(len(names)):
            name = names[(i + repeat) % len(names)]
            took = arms[name].step_ms(prompts, options.new, options.temperature)
            if repeat:  # the first warms up
                found[name].append(took)
    return {name: statistics.median(times) for name, times in found.items()}


def claims(options: argparse.Namespace) -> list[Claim]:
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        config = preset("nano").model_copy(update={"mtp": None})
        save_pretrained(Transformer.from_config(config, seed=0), scratch)
        arms = {"paddock": Arm(Path.cwd(), Path(scratch))}
        if options.baseline:
            arms["baseline"] = Arm(options.baseline.resolve(), Path(scratch))
        for count in (int(n) for n in options.requests.split(",")):
            ms = measure(arms, count, options)
            if options.baseline:
                target = TARGETS.get(count)
                name = f"{count} sequences, a step, against the baseline"
                rows.append(
                    speedup(name, ms["paddock"], ms["baseline"], min_ratio=target, unit="ms")
                )
            rows.append(
                Claim(
                    name=f"{count} sequences, tokens/s",
                    measured=" against ".join(f"{count / took * 1e3:,.0f}" for took in ms.values()),
                )
            )
        for arm in arms.values():
            arm.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--baseline", type=Path)
    parser.add_argument("--requests", default="1,16,128")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    print_claims(claims(parser.parse_args()))


if __name__ == "__main__":
    main()
