"""One arm of `benchmarks.nano_decode`: an engine of the checkout in PYTHONPATH.

    PYTHON nano_decode_peer.py MODEL

Answers each line, [prompts, new tokens, temperature], with the milliseconds of a decode step. Knows
the names of 7a3193d and those of today.
"""

import json
import os
import sys
import time
from collections.abc import Callable

from paddock import engine, records
from paddock.checkpoint import load_pretrained

Prompts = list[list[int]]
Generate = Callable[[Prompts, int, float], None]  # prompts, new tokens, temperature
MAX_REQUESTS = 128


def timed(generate: Generate, prompts: Prompts, new: int, temperature: float) -> float:
    started = time.perf_counter()
    generate(prompts, new, temperature)
    return time.perf_counter() - started


def load_current(model: str) -> Generate:
    from paddock.launch.engines import pack_for_cpu

    network = load_pretrained(model, "float32", "cpu")
    pack_for_cpu(network, wait=True)
    serving = engine.Engine(network, None, engine.EngineSettings(max_running_requests=MAX_REQUESTS))

    def generate(prompts: Prompts, new: int, temperature: float) -> None:
        sampling = records.SamplingParams(
            max_new_tokens=new, temperature=temperature, ignore_eos=True
        )
        serving.generate_outputs(
            [engine.Request(token_ids=tuple(ids), sampling_params=sampling) for ids in prompts]
        )

    return generate


def load_7a3193d(model: str) -> Generate:

    network = load_pretrained(model, "float32", "cpu")
    serving = engine.Engine(network, None, engine.EngineSettings(max_running=MAX_REQUESTS))

    def generate(prompts: Prompts, new: int, temperature: float) -> None:
        sampling = records.Sampling(max_new_tokens=new, temperature=temperature, ignore_eos=True)
        serving.answers([engine.Request(token_ids=tuple(i), sampling=sampling) for i in prompts])

    return generate


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # only answers go to stdout
    load = load_current if hasattr(records, "SamplingParams") else load_7a3193d
    generate = load(sys.argv[1])
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        prompts, new, temperature = json.loads(line)
        generate(prompts, 1, temperature)  # fills the prefix cache
        one, all_of_them = (timed(generate, prompts, n, temperature) for n in (1, 1 + new))
        print((all_of_them - one) / new * 1e3, file=answers, flush=True)


if __name__ == "__main__":
    main()
