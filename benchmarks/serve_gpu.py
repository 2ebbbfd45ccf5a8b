"""Serving three layers of GLM-5's width on one GPU: one dense, two MoE, bfloat16.

    python -m benchmarks.serve_gpu [--experts 256] [--skip transformers]
    python -m benchmarks.serve_gpu --drafts FOLDER

Weights are random. Time to first token (TTFT) of an uncached prompt and time per output token
(TPOT) at batch 1 are the engine's, end to end. Both are compared, by the host's clock, with
transformers' forward pass with its own cache, where it fits. Steps of larger batches are timed on
the device alone, every sequence with its own pages, over a cache filled with noise, against the
same network without its indexer (dense absorbed attention to every key). The floor is reading the
active weights of a token once, at the rate of a device copy.

`--drafts` instead measures MTP speculative decoding of a trained model (`recipes/small`) on its
training tasks: the drafts of random weights are never accepted.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from benchmarks.kernels import copy_rate, medians
from benchmarks.table import Claim, print_claims, speedup
from paddock.checkpoint import load_pretrained
from paddock.engine import Engine, EngineSettings, Request, RequestOutput, resolve_kv_cache_config
from paddock.engine.cuda_graphs import CudaGraphRunner, UniformDecodeBatch
from paddock.engine.kv_cache import PagedKVCache
from paddock.engine.settings import cached_layers
from paddock.envs import make
from paddock.model import ModelConfig, Transformer, preset
from paddock.records import SamplingParams
from paddock.text import Tokenizer, get_renderer

LAYERS, PAGE, CHUNK = 3, 64, 8192
PROMPTS = (4096, 16_384, 65_536, 131_072)
STEPS = ((1, 4096), (1, 131_072), (8, 4096), (8, 32_768), (8, 131_072), (32, 4096), (32, 32_768))
TARGETS = {(8, 131_072): 2.0}
PEER_PROMPTS = (4096, 16_384, 65_536)
TTFT_MIN_RATIO = {65_536: 8.0}  # against transformers


def three_layers(experts: int) -> ModelConfig:
    full = preset("glm5")
    assert full.indexer is not None
    assert full.moe is not None
    return full.model_copy(
        update={
            "attention": full.attention[:LAYERS],
            "mlp": ("dense", "moe", "moe"),
            "indexer": full.indexer.model_copy(update={"layers": full.indexer.layers[:LAYERS]}),
            "moe": full.moe.model_copy(update={"experts": experts}),
            "mtp": None,
        }
    )


def random_network(config: ModelConfig) -> Transformer:
    """Random weights, initialised on the device: 20 billion of them do not fit in host memory."""
    with torch.device("meta"):
        network = Transformer(config).cast(torch.bfloat16)
    network = network.to_empty(device="cuda").eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(std=0.02)
        for buffer in network.buffers():
            buffer.zero_()
    return network


def floor_ms(network: Transformer, rate: float) -> float:
    """Reading the active weights of one token: everything but the experts it is not routed to."""
    moe = network.config.moe
    assert moe is not None
    read = 0.0
    for name, x in network.named_parameters():
        share = moe.active / moe.experts if ".experts." in name else name != "embed.weight"
        read += x.numel() * x.element_size() * share
    return read / rate * 1e3


@contextmanager
def without_indexer(network: Transformer) -> Iterator[None]:
    """The same layers with dense attention."""
    indexers = [layer.attention.indexer for layer in network.layers]
    for layer in network.layers:
        layer.attention.indexer = None
    yield
    for layer, indexer in zip(network.layers, indexers, strict=True):
        layer.attention.indexer = indexer


# --- the engine -----------------------------------------------------------------------------------


def engine_claims(
    network: Transformer, floor: float, ttft_ms: dict[int, float], tpot_ms: dict[int, float]
) -> Iterator[Claim]:
    """Measures TTFT and TPOT by prompt length, which are also stored in the dicts."""
    settings = EngineSettings(
        page_size=PAGE,
        max_prefill_tokens=CHUNK,
        kv_cache_bytes=8 << 30,
        stop_token_ids=(),
        max_running_requests=4,
    )
    rng = np.random.default_rng(0)
    with Engine(network, None, settings) as engine:

        def seconds(prompt: tuple[int, ...], new: int) -> float:
            sampling = SamplingParams(temperature=0.0, max_new_tokens=new)
            torch.cuda.synchronize()
            start = time.perf_counter()
            engine.generate_output(Request(token_ids=prompt, sampling_params=sampling))
            return time.perf_counter() - start

        for length in PROMPTS:
            prompts = [tuple(rng.integers(0, 150_000, length).tolist()) for _ in range(3)]
            first = [seconds(prompt, 1) for prompt in prompts]
            for new in (2, 66):
                seconds(prompts[0], new)  # caches the prompt and captures the CUDA graphs
            short = statistics.median(seconds(prompts[0], 2) for _ in range(3))
            long = statistics.median(seconds(prompts[0], 66) for _ in range(3))
            token = tpot_ms[length] = (long - short) / 64 * 1e3
            length_k = f"{length // 1024}K"
            ttft_ms[length] = statistics.median(first[1:]) * 1e3
            yield Claim(name=f"{length_k}: TTFT", measured=f"{ttft_ms[length]:.0f} ms")
            yield Claim(
                name=f"{length_k}, batch 1: TPOT within 2x of reading the weights",
                target=f"<= {2 * floor:.2f} ms" if length == PROMPTS[0] else "",
                measured=f"{token:.2f} ms ({floor / token:.0%} of {floor:.2f} ms)",
                holds=token <= 2 * floor if length == PROMPTS[0] else None,
            )


# --- steps ----------------------------------------------------------------------------------------


@torch.inference_mode()
def step_ms(network: Transformer, batch: int, length: int) -> float:
    """One decode step of a batch, every sequence `length` tokens long with its own pages."""
    config = network.config.model_copy(update={"context": length + PAGE})
    settings = EngineSettings(
        page_size=PAGE,
        num_pages=batch * (length // PAGE + 1),
        max_running_requests=batch,
        context_length=length + PAGE,
    )
    cache = PagedKVCache(
        config,
        cached_layers(settings, config),
        resolve_kv_cache_config(settings, config, 2),
        batch,
        like=network.embed.weight.detach(),
    )
    for stored in cache.storage.values():
        stored.normal_()
    pages = cache.capacity.pages_per_sequence
    order = np.random.default_rng(0).permutation(batch * pages).reshape(batch, pages)
    for slot in range(batch):
        cache.set_block_table(slot, order[slot].tolist())
    graphs = CudaGraphRunner(network, cache, settings)
    decode_batch = UniformDecodeBatch(np.arange(batch), np.full(batch, length - 1), 1)
    token_N = np.random.default_rng(1).integers(0, 150_000, batch)
    graphs.decode(decode_batch, token_N)
    (graph,) = [g for inputs in graphs._inputs.values() for g in inputs.captured.values()]
    (ms,) = medians([graph.replay], repeats=21)
    return ms


def step_claims(network: Transformer) -> Iterator[Claim]:
    for batch, length in STEPS:
        ours = step_ms(network, batch, length)
        torch.cuda.empty_cache()
        with without_indexer(network):
            dense = step_ms(network, batch, length)
        torch.cuda.empty_cache()
        yield Claim(
            name=f"decode step of {batch} x {length // 1024}K",
            measured=f"{ours:.2f} ms; dense {dense:.2f} ms: {dense / ours:.2f}x",
        )


# --- transformers ---------------------------------------------------------------------------------


@torch.inference_mode()
def transformers_ms(config: ModelConfig, length: int) -> tuple[float, float]:
    """Milliseconds to the first token (prompt in chunks of 2,048) and per token, batch 1."""
    from transformers import DynamicCache, GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    from paddock.checkpoint.config_json import config_to_json

    hf_config = GlmMoeDsaConfig(**config_to_json(config))
    hf_config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = GlmMoeDsaForCausalLM(hf_config).to(torch.bfloat16)
    model = model.to_empty(device="cuda").eval()
    for x in (*model.parameters(), *model.buffers()):
        x.fill_(1.0) if x.ndim == 1 else x.normal_(std=0.02)
    token_1T = torch.randint(0, 150_000, (1, length), device="cuda")

    def run() -> tuple[float, float]:
        cache = DynamicCache(config=hf_config)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for chunk in token_1T.split(2048, dim=1):
            model(chunk, past_key_values=cache, use_cache=True, logits_to_keep=1)
        torch.cuda.synchronize()
        middle = time.perf_counter()
        for _ in range(8):
            model(token_1T[:, :1], past_key_values=cache, use_cache=True, logits_to_keep=1)
        torch.cuda.synchronize()
        return (middle - start) * 1e3, (time.perf_counter() - middle) / 8 * 1e3

    run()
    return run()


def against_transformers(
    config: ModelConfig, ttft_ms: dict[int, float], tpot_ms: dict[int, float]
) -> Iterator[Claim]:
    """Both by the host's clock: ours through the engine, theirs without one, in their favour."""
    for length in PEER_PROMPTS:
        length_k = f"{length // 1024}K"
        try:
            first, token = transformers_ms(config, length)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error)[:60]}"
            yield Claim(name=f"transformers at {length_k}", measured=f"does not run: {reason}")
            continue
        finally:
            torch.cuda.empty_cache()
        name = f"{length_k}, batch 1: TPOT against transformers"
        yield speedup(name, tpot_ms[length], token, min_ratio=None, unit="ms")
        name, min_ratio = f"{length_k}: TTFT against transformers", TTFT_MIN_RATIO.get(length)
        yield speedup(name, ttft_ms[length], first, min_ratio=min_ratio, unit="ms")


