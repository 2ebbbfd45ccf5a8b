"""Grouped-query attention of one layer in serving, against gathering keys for PyTorch's attention.

Decode: sequences of equal length in pages of 16, one query each; both arms are CUDA graphs, as in
the engine. Prefill: spans of new tokens after a cached prefix, without graphs; the baseline attends
to one span after the other.

Bytes: every key and value read once, at the rate of a device copy. FLOPs: of visible keys, at the
rate of a large matrix product.
"""

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernels import Figure, at_least, copy_rate, matmul_rate, medians
from benchmarks.kernels_decode import captured
from paddock.kernels.block_table import BlockTable
from paddock.kernels.dense_attention import dense_attention
from paddock.kernels.gqa_decode import gqa_chunked_prefill, gqa_paged_decode, reference
from paddock.kernels.spans import Span

PAGE = 16
SEQUENCES, LENGTHS = (1, 32, 256), (512, 4096)
MIN_RATIO = {(256, 4096): 5.0}


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    heads: int
    groups: int
    dim: int

    def rows(self, count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, self.dim, device="cuda", dtype=torch.bfloat16)


SMOL, QWEN = Model("SmolLM2", 9, 3, 64), Model("Qwen3-8B", 32, 8, 128)
# (new tokens, all keys) of each span.
SPANS = (
    ("64 x 24 after 1K", SMOL, ((24, 1048),) * 64),
    ("ragged, 64 after 0.2K to 1.5K", SMOL, tuple((1 + n, 200 + 21 * n) for n in range(64))),
    (
        "32 after 1K, 32 without prefix",
        SMOL,
        tuple((24, 1048) if n % 2 else (60 + n, 60 + n) for n in range(64)),
    ),
    ("8 x 64 after 4K", QWEN, ((64, 4160),) * 8),
    ("1 x 1 after 8K", QWEN, ((1, 8193),)),
    ("1 x 512 after 8K", QWEN, ((512, 8704),)),
)


@torch.inference_mode()
def figures() -> Iterator[Figure]:
    torch.manual_seed(0)
    bytes_s, flops_s = copy_rate(), matmul_rate()
    work: list[Callable[[], Figure]] = []
    for model in (SMOL, QWEN):
        shapes = [(batch, length) for length in LENGTHS for batch in SEQUENCES]
        work += [lambda m=model, s=shape: _decode(m, *s, bytes_s) for shape in shapes]
    work += [lambda row=row: _prefill(*row, flops_s) for row in SPANS]
    for measure in work:
        try:
            yield measure()
        except Exception:  # one failure must not lose the other rows
            print(traceback.format_exc(), flush=True)
        torch.cuda.empty_cache()


def _decode(model: Model, batch: int, length: int, bytes_s: float) -> Figure:
    slots = batch * length
    query_B1HD = model.rows(batch, model.heads).unsqueeze(1)
    key_SGD, value_SGD = (model.rows(slots, model.groups) for _ in range(2))
    page_BP = torch.randperm(slots // PAGE, device="cuda").int().view(batch, -1)
    visible_B1 = torch.full((batch, 1), length, dtype=torch.int32, device="cuda")

    def arm(function: Callable[..., Tensor]) -> Callable[[], None]:
        heads = (query_B1HD, key_SGD, value_SGD)
        scale = model.dim**-0.5
        return captured(
            lambda: function(*heads, BlockTable(page_BP, PAGE), visible_B1, scale=scale)
        )

    ours, theirs = medians([arm(gqa_paged_decode), arm(reference.gqa_paged_decode)])
    needed = 2 * 2 * slots * model.groups * model.dim
    figure = Figure(
        section="grouped",
        name=f"{model.name}, {batch} x {length}",
        ms=ours,
        rate=needed / ours / 1e9,
        unit="TB/s",
        floor_ms=needed / bytes_s * 1e3,
        peer="gather and SDPA",
        peer_ms=theirs,
    )
    ratio = MIN_RATIO.get((batch, length))
    return figure if ratio is None else at_least(figure, ratio=ratio)


def _prefill(name: str, model: Model, runs: tuple[tuple[int, int], ...], flops_s: float) -> Figure:
    spans, query, key = [], 0, 0
    for queries, keys in runs:
        spans.append(Span(query, queries, key, keys))
        query, key = query + queries, key + keys
    heads = (
        model.rows(query, model.heads),
        model.rows(key, model.groups),
        model.rows(key, model.groups),
    )
    scale = model.dim**-0.5
    ours, theirs = medians(
        [
            lambda: gqa_chunked_prefill(*heads, tuple(spans), scale=scale),
            lambda: dense_attention(*heads, tuple(spans), scale=scale),
        ]
    )
    pairs = sum(s.queries * s.past + s.queries * (s.queries + 1) // 2 for s in spans)
    needed = 4 * model.heads * model.dim * pairs
    return Figure(
        section="grouped",
        name=f"{model.name}, {name}",
        ms=ours,
        rate=needed / ours / 1e9,
        unit="TFLOP/s",
        floor_ms=needed / flops_s * 1e3,
        peer="span by span",
        peer_ms=theirs,
    )
