"""Grouped-query attention of a serving engine, one layer, against gathering keys for PyTorch's own.

Decoding: sequences of equal length in pages of 16, one query each; both arms are graphs, as the
engine's steps are. Reading: spans of new tokens behind a past, as when prompts share a prefix, run
as they come; the peer attends to one span after the other.

Bytes: every key and value read once, at the rate of a device copy. Operations: of the keys that are
seen, at the rate of a large product.
"""

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernels import Figure, at_least, copy_rate, matmul_rate, medians
from benchmarks.kernels_decode import recorded
from paddock.kernels.block_table import BlockTable
from paddock.kernels.dense_attention import dense_attention
from paddock.kernels.gqa_decode import gqa_chunked_prefill, gqa_paged_decode, reference
from paddock.kernels.spans import Span

PAGE = 16
SEQUENCES, LENGTHS = (1, 32, 256), (512, 4096)
LEAST_RATIO = {(256, 4096): 5.0}


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    heads: int
    groups: int
    dim: int

    def rows(self, count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, self.dim, device="cuda", dtype=torch.bfloat16)


SMOL, QWEN = Model("SmolLM2", 9, 3, 64), Model("Qwen3-8B", 32, 8, 128)
# Runs of new tokens and of all keys.
SPANS = (
    ("64 x 24 behind 1K", SMOL, ((24, 1048),) * 64),
    ("ragged, 64 behind 0.2K to 1.5K", SMOL, tuple((1 + n, 200 + 21 * n) for n in range(64))),
    (
        "32 behind 1K, 32 whole",
        SMOL,
        tuple((24, 1048) if n % 2 else (60 + n, 60 + n) for n in range(64)),
    ),
    ("8 x 64 behind 4K", QWEN, ((64, 4160),) * 8),
    ("1 x 1 behind 8K", QWEN, ((1, 8193),)),
    ("1 x 512 behind 8K", QWEN, ((512, 8704),)),
)


@torch.inference_mode()
def figures() -> Iterator[Figure]:
    torch.manual_seed(0)
    moved, multiplied = copy_rate(), matmul_rate()
    work: list[Callable[[], Figure]] = []
    for model in (SMOL, QWEN):
        shapes = [(batch, length) for length in LENGTHS for batch in SEQUENCES]
        work += [lambda m=model, s=shape: _decoding(m, *s, moved) for shape in shapes]
    work += [lambda row=row: _reading(*row, multiplied) for row in SPANS]
    for take in work:
        try:
            yield take()
        except Exception:  # a row that fails must not lose the others
            print(traceback.format_exc(), flush=True)
        torch.cuda.empty_cache()


def _decoding(model: Model, batch: int, length: int, moved: float) -> Figure:
    slots = batch * length
    query_B1HD = model.rows(batch, model.heads).unsqueeze(1)
    key_SGD, value_SGD = (model.rows(slots, model.groups) for _ in range(2))
    page_BP = torch.randperm(slots // PAGE, device="cuda").int().view(batch, -1)
    visible_B1 = torch.full((batch, 1), length, dtype=torch.int32, device="cuda")

    def arm(function: Callable[..., Tensor]) -> Callable[[], None]:
        heads = (query_B1HD, key_SGD, value_SGD)
        how = {"scale": model.dim**-0.5}
        return recorded(lambda: function(*heads, BlockTable(page_BP, PAGE), visible_B1, **how))

    mine, theirs = medians([arm(gqa_paged_decode), arm(reference.gqa_paged_decode)])
    needed = 2 * 2 * slots * model.groups * model.dim
    figure = Figure(
        section="grouped",
        name=f"{model.name}, {batch} x {length}",
        ms=mine,
        rate=needed / mine / 1e9,
        unit="TB/s",
        floor_ms=needed / moved * 1e3,
        peer="gather and SDPA",
        peer_ms=theirs,
    )
    ratio = LEAST_RATIO.get((batch, length))
    return figure if ratio is None else at_least(figure, ratio=ratio)


def _reading(
    name: str, model: Model, runs: tuple[tuple[int, int], ...], multiplied: float
) -> Figure:
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
    mine, theirs = medians(
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
        ms=mine,
        rate=needed / mine / 1e9,
        unit="TFLOP/s",
        floor_ms=needed / multiplied * 1e3,
        peer="span by span",
        peer_ms=theirs,
    )