# --- speculative decoding -------------------------------------------------------------------------


def drafts(folder: Path) -> Iterator[Claim]:
    """Acceptance length and TPOT speed-up of 1, 3 and 5 draft tokens, greedy, at 1 to 32 requests,
    with cached prompts and captured CUDA graphs."""
    network = load_pretrained(folder, "bfloat16", "cuda").eval()
    renderer = get_renderer(Tokenizer.load(folder))
    taskset = make("nano-chain")
    prompts = [
        renderer.render_prompt(taskset.task(i, "test").messages).token_ids for i in range(5 * 32)
    ]
    sampling = SamplingParams(temperature=0.0, max_new_tokens=128)
    for count in (1, 8, 32):
        tpot_s: dict[int, float] = {}
        for k in (0, 1, 3, 5):
            settings = EngineSettings(
                kv_cache_bytes=4 << 30,
                num_speculative_tokens=k,
                context_length=2048,
                stop_token_ids=renderer.stop_token_ids,
            )
            with Engine(network, None, settings) as engine:
                for _ in range(2):  # the first is a warm-up
                    found: list[float] = []
                    for turn in range(5):
                        part = prompts[turn * count : (turn + 1) * count]
                        requests = [
                            Request(token_ids=tuple(ids), sampling_params=sampling) for ids in part
                        ]
                        found += [_tpot_s(output) for output in engine.generate_outputs(requests)]
                tpot_s[k] = statistics.median(found)
                length = engine.stats().accept_length
            if k:
                yield Claim(
                    name=f"{count} requests, {k} draft tokens: acceptance length, speed-up",
                    measured=f"{length:.2f}, {tpot_s[0] / tpot_s[k]:.2f}x "
                    f"({1e3 * tpot_s[k]:.2f} against {1e3 * tpot_s[0]:.2f} ms/token)",
                )


