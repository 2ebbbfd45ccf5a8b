"""What the engine says of its tokens and what the trainer says of them, after 50 updates, however
they were sampled; and how long an engine stands still for new weights.

    python -m benchmarks.rl_logprobs            # nano, float32, on this machine's own device

The prompts share beginnings, so that the prefix cache is used; each attempt has two turns.
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
PAUSE_MS = 50.0
WAYS = {
    "64 at once": {"max_running": 64},
    "8 at once": {"max_running": 8},
    "one by one, no prefix cache": {"max_running": 1, "prefix_cache": False},
    "prompts in chunks of 16": {"step_tokens": 16},
    "3 drafts ahead": {"mtp_steps": 3},
}


def learner_in(folder: Path, network: Transformer) -> Learner:
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


def sampled(engine: Engine, attempts: int, seed: int, vocab: int) -> list[PolicySample]:
    """Attempts of two turns, all at once; an even token is worth a little, an odd one costs it."""
    chance = Random(seed)
    shared = [chance.randrange(vocab) for _ in range(24)]
    context = [[*shared, *(chance.randrange(vocab) for _ in range(8))] for _ in range(attempts)]
    said: list[list[float]] = [[0.0] * len(c) for c in context]
    own: list[list[bool]] = [[False] * len(c) for c in context]
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
        for i, answer in enumerate(engine.generate_outputs(requests)):
            reply = answer.completion
            context[i] += [*reply.token_ids, 1, 2, 3]
            said[i] += [*reply.logprobs, 0.0, 0.0, 0.0]
            own[i] += [True] * len(reply.token_ids) + [False] * 3
    return [
        PolicySample(
            sample=TrainSample(
                id=f"{seed}-{i}/0",
                token_ids=tuple(context[i]),
                logprobs=tuple(said[i]),
                loss_mask=tuple(own[i]),
                advantages=tuple(1.0 if token % 2 == 0 else -1.0 for token in context[i]),
                oldest_version=0,
            ),
            weight=0.0,
        )
        for i in range(attempts)
    ]


def gap(learner: Learner, lessons: list[PolicySample]) -> float:
    batch = pack_samples(lessons)
    found = compute_logprobs(learner.trainer.network, batch)
    return float(np.abs(found - batch.columns["rollout"])[batch.loss_mask_T].max())


def gaps(learner: Learner, network: Transformer) -> list[Claim]:
    """Trains on what the first engine samples, then asks every way of sampling."""
    vocab, common = network.config.vocab, {"cache_bytes": 1 << 26, "stop_ids": ()}
    engines = {
        name: Engine(copy.deepcopy(network), None, EngineSettings(**(common | way)))
        for name, way in WAYS.items()
    }
    trained = next(iter(engines.values()))
    reload, worst = EngineWeightUpdater(trained), 0.0
    for update in range(UPDATES):
        lessons = sampled(trained, 16, update, vocab)
        worst = max(worst, gap(learner, lessons))
        learner.train([[replace(lesson, weight=1.0)] for lesson in lessons])
        reload.weight_publisher()(learner.weights())
    found = [_claim(f"over {UPDATES} updates, worst token", worst)]
    for name, engine in engines.items():
        if engine is not trained:
            EngineWeightUpdater(engine).weight_publisher()(learner.weights())
        found.append(_claim(f"after them, {name}", gap(learner, sampled(engine, 32, 777, vocab))))
        engine.close()
    return found


def _claim(name: str, worst: float) -> Claim:
    return Claim(
        name=f"log-prob gap {name}",
        target=f"< {TOLERANCE:g}",
        measured=f"{worst:.1e}",
        holds=worst < TOLERANCE,
    )


def pauses(learner: Learner, network: Transformer, pushes: int = 20) -> list[Claim]:
    """New weights while requests run: how long no step could be taken, and how long it took."""
    sizes = EngineSettings(kv_cache_bytes=1 << 26, stop_token_ids=(), max_running_requests=32)
    with Engine(copy.deepcopy(network), None, sizes) as engine:
        reload, over = EngineWeightUpdater(engine), Event()

        def busy() -> None:
            seed = 0
            while not over.is_set():
                sampled(engine, 32, seed, network.config.vocab)
                seed += 1

        load = Thread(target=busy)
        load.start()
        stood, took = [], []
        for version in range(pushes):
            learner.updates = version
            began = time.perf_counter()
            reload.weight_publisher()(learner.weights())
            took.append(1e3 * (time.perf_counter() - began))
            assert reload.last_update is not None
            stood.append(1e3 * reload.last_update.paused_s)
        over.set()
        load.join()
    p95 = statistics.quantiles(stood, n=20)[-1]
    size = sum(p.numel() for p in network.parameters()) / 1e6
    return [
        Claim(
            name=f"weight push, {size:.1f} M parameters, engine busy: pause, 95th percentile",
            target=f"< {PAUSE_MS:g} ms",
            measured=f"{p95:.2f} ms (whole push, median {statistics.median(took):.0f} ms)",
            holds=p95 < PAUSE_MS,
        )
    ]


def claims(name: str = "nano") -> list[Claim]:
    network = Transformer.from_config(preset(name), seed=0)
    with tempfile.TemporaryDirectory() as scratch:
        learner = learner_in(Path(scratch), network)
        return [*gaps(learner, network), *pauses(learner, network)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="nano")
    print_claims(claims(parser.parse_args().preset))


if __name__ == "__main__":
    main()
