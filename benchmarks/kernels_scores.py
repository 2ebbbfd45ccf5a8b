"""Index scores, alone and with top-k; GLM-5 has 32 index heads of 128 and top-k 2048.

FLOPs: two for each product of a query's head with a visible key. The floor is at the rate of
PyTorch's bfloat16 product of two 8192 x 8192 matrices in the same run, for float8 inputs too.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from benchmarks.kernels import Figure, at_least, copy_rate, matmul_rate, medians
from paddock.kernels.index_scores import IndexKeys, index_scores, to_float8
from paddock.kernels.index_scores import triton as kernel
from paddock.kernels.index_scores.blocks import blocks
from paddock.kernels.spans import Span
from paddock.kernels.topk import index_topk_varlen
from paddock.kernels.workspace import scratch_bytes

Inputs = tuple[torch.Tensor, IndexKeys, torch.Tensor]
K = 2048


def documents(*lengths: int) -> tuple[Span, ...]:
    starts = [sum(lengths[:at]) for at in range(len(lengths))]
    return tuple(Span(start, n, start, n) for start, n in zip(starts, lengths, strict=True))


def last(keys: int, queries: int) -> tuple[Span, ...]:
    return (Span(0, queries, 0, keys),)


def decoding(sequences: int, keys: int) -> tuple[Span, ...]:
    return tuple(Span(at, 1, at * keys, keys) for at in range(sequences))


def inputs(spans: tuple[Span, ...], heads: int, dim: int) -> Inputs:
    T = max(span.query + span.queries for span in spans)
    S = max(span.key + span.keys for span in spans)
    query = torch.randn(T, heads, dim, device="cuda", dtype=torch.bfloat16)
    key = torch.randn(S, dim, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(T, heads, device="cuda") * (heads * dim) ** -0.5
    return query, IndexKeys(key), weight


def in_float8(query: torch.Tensor, keys: IndexKeys, weight: torch.Tensor) -> Inputs:
    query8, query_scale = to_float8(query)
    key8, key_scale = to_float8(keys.row_SD)
    return query8, IndexKeys(key8, None, key_scale), weight * query_scale


def operations(spans: tuple[Span, ...], heads: int, dim: int) -> int:
    pairs = sum(s.queries * s.past + s.queries * (s.queries + 1) // 2 for s in spans)
    return 2 * heads * dim * pairs


def score_all(tensors: Inputs, spans: tuple[Span, ...]) -> Callable[[], None]:
    """Every block of the spans, with one workspace. k = 0: every query is scored."""
    device = tensors[0].device
    plan = blocks(spans, 0, device, scratch_bytes(device))
    workspace = torch.empty(max(block.rows_wide for block in plan), device=device)

    def run() -> None:
        for block in plan:
            kernel.scores(*tensors, block, workspace[: block.rows_wide].view(block.shape))

    return run


def figures() -> Iterator[Figure]:
    torch.manual_seed(0)
    peak, bytes_s = matmul_rate(), copy_rate()
    yield from _prefill(peak)
    yield from _decode(bytes_s)
    yield from _against_torch(peak)
    yield from _with_topk(peak)
    yield from _stages(peak)


def _figure(name: str, ms: float, work: int, peak: float) -> Figure:
    floor = work / peak * 1e3
    rate = work / ms / 1e9
    return Figure(section="scores", name=name, ms=ms, rate=rate, unit="TFLOP/s", floor_ms=floor)


def _prefill(peak: float) -> Iterator[Figure]:
    steps = {
        "last 2K of 128K": (last(131072, 2048), 32, 128, 7),
        "32K": (documents(32768), 32, 128, 5),
        "128K": (documents(131072), 32, 128, 3),
        "8 x 4K": (documents(*[4096] * 8), 32, 128, 7),
        "300 short and one of 32K": (documents(*[200] * 150, 32768, *[300] * 150), 32, 128, 5),
        "small, 8 x 4K": (documents(*[4096] * 8), 16, 64, 7),
    }
    min_rates = {"32K": (580.0, 850.0), "128K": (580.0, 850.0)}
    for name, (spans, heads, dim, repeats) in steps.items():
        bf16 = inputs(spans, heads, dim)
        arms = [score_all(bf16, spans), score_all(in_float8(*bf16), spans)]
        work = operations(spans, heads, dim)
        times = medians(arms, repeats=repeats, warm=1)
        for at, (kind, ms) in enumerate(zip(("bf16", "fp8"), times, strict=True)):
            figure = _figure(f"{kind} {name}", ms, work, peak)
            yield at_least(figure, rate=min_rates[name][at]) if name in min_rates else figure


def _decode(bytes_s: float) -> Iterator[Figure]:
    for name, spans in {
        "1 x 128K": decoding(1, 131072),
        "32 x 64K": decoding(32, 65536),
    }.items():
        bf16 = inputs(spans, 32, 128)
        key_bytes = 2 * 128 * sum(span.keys for span in spans)
        (ms,) = medians([score_all(bf16, spans)], repeats=15)
        yield Figure(
            section="scores",
            name=f"bf16 decode {name}",
            ms=ms,
            rate=key_bytes / ms / 1e9,
            unit="TB/s",
            floor_ms=key_bytes / bytes_s * 1e3,
        )


def _against_torch(peak: float) -> Iterator[Figure]:
    spans = last(32768, 1024)
    bf16 = inputs(spans, 32, 128)
    query, keys, weight = bf16
    arms = [score_all(bf16, spans), lambda: index_scores(query, keys.row_SD, weight)]
    ours, theirs = medians(arms, repeats=5)
    figure = _figure("bf16 last 1K of 32K", ours, operations(spans, 32, 128), peak)
    yield replace(figure, peer="torch's products, relu, sum", peer_ms=theirs)


def _with_topk(peak: float) -> Iterator[Figure]:
    for name, length, repeats in (("32K", 32768, 5), ("128K", 131072, 3)):
        spans = documents(length)
        bf16 = inputs(spans, 32, 128)
        fp8 = in_float8(*bf16)
        arms = [
            lambda tensors=tensors, spans=spans: index_topk_varlen(*tensors, spans, K)
            for tensors in (bf16, fp8)
        ]
        work = operations(spans, 32, 128)
        for kind, ms in zip(("bf16", "fp8"), medians(arms, repeats=repeats, warm=1), strict=True):
            yield _figure(f"{kind} {name}, scores and top-k", ms, work, peak)


def _stages(peak: float) -> Iterator[Figure]:
    """Other numbers of pipeline stages."""
    spans = last(131072, 2048)
    bf16 = inputs(spans, 32, 128)
    work = operations(spans, 32, 128)
    default = kernel.STAGES
    for kind, tensors in (("bf16", bf16), ("fp8", in_float8(*bf16))):
        for stages in (2, 3, 4):
            kernel.STAGES = stages
            (ms,) = medians([score_all(tensors, spans)])
            yield _figure(f"{kind} last 2K of 128K, {stages} stages", ms, work, peak)
    kernel.STAGES = default
