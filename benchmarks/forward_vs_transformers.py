"""One forward pass against transformers' GlmMoeDsaForCausalLM (sdpa), same weights, CPU.

    python -m benchmarks.forward_vs_transformers [--lengths 512,2048,8192] [--repeats 5]

Time: both networks in one process, arms alternating, medians. Memory: each arm in its own process,
the peak above what it held after loading the weights.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.table import Claim, print_claims, speedup
from paddock.checkpoint import load_pretrained, save_pretrained
from paddock.model import Transformer, preset

Forward = Callable[[torch.Tensor], torch.Tensor]
ARMS = ("paddock", "transformers")
# (length, quantity) -> min ratio transformers / paddock
TARGETS = {(512, "time"): 1.0, (8192, "time"): 3.0, (8192, "memory"): 3.0}


def arm(name: str, folder: Path) -> Forward:
    if name == "paddock":
        return load_pretrained(folder).logits
    from transformers import GlmMoeDsaForCausalLM

    model = GlmMoeDsaForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    return lambda token_T: model(token_T.unsqueeze(0), use_cache=False).logits[0]


def save_model(folder: Path) -> None:
    """A nano network with its indexer, and a context longer than the inputs."""
    config = preset("nano").model_copy(update={"mtp": None, "context": 65_536})
    save_pretrained(Transformer.from_config(config, seed=0), folder)


def tokens(length: int) -> torch.Tensor:
    return torch.randint(0, 960, (length,), generator=torch.Generator().manual_seed(length))


@torch.inference_mode()
def times(folder: Path, length: int, repeats: int) -> dict[str, float]:
    """Median seconds of each arm; the arms alternate."""
    forwards = {name: arm(name, folder) for name in ARMS}
    token_T = tokens(length)
    outputs = {name: forward(token_T) for name, forward in forwards.items()}  # warm-up
    error = (outputs["paddock"] - outputs["transformers"]).norm() / outputs["transformers"].norm()
    # Four index heads leave exact ties, whose order transformers does not define: a few tokens
    # may attend to other keys. A larger error would make the comparison meaningless.
    assert float(error) < 0.05, f"the arms disagree: relative error {float(error):.3g}"
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    for _ in range(repeats):
        for name, forward in forwards.items():
            start = time.perf_counter()
            forward(token_T)
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


@torch.inference_mode()
def peak_bytes(name: str, folder: Path, length: int) -> int:
    """Growth of this process's peak memory by one forward pass."""
    forward = arm(name, folder)
    forward(tokens(16))
    gc.collect()
    # Resets the peak; ru_maxrss cannot be reset and starts with the parent's.
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_rss()
    forward(tokens(length))
    return peak_rss() - before


def peak_rss() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def peak_in_subprocess(name: str, folder: Path, length: int) -> int:
    command = [sys.executable, "-m", "benchmarks.forward_vs_transformers", "--peak-of", name]
    command += ["--folder", str(folder), "--lengths", str(length)]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(json.loads(found.stdout.splitlines()[-1]))


def claims(lengths: Sequence[int] = (512, 2048, 8192), repeats: int = 5) -> list[Claim]:
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "nano"
        save_model(folder)
        for length in lengths:
            seconds = times(folder, length, max(repeats, 16_384 // length))
            peaks = {name: peak_in_subprocess(name, folder, length) for name in ARMS}
            for quantity, values, scale, unit in (
                ("time", seconds, 1e3, "ms"),
                ("memory", peaks, 2**-20, "MiB"),
            ):
                rows.append(
                    speedup(
                        f"forward, {length} tokens, {quantity} against transformers sdpa",
                        values["paddock"] * scale,
                        values["transformers"] * scale,
                        min_ratio=TARGETS.get((length, quantity)),
                        unit=unit,
                    )
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="512,2048,8192")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peak-of", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    if options.peak_of:
        print(peak_bytes(options.peak_of, options.folder, lengths[0]))
    else:
        print_claims(claims(lengths, options.repeats))


if __name__ == "__main__":
    main()
