"""Train-inference log-probability difference over 50 updates and under several engine settings; and
how long a weight update pauses the engine.

    python -m benchmarks.rl_logprobs            # nano, float32, on the default device

Prompts share a prefix, so that the prefix cache is used; each rollout has two turns.
"""

import argparse
import copy
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from threading import Event, Thread
from typing import Any

import numpy as np

from benchmarks.table import Claim, print_claims
from paddock.checkpoint import save_pretrained
from paddock.engine import Engine, EngineSettings, EngineWeightUpdater, Request
from paddock.model import Transformer, preset
from paddock.records import SamplingParams, TrainSample
from paddock.rl.learner import Learner, open_learner
from paddock.rl.settings import RLSettings
from paddock.train.policy import PolicySample, compute_logprobs, pack_samples

UPDATES = 50
TOLERANCE = 1e-5  # float32 on a CPU
MAX_PAUSE_MS = 50.0
ENGINES: dict[str, dict[str, Any]] = {
    "64 running requests": {"max_running_requests": 64},
    "8 running requests": {"max_running_requests": 8},
    "1 running request, no prefix cache": {
        "max_running_requests": 1,
        "prefix_caching": False,
    },
    "chunked prefill of 16 tokens": {"max_prefill_tokens": 16},
    "3 MTP draft tokens": {"num_speculative_tokens": 3},
}


def make_learner(folder: Path, network: Transformer) -> Learner:
    save_pretrained(network, folder / "start")
    settings = RLSettings.model_validate(
        {
            "stage": "reasoning",
            "steps": UPDATES,
            "init": {"checkpoint": str(folder / "start")},
            "tasks": {"words": {"env": "none", "group_size": 2}},
            "optim": {"lr": 1e-3, "schedule": "constant", "warmup_ratio": 0.0},
        }
    )
    return open_learner(settings, folder / "not-finite.npz")


def sample(engine: Engine, rollouts: int, seed: int, vocab: int) -> list[PolicySample]:
    """Rollouts of two turns, all in one batch; even tokens have advantage 1, odd ones -1."""
    rng = Random(seed)
    shared = [rng.randrange(vocab) for _ in range(24)]
    context = [[*shared, *(rng.randrange(vocab) for _ in range(8))] for _ in range(rollouts)]
    logprobs: list[list[float]] = [[0.0] * len(c) for c in context]
    loss_mask: list[list[bool]] = [[False] * len(c) for c in context]
    for turn in range(2):
        requests = [
            Request(
                token_ids=tuple(c),
                sampling_params=SamplingParams(
                    max_new_tokens=24, ignore_eos=True, seed=seed * 999 + 2 * i + turn
                ),
            )
            for i, c in enumerate(context)
        ]
        for i, output in enumerate(engine.generate_outputs(requests)):
            reply = output.completion
            context[i] += [*reply.token_ids, 1, 2, 3]
            logprobs[i] += [*reply.logprobs, 0.0, 0.0, 0.0]
            loss_mask[i] += [True] * len(reply.token_ids) + [False] * 3
    return [
        PolicySample(
            sample=TrainSample(
                id=f"{seed}-{i}/0",
                token_ids=tuple(context[i]),
                logprobs=tuple(logprobs[i]),
                loss_mask=tuple(loss_mask[i]),
                advantages=tuple(1.0 if token % 2 == 0 else -1.0 for token in context[i]),
                oldest_version=0,
            ),
            weight=0.0,
        )
        for i in range(rollouts)
    ]


def max_logprob_diff(learner: Learner, samples: list[PolicySample]) -> float:
    batch = pack_samples(samples)
    found = compute_logprobs(learner.trainer.network, batch)
    return float(np.abs(found - batch.columns["rollout_logprobs"])[batch.loss_mask_T].max())


def logprob_claims(learner: Learner, network: Transformer) -> list[Claim]:
    """Train on samples of the first engine, then compare with every engine."""
    vocab = network.config.vocab
    common: dict[str, Any] = {"kv_cache_bytes": 1 << 26, "stop_token_ids": ()}
    engines = {
        name: Engine(copy.deepcopy(network), None, EngineSettings(**(common | settings)))
        for name, settings in ENGINES.items()
    }
    sampler = next(iter(engines.values()))
    updater, worst = EngineWeightUpdater(sampler), 0.0
    for update in range(UPDATES):
        samples = sample(sampler, 16, update, vocab)
        worst = max(worst, max_logprob_diff(learner, samples))
        learner.train([[replace(each, weight=1.0)] for each in samples])
        updater.weight_publisher()(learner.weights())
    found = [_claim(f"over {UPDATES} updates, worst token", worst)]
    for name, engine in engines.items():
        if engine is not sampler:
            EngineWeightUpdater(engine).weight_publisher()(learner.weights())
        samples = sample(engine, 32, 777, vocab)
        found.append(_claim(f"after them, {name}", max_logprob_diff(learner, samples)))
        engine.close()
    return found


def _claim(name: str, worst: float) -> Claim:
    return Claim(
        name=f"logprob diff {name}",
        target=f"< {TOLERANCE:g}",
        measured=f"{worst:.1e}",
        holds=worst < TOLERANCE,
    )


def pause_claims(learner: Learner, network: Transformer, num_updates: int = 20) -> list[Claim]:
    """Weight updates of a busy engine: how long it pauses, and how long an update takes."""
    settings = EngineSettings(kv_cache_bytes=1 << 26, stop_token_ids=(), max_running_requests=32)
    with Engine(copy.deepcopy(network), None, settings) as engine:
        updater, done = EngineWeightUpdater(engine), Event()

        def generate() -> None:
            seed = 0
            while not done.is_set():
                sample(engine, 32, seed, network.config.vocab)
                seed += 1

        load = Thread(target=generate)
        load.start()
        paused_ms, total_ms = [], []
        for version in range(num_updates):
            learner.updates = version
            start = time.perf_counter()
            updater.weight_publisher()(learner.weights())
            total_ms.append(1e3 * (time.perf_counter() - start))
            assert updater.last_update is not None
            paused_ms.append(1e3 * updater.last_update.paused_s)
        done.set()
        load.join()
    p95 = statistics.quantiles(paused_ms, n=20)[-1]
    size = sum(p.numel() for p in network.parameters()) / 1e6
    return [
        Claim(
            name=f"weight update, {size:.1f} M parameters, engine busy: pause, p95",
            target=f"< {MAX_PAUSE_MS:g} ms",
            measured=f"{p95:.2f} ms (whole update, median {statistics.median(total_ms):.0f} ms)",
            holds=p95 < MAX_PAUSE_MS,
        )
    ]


def claims(name: str = "nano") -> list[Claim]:
    network = Transformer.from_config(preset(name), seed=0)
    with tempfile.TemporaryDirectory() as scratch:
        learner = make_learner(Path(scratch), network)
        return [*logprob_claims(learner, network), *pause_claims(learner, network)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="nano")
    print_claims(claims(parser.parse_args().preset))


if __name__ == "__main__":
    main()
