"""Asynchronous scheduling over a device that takes a given time for a step, and on a GPU.

    python -m benchmarks.async_scheduling

On a GPU `small` (bfloat16, random weights) decodes 256 tokens of each sequence with CUDA graphs, in
turns with and without asynchronous scheduling; host time included, medians of five. Without a GPU
nano decodes 16 sequences. The network's work on this CPU stands for the host's work of a launch; a
step's tokens can be read only when a pretended device, which runs steps in the order of their
launches and takes D ms for each, has finished it. Waiting happens outside the interpreter lock.
While the host's work is below D, wall time should be that of the device alone: steps x D. Without
asynchronous scheduling it is steps x (D + host work).
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from operator import eq
from statistics import median
from typing import Any

import torch

from benchmarks.table import Claim, print_claims, speedup
from paddock.engine import Engine, EngineSettings, Request
from paddock.model import Transformer, preset
from paddock.records import SamplingParams

SEQUENCES, TOKENS = 16, 200
MAX_OVERHEAD = 1.05
HOST_SHARES = (0.4, 0.8)  # of D that the host works
REPEATS = 3
GPU_SEQUENCES, GPU_PROMPT, GPU_TOKENS, GPU_REPEATS = (1, 64, 256), 128, 256, 5


class PretendedDevice:
    """Finishes steps in order, each `seconds` after the one before or after its launch."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.steps, self.free_at = seconds, 0, 0.0
        self._ready: dict[int, float] = {}

    def attach(self, runner: Any) -> None:
        launch, read = runner.launch_step, runner.read_step

        def launch_step(*args: Any) -> Any:
            launched = launch(*args)
            self.free_at = max(self.free_at, time.perf_counter()) + self.seconds
            self._ready[id(launched)] = self.free_at
            self.steps += 1
            return launched

        def read_step(launched: Any, version: int) -> Any:
            time.sleep(max(0.0, self._ready.pop(id(launched)) - time.perf_counter()))
            return read(launched, version)

        runner.launch_step, runner.read_step = launch_step, read_step


def decode(network: Transformer, device_s: float, *, overlap: bool) -> tuple[float, int]:
    """Wall seconds and steps."""
    settings = EngineSettings(
        stop_token_ids=(), async_scheduling=overlap, max_running_requests=SEQUENCES
    )
    device = PretendedDevice(device_s)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=TOKENS, ignore_eos=True)
    requests = [
        Request(token_ids=tuple(range(i, i + 32)), sampling_params=sampling)
        for i in range(SEQUENCES)
    ]
    with Engine(network, None, settings) as engine:
        device.attach(engine._loop.runner)
        started = time.perf_counter()
        engine.generate_outputs(requests)
        return time.perf_counter() - started, device.steps


def middle(measure: Callable[[], tuple[float, int]]) -> tuple[float, int]:
    return sorted(measure() for _ in range(REPEATS))[REPEATS // 2]


def step_ms(engine: Engine, sequences: int) -> tuple[float, list[tuple[int, ...]]]:
    """Wall time of a decode step, prefill taken off, and the replies."""

    def generate(tokens: int) -> tuple[float, list[tuple[int, ...]]]:
        requests = [
            Request(
                token_ids=tuple(range(i, i + GPU_PROMPT)),
                sampling_params=SamplingParams(max_new_tokens=tokens, ignore_eos=True, seed=i),
            )
            for i in range(sequences)
        ]
        started = time.perf_counter()
        outputs = engine.generate_outputs(requests)
        return time.perf_counter() - started, [each.completion.token_ids for each in outputs]

    prefill_s, _ = generate(1)
    whole_s, replies = generate(GPU_TOKENS + 1)
    return 1e3 * (whole_s - prefill_s) / GPU_TOKENS, replies


def claims_on_gpu() -> list[Claim]:
    if not torch.cuda.is_available():
        return [Claim(name="asynchronous scheduling on a GPU", measured="not run: no GPU")]
    config = preset("small").model_copy(update={"mtp": None})
    network = Transformer.from_config(config, seed=0).to("cuda", torch.bfloat16).eval()
    found = []
    with ExitStack() as stack:
        engines = {
            overlap: stack.enter_context(
                Engine(
                    network,
                    None,
                    EngineSettings(
                        stop_token_ids=(),
                        async_scheduling=overlap,
                        max_running_requests=max(GPU_SEQUENCES),
                        kv_cache_bytes=8 << 30,
                    ),
                )
            )
            for overlap in (False, True)
        }
        for sequences in GPU_SEQUENCES:
            times: dict[bool, list[float]] = {False: [], True: []}
            for repeat in range(GPU_REPEATS + 1):
                replies = []
                for overlap, engine in engines.items():
                    ms, tokens = step_ms(engine, sequences)
                    replies.append(tokens)
                    if repeat:  # the first one captures graphs
                        times[overlap].append(ms)
                equal = sum(map(eq, *replies))
            off, on = (median(times[overlap]) for overlap in (False, True))
            found += [
                speedup(f"{sequences} sequences, a step", on, off, min_ratio=None, unit="ms"),
                Claim(name="equal replies", measured=f"{equal} of {sequences}"),
            ]
    return found


def claims() -> list[Claim]:
    torch.set_num_threads(1)
    network = Transformer.from_config(preset("nano"), 0).eval()
    wall, steps = middle(lambda: decode(network, 0.0, overlap=False))
    host = wall / steps
    found = []
    for share in HOST_SHARES:
        device_s = host / share
        sync, steps = middle(lambda d=device_s: decode(network, d, overlap=False))
        overlapped, steps = middle(lambda d=device_s: decode(network, d, overlap=True))
        ratio = overlapped / (steps * device_s)
        found.append(
            Claim(
                name=f"wall / (steps x D), D {1e3 * device_s:.2f} ms, host {1e3 * host:.2f} ms",
                target=f"<= {MAX_OVERHEAD}",
                measured=f"{ratio:.3f} (synchronous {sync / (steps * device_s):.3f})",
                holds=ratio <= MAX_OVERHEAD,
            )
        )
    return found


if __name__ == "__main__":
    print_claims(claims_on_gpu() if torch.cuda.is_available() else claims())
