"""The W4A8 product on one GPU against bfloat16 in the same run; memory and decoding with it.

python -m benchmarks.quant gpu
"""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.table import Claim, times_better
from paddock.checkpoint import load_pretrained, save_pretrained
from paddock.model import Network, preset
from paddock.quant import RECIPES, quantize_folder

SHAPES = {"gate and up": (4096, 6144), "down": (6144, 2048)}
ROWS = (1, 4, 16, 64, 256, 1024)
COPIES_BYTES = 1 << 30  # so many different weights take turns that no cache holds them


def gpu_claims() -> list[Claim]:
    if not torch.cuda.is_available():
        return [Claim(name="W4A8 product", target=">= 2.3x up to 64 rows", measured="needs a GPU")]
    rows = [_product_claim(name, shape, count) for name, shape in SHAPES.items() for count in ROWS]
    return [*rows, *(_expert_claim(tokens) for tokens in (1, 8, 64)), *decode_claims()]


def _least(rows: int) -> float | None:
    if rows <= 64:
        return 2.3
    return 0.8 if rows == 1024 else None


def _timed(arms: Sequence[Callable[[int], object]], turns: int) -> list[float]:
    """Median milliseconds of one call of each arm, captured in a graph: what decoding pays."""
    from benchmarks.kernels import medians

    graphs = []
    for arm in arms:
        for turn in range(min(turns, 3)):
            arm(turn)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for turn in range(turns):
                arm(turn)
        graphs.append(graph)
    found = medians([graph.replay for graph in graphs], repeats=11)
    return [ms / turns for ms in found]


def _product_claim(name: str, shape: tuple[int, int], rows: int) -> Claim:
    from paddock.kernels.w4a8_gemm import Weight, integer_linear, pack_halves, quantize_rows

    F, D = shape
    turns = max(2, COPIES_BYTES // (2 * F * D))
    x = torch.randn(rows, D, device="cuda", dtype=torch.bfloat16)
    wide = [torch.randn(F, D, device="cuda", dtype=torch.bfloat16) for _ in range(turns)]
    narrow = []
    for _ in range(turns):
        integer = torch.randint(-7, 8, (F, D), device="cuda", dtype=torch.int8)
        scale = torch.rand(F, 1, device="cuda") * 1e-2
        narrow.append(Weight(pack_halves(integer), scale, packed=True))
    arms = (
        lambda turn: integer_linear(quantize_rows(x), narrow[turn], torch.bfloat16),
        lambda turn: torch.nn.functional.linear(x, wide[turn]),
    )
    ours, theirs = _timed(arms, turns)
    what = f"W4A8 {name} {F} x {D}, {rows} rows, rounding included, against bfloat16"
    return times_better(what, 1e3 * ours, 1e3 * theirs, least=_least(rows), unit="us")


def _expert_claim(tokens: int) -> Claim:
    """All of a layer's routed products, as decoding so many tokens at once meets them."""
    from paddock.kernels.grouped_gemm import grouped_gemm
    from paddock.kernels.w4a8_gemm import Weight, integer_grouped, pack_halves, quantize_rows

    E, K, F, D = 256, 8, 4096, 6144
    chance = torch.Generator().manual_seed(0)
    expert = torch.stack([torch.randperm(E, generator=chance)[:K] for _ in range(tokens)])
    counts = torch.bincount(expert.flatten(), minlength=E).cuda()
    x = torch.randn(tokens * K, D, device="cuda", dtype=torch.bfloat16)
    wide = torch.randn(E, F, D, device="cuda", dtype=torch.bfloat16)
    integer = torch.randint(-7, 8, (E, F, D), device="cuda", dtype=torch.int8)
    scale = torch.rand(E, F, 1, device="cuda") * 1e-2
    narrow = Weight(pack_halves(integer), scale, packed=True)
    del integer
    arms = (
        lambda _: integer_grouped(quantize_rows(x), narrow, counts, torch.bfloat16),
        lambda _: grouped_gemm(x, wide, counts),
    )
    ours, theirs = _timed(arms, 4)
    what = f"W4A8 gate and up of 256 experts, {tokens} tokens of 8, against grouped bfloat16"
    return times_better(what, 1e3 * ours, 1e3 * theirs, least=2.3, unit="us")


def decode_claims() -> list[Claim]:
    """Memory and decoding speed of the small preset, newborn, before and after."""
    rows = []
    with TemporaryDirectory() as home:
        source, out = Path(home) / "small", Path(home) / "q"
        save_pretrained(Network.born(preset("small"), 0), source, dtype="bfloat16")
        quantize_folder(source, out, RECIPES["rtn"], device="cuda")
        for batch in (1, 16):
            found = [_decoding(folder, batch) for folder in (source, out)]
            ratio = found[1][0] / found[0][0]
            rows.append(
                Claim(
                    name=f"small, {batch} sequences: tokens/s of decoding, W4A8 against bfloat16",
                    measured=f"{ratio:.2f}x ({found[1][0]:.0f} against {found[0][0]:.0f}); memory "
                    f"{found[1][1] / 2**20:.0f} against {found[0][1] / 2**20:.0f} MiB",
                )
            )
    return rows


def _decoding(folder: Path, batch: int) -> tuple[float, int]:
    """Tokens a second, and the weights' bytes on the device."""
    from paddock.engine import Engine, EngineSettings, Request
    from paddock.records import Sampling

    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    network = load_pretrained(folder, "bfloat16", "cuda")
    held = torch.cuda.memory_allocated() - before
    settings = EngineSettings(cache_bytes=1 << 30, context=1024, stop_ids=())
    asked = [
        Request(
            token_ids=tuple(range(i, i + 64)),
            sampling=Sampling(temperature=0.0, max_new_tokens=128),
        )
        for i in range(batch)
    ]
    with Engine(network, None, settings) as engine:
        rates = []
        for _ in range(3):
            begin = time.perf_counter()
            engine.answers(asked)
            rates.append(batch * 128 / (time.perf_counter() - begin))
    return statistics.median(rates), held
