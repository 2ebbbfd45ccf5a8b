"""Serving against transformers, same weights, same machine, one run.

    python -m benchmarks.serve [--requests 1,8,32] [--repeats 5] [--new 64] [--threads N]

Each repetition asks all requests at once: a prefix of 512 tokens that they share and that nobody
has seen before, 8 tokens of their own, 64 new tokens, greedy. Arms take turns; medians. Then what
drafts gain, on a network that was taught to count, because a fresh one drafts nothing that is kept.
All of it on the CPU; `benchmarks.serve_gpu` serves layers of GLM-5's width on a GPU.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.nn import functional as F

from benchmarks.table import Claim, print_claims, speedup
from paddock.checkpoint import load_pretrained, save_pretrained
from paddock.engine import Engine, EngineSettings, Request
from paddock.model import AttentionMetadata, Transformer, preset
from paddock.records import SamplingParams

Prompts = list[list[int]]
Arm = Callable[[Prompts, int], list[list[int]]]  # prompts, new tokens -> replies
PREFIX, OWN, VOCAB = 512, 8, 960
TARGETS = {1: 1.0, 32: 5.0}  # requests -> the least ratio transformers / paddock that we claim


def prompts(count: int, seed: int) -> Prompts:
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randint(0, VOCAB, (PREFIX,), generator=generator).tolist()
    own = torch.randint(0, VOCAB, (count, OWN), generator=generator).tolist()
    return [shared + tail for tail in own]


def paddock_arm(engine: Engine) -> Arm:
    def reply(asked: Prompts, new: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0.0, max_new_tokens=new, ignore_eos=True)
        requests = [Request(token_ids=tuple(ids), sampling_params=sampling) for ids in asked]
        return [list(answer.completion.token_ids) for answer in engine.generate_outputs(requests)]

    return reply


def generate_arm(folder: Path) -> Arm:
    from transformers import GlmMoeDsaForCausalLM

    model = GlmMoeDsaForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()

    @torch.inference_mode()
    def reply(asked: Prompts, new: int) -> list[list[int]]:
        token_BT = torch.tensor(asked)
        out = model.generate(
            token_BT,
            attention_mask=torch.ones_like(token_BT),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        return [row[token_BT.shape[1] :] for row in out.tolist()]

    return reply


def continuous_arm(folder: Path) -> Arm:
    """transformers' own continuous batching, with its paged cache."""
    from transformers import GenerationConfig, GlmMoeDsaForCausalLM

    model = GlmMoeDsaForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()

    @torch.inference_mode()
    def reply(asked: Prompts, new: int) -> list[list[int]]:
        settings = GenerationConfig(
            max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=-1
        )
        found = model.generate_batch(inputs=asked, generation_config=settings, progress_bar=False)
        return [list(output.generated_tokens) for output in found.values()]

    return reply


def seconds(arms: dict[str, Arm], count: int, new: int, repeats: int) -> dict[str, list[float]]:
    """Of each arm, how long each repetition took; the arms answer the same prompts in turn."""
    spent: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats + 1):
        asked = prompts(count, seed=1000 * count + repeat)
        for name, reply in arms.items():
            start = time.perf_counter()
            replies = reply(asked, new)
            if repeat:  # the first is a warm-up
                spent[name].append(time.perf_counter() - start)
            assert all(len(ids) == new for ids in replies), f"{name} wrote too little"
    return spent


def agreement(arms: dict[str, Arm], count: int, new: int) -> float:
    """The share of replies that two arms give token for token. Not all: the indexer's scores have
    exact ties whose order transformers does not define, and fresh weights are full of near ones."""
    ours, theirs = (reply(prompts(count, seed=9), new) for reply in list(arms.values())[:2])
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / count


def against_transformers(counts: Sequence[int], new: int, repeats: int) -> list[Claim]:
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "nano"
        config = preset("nano").model_copy(update={"mtp": None})
        save_pretrained(Transformer.from_config(config, seed=0), folder)
        with Engine(
            load_pretrained(folder), None, EngineSettings(kv_cache_bytes=1 << 28)
        ) as engine:
            arms = {"paddock": paddock_arm(engine), "generate": generate_arm(folder)}
            same = agreement(arms, 8, new)
            rows.append(Claim(name="replies equal to transformers', of 8", measured=f"{same:.0%}"))
            continuous, why = try_arm(lambda: continuous_arm(folder), new)
            if continuous is None:
                rows.append(Claim(name="transformers' continuous batching", measured=why))
            else:
                arms["continuous batching"] = continuous
            for count in counts:
                spent = seconds(arms, count, new, repeats)
                rows += compare(spent, count, new)
    return rows