def _tpot_s(output: RequestOutput) -> float:
    assert output.ttft_s is not None
    return (output.e2e_latency_s - output.ttft_s) / max(1, len(output.completion.token_ids) - 1)


def claims(experts: int = 256, *, skip: str = "") -> list[Claim]:
    if not torch.cuda.is_available():
        return [Claim(name="serving three layers of GLM-5's width", measured="needs a GPU")]
    config = three_layers(experts)
    ttft_ms: dict[int, float] = {}
    tpot_ms: dict[int, float] = {}
    rows: list[Claim] = []
    for row in _all_claims(config, ttft_ms, tpot_ms, skip):
        print(row.name, "|", row.target, "|", row.measured, "|", row.verdict, flush=True)
        rows.append(row)
    return rows


def _all_claims(
    config: ModelConfig, ttft_ms: dict[int, float], tpot_ms: dict[int, float], skip: str
) -> Iterator[Claim]:
    """Transformers last, after ours is freed: at 64K it needs the memory of both networks."""
    network = random_network(config)
    floor = floor_ms(network, copy_rate())
    yield from engine_claims(network, floor, ttft_ms, tpot_ms)
    yield from step_claims(network)
    del network
    torch.cuda.empty_cache()
    if skip != "transformers":
        yield from against_transformers(config, ttft_ms, tpot_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--skip", choices=["transformers"], default="")
    parser.add_argument("--drafts", type=Path, metavar="FOLDER", help="a trained checkpoint")
    options = parser.parse_args()
    if options.drafts is not None:
        print_claims(list(drafts(options.drafts)))
        return
    print_claims(claims(options.experts, skip=options.skip))


if __name__ == "__main__":
    main()
