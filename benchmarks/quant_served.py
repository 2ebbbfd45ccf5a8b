"""Quantized models in the engine on one GPU: memory and decoding against bfloat16.

See benchmarks.quant_gpu. `decode` is the small preset, whose steps are mostly kernel launches;
`layers` is three layers of GLM-5's width, whose steps are mostly reading weights.
"""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from benchmarks.table import Claim
from paddock.checkpoint import load_pretrained, save_pretrained
from paddock.model import Transformer, preset
from paddock.model.decoder_layer import DecoderLayer
from paddock.model.moe import MoE
from paddock.quant import RECIPES, quantize_folder
from paddock.quant.quantize_layer import replace_with_quantized
from paddock.quant.settings import quantizable_linears
from paddock.quant.w4a8 import QuantizedTensor, quantize

EXPERTS = 256
LAYER_STEPS = ((1, 4096), (8, 4096), (32, 4096), (8, 32_768))


def decode_claims() -> list[Claim]:
    """Memory and decoding speed of the small preset with random weights, W4A8 and bfloat16."""
    rows = []
    with TemporaryDirectory() as home:
        source, out = Path(home) / "small", Path(home) / "q"
        save_pretrained(Transformer.from_config(preset("small"), 0), source, dtype="bfloat16")
        quantize_folder(source, out, RECIPES["rtn"], device="cuda")
        for batch in (1, 16):
            found = [_decoding(folder, batch) for folder in (source, out)]
            ratio = found[1][0] / found[0][0]
            rows.append(
                Claim(
                    name=f"small, {batch} sequences: decode tokens/s, W4A8 against bfloat16",
                    measured=f"{ratio:.2f}x ({found[1][0]:.0f} against {found[0][0]:.0f}); memory "
                    f"{found[1][1] / 2**20:.0f} against {found[0][1] / 2**20:.0f} MiB",
                )
            )
    return rows


def _decoding(folder: Path, batch: int) -> tuple[float, int]:
    """Decode tokens/s, and the weights' bytes on the device."""
    from paddock.engine import Engine, EngineSettings, Request
    from paddock.records import SamplingParams

    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    network = load_pretrained(folder, "bfloat16", "cuda")
    held = torch.cuda.memory_allocated() - before
    settings = EngineSettings(kv_cache_bytes=1 << 30, context_length=1024, stop_token_ids=())
    requests = [
        Request(
            token_ids=tuple(range(i, i + 64)),
            sampling_params=SamplingParams(temperature=0.0, max_new_tokens=128),
        )
        for i in range(batch)
    ]
    with Engine(network, None, settings) as engine:
        rates = []
        for _ in range(5):
            start = time.perf_counter()
            engine.generate_outputs(requests)
            rates.append(batch * 128 / (time.perf_counter() - start))
    return statistics.median(rates[2:]), held  # the first two capture the CUDA graphs


def layer_claims() -> list[Claim]:
    """Decode steps of three layers of GLM-5's width, random weights, W4A8 and bfloat16."""
    from benchmarks.serve_gpu import random_network, step_ms, three_layers

    network = random_network(three_layers(EXPERTS))
    held: list[float] = []
    found: list[list[float]] = []
    for kind in ("bfloat16", "W4A8"):
        if kind == "W4A8":
            _round_layers(network)
        network.fuse_weights()
        held.append(sum(x.nbytes for x in _tensors(network.layers)))
        found.append([step_ms(network, batch, length) for batch, length in LAYER_STEPS])
        torch.cuda.empty_cache()
    return [
        Claim(
            name=f"three wide layers, a step of {batch} x {length // 1024}K, against bfloat16",
            measured=f"{before / after:.2f}x ({after:.2f} against {before:.2f} ms); layers "
            f"{held[1] / 2**30:.1f} against {held[0] / 2**30:.1f} GiB",
        )
        for (batch, length), before, after in zip(LAYER_STEPS, *found, strict=True)
    ]


def _tensors(module: torch.nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _round_layers(network: Transformer) -> None:
    """Round to nearest, in place, layer by layer."""
    settings = RECIPES["rtn"]
    for block in network.layers:
        assert isinstance(block, DecoderLayer)
        found = {
            f"{name}.weight": quantize(linear.weight, settings.linear_args)
            for name, linear in quantizable_linears(block).items()
        }
        if isinstance(block.mlp, MoE):
            for name, stack in block.mlp.experts.named_parameters():
                parts = [quantize(part, settings.expert_args) for part in stack.split(16)]
                found[f"mlp.experts.{name}"] = QuantizedTensor(
                    torch.cat([part.integer_XFD for part in parts]),
                    torch.cat([part.scale_XFG for part in parts]),
                    settings.expert_args.bits,
                )
        replace_with_quantized(block, found)
        torch.cuda.empty_cache()
