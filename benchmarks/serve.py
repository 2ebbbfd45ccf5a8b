"""Serving against transformers, same weights, same machine, one run.

    python -m benchmarks.serve [--requests 1,8,32] [--repeats 5] [--new 64] [--threads N]

Each repetition sends all requests at once: a shared prefix of 512 new tokens, 8 tokens per request,
64 output tokens, greedy. Arms alternate; medians. Then the gain of MTP speculative decoding, on a
model trained to count, because the drafts of random weights are never accepted. All on the CPU;
`benchmarks.serve_gpu` serves layers of GLM-5's width on a GPU.
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
TARGETS = {1: 1.0, 32: 5.0}  # requests -> min ratio transformers / paddock


def prompts(count: int, seed: int) -> Prompts:
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randint(0, VOCAB, (PREFIX,), generator=generator).tolist()
    own = torch.randint(0, VOCAB, (count, OWN), generator=generator).tolist()
    return [shared + tail for tail in own]


def paddock_arm(engine: Engine) -> Arm:
    def reply(inputs: Prompts, new: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0.0, max_new_tokens=new, ignore_eos=True)
        requests = [Request(token_ids=tuple(ids), sampling_params=sampling) for ids in inputs]
        return [list(output.completion.token_ids) for output in engine.generate_outputs(requests)]

    return reply


def generate_arm(folder: Path) -> Arm:
    from transformers import GlmMoeDsaForCausalLM

    model = GlmMoeDsaForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()

    @torch.inference_mode()
    def reply(inputs: Prompts, new: int) -> list[list[int]]:
        token_BT = torch.tensor(inputs)
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
    def reply(inputs: Prompts, new: int) -> list[list[int]]:
        settings = GenerationConfig(
            max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=-1
        )
        found = model.generate_batch(inputs=inputs, generation_config=settings, progress_bar=False)
        return [list(output.generated_tokens) for output in found.values()]

    return reply


def seconds(arms: dict[str, Arm], count: int, new: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each repetition by arm; the arms alternate on the same prompts."""
    spent: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats + 1):
        inputs = prompts(count, seed=1000 * count + repeat)
        for name, reply in arms.items():
            start = time.perf_counter()
            replies = reply(inputs, new)
            if repeat:  # the first is a warm-up
                spent[name].append(time.perf_counter() - start)
            assert all(len(ids) == new for ids in replies), f"{name} generated too few tokens"
    return spent


def agreement(arms: dict[str, Arm], count: int, new: int) -> float:
    """Share of replies with identical tokens in two arms. Not all: index scores have exact ties,
    whose order transformers does not define, and random weights give many near-ties."""
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
            continuous, reason = try_arm(lambda: continuous_arm(folder), new)
            if continuous is None:
                rows.append(Claim(name="transformers' continuous batching", measured=reason))
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
    """An arm that may not support this model or machine; None and the reason if it fails."""
    try:
        arm = make()
        replies = arm(prompts(2, seed=1), new)
        if [len(ids) for ids in replies] != [new, new]:
            return None, f"generated {[len(ids) for ids in replies]} tokens instead of {new} each"
    except Exception as error:
        return None, f"does not run: {type(error).__name__}: {str(error)[:60]}"
    return arm, ""


# --- speculative decoding -------------------------------------------------------------------------


def counting_model(steps: int) -> Transformer:
    """Nano trained, with its MTP layer, to count by ones, twos or threes."""
    torch.manual_seed(0)
    network = Transformer.from_config(preset("nano"), seed=0)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    B, T = 8, 96
    for _ in range(steps):
        start, stride = torch.randint(0, VOCAB, (B, 1)), torch.randint(1, 4, (B, 1))
        token_BT = (start + stride * torch.arange(T)) % VOCAB
        metadata = AttentionMetadata.packed([T] * B)
        hidden_TD = network(token_BT.flatten(), metadata).hidden_TD
        depths = network.mtp_forward(
            hidden_TD, token_BT.flatten(), network.make_context(metadata), 3
        )
        loss = torch.zeros(())
        for depth, state_TD in enumerate((hidden_TD, *(state for state, _ in depths)), start=1):
            logits = network.head(state_TD).view(B, T, -1)[:, :-depth]
            loss = loss + F.cross_entropy(logits.flatten(0, 1), token_BT[:, depth:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network.eval()


def drafts(folder: Path | None, repeats: int, new: int = 64) -> list[Claim]:
    """Acceptance length and speed-up of 1, 3 and 5 draft tokens, at 1 and 8 requests."""
    network = counting_model(200) if folder is None else load_pretrained(folder)
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
                ratio = statistics.median(spent["0"]) / statistics.median(spent[str(k)])
                rows.append(
                    Claim(
                        name=f"{count} requests, {k} draft tokens: acceptance length, speed-up",
                        measured=f"{stats.accept_length:.2f}, {ratio:.2f}x",
                    )
                )
    return rows


def counting_arm(engine: Engine) -> Arm:
    """Replaces each prompt by counting from its last token, which the model can continue."""
    reply = paddock_arm(engine)

    def count_on(inputs: Prompts, new: int) -> list[list[int]]:
        sequences = [[(ids[-1] + i) % VOCAB for i in range(64)] for ids in inputs]
        return reply(sequences, new)

    return count_on


def claims() -> list[Claim]:
    return against_transformers((1, 8, 32), new=64, repeats=5) + drafts(None, repeats=5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", default="1,8,32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--drafts", type=Path, help="a trained checkpoint with an MTP layer")
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
