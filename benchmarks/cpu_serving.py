"""Serving on a CPU against transformers, vLLM-CPU and llama.cpp: same prompts, greedy, one run.

    python -m benchmarks.cpu_serving MODEL [--dtype float32] [--cases A,B,C,D,E,F] [--repeats 3]
        [--arms paddock,transformers] [--vllm PYTHON] [--llama LLAMA_SERVER --gguf FILE]

MODEL is a checkpoint folder such as SmolLM2-135M's; no tokenizer is needed. Every engine runs in a
process and environment of its own: vLLM in that of PYTHON, llama.cpp as LLAMA_SERVER with a GGUF of
the same weights and precision. Arms take turns; medians. All see the same token ids; where replies
differ, the shared prefix is reported: float32 replies of transformers and paddock must be equal.

    A  1 stream, 64 + 128 tokens            D  prefill, 4 x 1,024 + 1 tokens
    B  16 at once, 128 + 128                E  8 behind a shared prefix of 768, + 32
    C  64 at once, 128 + 64                 F  decode 1 stream behind 16,384 cached tokens, 32

For a network of `glm_moe_dsa`, which vLLM and llama.cpp do not run here, against transformers:

    G  1 stream, 64 + 64        H  16 at once, 128 + 64        I  4 long prompts, 1,536 + 32
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.table import Claim, print_claims

MAX_SLOT = 4096  # tokens of a request of llama.cpp, of 16 at once
PEER = Path(__file__).with_name("cpu_serving_peer.py")


@dataclass(frozen=True, slots=True)
class Case:
    requests: int
    prompt: int
    new: int
    shared: int = 0
    counts_prompt: bool = False  # throughput of prompt tokens, not of new ones
    cached: bool = False  # the prompts are sent once before the clock starts
    peer: str = "best"  # the arm to compare with
    target: float = 1.0


CASES = {
    "A": Case(1, 64, 128, peer="llama", target=0.8),
    "B": Case(16, 128, 128),
    "C": Case(64, 128, 64),
    "D": Case(4, 1024, 1, counts_prompt=True, peer="vllm"),
    "E": Case(8, 800, 32, shared=768, peer="vllm"),
    "F": Case(1, 16_384, 32, cached=True, peer="llama", target=0.8),
    "G": Case(1, 64, 64, peer="transformers", target=2.0),
    "H": Case(16, 128, 64, peer="transformers", target=2.0),
    "I": Case(4, 1536, 32, peer="transformers", target=2.0),
}


class Arm:
    """An engine in a process of its own."""

    def __init__(self, name: str, python: str, model: str, dtype: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [python, str(PEER), name, model, dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        if self._line() != "ready":
            raise SystemExit(f"{name} did not start: run {PEER.name} {name} {model} {dtype}")

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def run(self, prompts: list[list[int]], new: int) -> dict:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "new": new}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._line())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def prompts_of(case: Case, seed: int, vocab: int) -> list[list[int]]:
    """Random ids that no engine has seen before, so that only shared prefixes are cached."""
    rng = random.Random(seed)
    ids = lambda n: [rng.randrange(100, vocab) for _ in range(n)]  # noqa: E731
    shared = ids(case.shared)
    return [shared + ids(case.prompt - case.shared) for _ in range(case.requests)]


def measure(arms: list[Arm], name: str, case: Case, repeats: int, vocab: int) -> list[Claim]:
    seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    shared = {arm.name: [] for arm in arms}
    rss = {}
    for repeat in range(repeats):
        prompts = prompts_of(case, 1000 * ord(name) + repeat, vocab)
        replies = {}
        for i in range(len(arms)):
            arm = arms[(i + repeat) % len(arms)]
            if case.cached:
                arm.run(prompts, 1)
            found = arm.run(prompts, case.new)
            seconds[arm.name].append(found["seconds"])
            replies[arm.name], rss[arm.name] = found["tokens"], found["rss_mb"]
        for arm in arms:
            pairs = zip(replies["paddock"], replies[arm.name], strict=True)
            shared[arm.name] += [equal_prefix(one, other) for one, other in pairs]
    tokens = case.requests * (case.prompt if case.counts_prompt else case.new)
    speed = {arm: tokens / statistics.median(times) for arm, times in seconds.items()}
    peers = {arm: s for arm, s in speed.items() if arm != "paddock"}
    peer = case.peer if case.peer in peers else max(peers, key=lambda arm: peers[arm])
    ratio = speed["paddock"] / peers[peer]
    text = ", ".join(f"{arm} {s:.1f}" for arm, s in speed.items())
    rows = [
        Claim(
            name=f"{name}: tokens/s ({case.requests} x {case.prompt} + {case.new})",
            target=f">= {case.target:g} of {peer}",
            measured=f"{ratio:.2f} ({text})",
            holds=ratio >= case.target,
        )
    ]
    equal = {arm: f"{statistics.mean(n):.0%}" for arm, n in shared.items() if arm != "paddock"}
    rows.append(Claim(name=f"{name}: equal tokens of a reply", measured=str(equal)))
    rows.append(
        Claim(name=f"{name}: peak RSS, MB", measured=str({a: round(r) for a, r in rss.items()}))
    )
    return rows


def equal_prefix(one: list[int], other: list[int]) -> float:
    """
    >>> equal_prefix([1, 2, 3, 4], [1, 2, 5, 4])
    0.5
    """
    equal = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        equal += 1
    return equal / max(1, len(one))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--cases", default="A,B,C,D,E")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--arms", default="paddock,transformers", help="also: int8")
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--llama", metavar="LLAMA_SERVER")
    parser.add_argument("--gguf")
    chosen = parser.parse_args()
    vocab = json.loads((Path(chosen.model) / "config.json").read_text())["vocab_size"]
    longest = max(CASES[name].prompt + CASES[name].new for name in chosen.cases.split(","))
    arms = [Arm(a, sys.executable, chosen.model, chosen.dtype) for a in chosen.arms.split(",")]
    if chosen.vllm:
        arms.append(Arm("vllm", chosen.vllm, chosen.model, chosen.dtype))
    if chosen.llama:
        slots = 16 if longest <= MAX_SLOT else 1
        llama = f"{chosen.llama},{chosen.dtype},{slots}"
        arms.append(Arm("llama", sys.executable, chosen.gguf, llama))
    for arm in arms:
        arm.run(prompts_of(Case(2, 32, 4), 1, vocab), 4)  # warm up
    rows = []
    for name in chosen.cases.split(","):
        rows += measure(arms, name, CASES[name], chosen.repeats, vocab)
        print_claims(rows[-3:])
    print_claims(rows)
    for arm in arms:
        arm.close()


if __name__ == "__main__":
    main()