def compare(spent: dict[str, list[float]], count: int, new: int) -> list[Claim]:
    middle = {name: statistics.median(values) * 1e3 for name, values in spent.items()}
    return [
        speedup(
            f"{count} requests, {PREFIX} + {OWN} tokens in, {new} out, against {name}",
            middle["paddock"],
            middle[name],
            min_ratio=TARGETS.get(count),
            unit="ms",
        )
        for name in middle
        if name != "paddock"
    ]


def try_arm(make: Callable[[], Arm], new: int) -> tuple[Arm | None, str]:
    """An arm that may not run on this model or machine, and why not."""
    try:
        arm = make()
        replies = arm(prompts(2, seed=1), new)
        if [len(ids) for ids in replies] != [new, new]:
            return None, f"wrote {[len(ids) for ids in replies]} tokens instead of {new} each"
    except Exception as error:
        return None, f"does not run: {type(error).__name__}: {str(error)[:60]}"
    return arm, ""


# --- drafts ---------------------------------------------------------------------------------------


def counting(steps: int) -> Transformer:
    """Nano, taught to go on counting by ones, twos or threes, its MTP layer with it."""
    torch.manual_seed(0)
    network = Transformer.from_config(preset("nano"), seed=0)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    B, T = 8, 96
    for _ in range(steps):
        start, stride = torch.randint(0, VOCAB, (B, 1)), torch.randint(1, 4, (B, 1))
        token_BT = (start + stride * torch.arange(T)) % VOCAB
        layout = AttentionMetadata.packed([T] * B)
        hidden_TD = network(token_BT.flatten(), layout).hidden_TD
        ahead = network.mtp_forward(hidden_TD, token_BT.flatten(), network.make_context(layout), 3)
        loss = torch.zeros(())
        for depth, state_TD in enumerate((hidden_TD, *(state for state, _ in ahead)), start=1):
            logits = network.head(state_TD).view(B, T, -1)[:, :-depth]
            loss = loss + F.cross_entropy(logits.flatten(0, 1), token_BT[:, depth:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network.eval()


def drafts(folder: Path | None, repeats: int, new: int = 64) -> list[Claim]:
    """Acceptance length and wall-clock gain of 1, 3 and 5 drafts, at 1 and 8 requests."""
    network = counting(200) if folder is None else load_pretrained(folder)
    rows = []
    for count in (1, 8):
        engines = {
            k: Engine(
                network, None, EngineSettings(kv_cache_bytes=1 << 27, num_speculative_tokens=k)
            )
            for k in (0, 1, 3, 5)
        }
        arms = {str(k): counting_arm(engine) for k, engine in engines.items()}
        spent = seconds(arms, count, new, repeats)
        for k, engine in engines.items():
            stats = engine.stats()
            engine.close()
            if k:
                gain = statistics.median(spent["0"]) / statistics.median(spent[str(k)])
                rows.append(
                    Claim(
                        name=f"{count} requests, {k} drafts: acceptance length, gain",
                        measured=f"{stats.accept_length:.2f}, {gain:.2f}x",
                    )
                )
    return rows


def counting_arm(engine: Engine) -> Arm:
    """Counts from where each prompt's own tokens begin, so that the network knows what to say."""
    reply = paddock_arm(engine)

    def count_on(asked: Prompts, new: int) -> list[list[int]]:
        runs = [[(ids[-1] + i) % VOCAB for i in range(64)] for ids in asked]
        return reply(runs, new)

    return count_on


def claims() -> list[Claim]:
    return against_transformers((1, 8, 32), new=64, repeats=5) + drafts(None, repeats=5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", default="1,8,32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--drafts", type=Path, help="a trained checkpoint to draft with")
    parser.add_argument("--only", choices=["transformers", "drafts"])
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    counts = [int(count) for count in options.requests.split(",")]
    rows = []
    if options.only != "drafts":
        rows += against_transformers(counts, options.new, options.repeats)
    if options.only != "transformers":
        rows += drafts(options.drafts, options.repeats, options.new)
    print_claims(rows)


if __name__ == "__main__":
    main()
