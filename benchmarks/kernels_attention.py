"""Whole attention of one GLM-5 layer on one GPU, batch 1, against the best dense attention.

Ours is the indexer and sparse attention: index scores, top-k, attention to the selected latent KV
entries; backward is the sparse attention's (the selection has no gradient). Dense is PyTorch's
causal attention over 64 expanded heads of 256, flash or cuDNN, whichever is faster. Projections are
in neither. Index queries and keys are random, so that the selections of neighbours hardly overlap:
the worst case for the sparse kernels.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels import Figure, at_least, matmul_rate, medians
from benchmarks.kernels_sparse_mla import GLM5, dense_arms
from paddock.kernels.index_scores import IndexKeys, to_float8
from paddock.kernels.spans import Span
from paddock.kernels.sparse_mla import fused
from paddock.kernels.sparse_mla.problem import Problem
from paddock.kernels.topk import index_topk_varlen

LENGTHS = (8192, 16_384, 32_768, 65_536, 131_072)
BACKWARD = (16_384, 32_768)
INDEX_HEADS, INDEX_DIM = 32, 128
FORWARD_MIN_RATIO = {16_384: 1.0, 32_768: 2.0, 131_072: 4.5}
FLOAT8_MIN_RATIO = {131_072: 5.5}
BACKWARD_MIN_RATIO = {32_768: 2.5}


def figures() -> Iterator[Figure]:
    rate = matmul_rate()
    for length in LENGTHS:
        yield from _forward(length, rate)
        torch.cuda.empty_cache()
    for length in BACKWARD:
        yield _backward(length, rate)
        torch.cuda.empty_cache()


def _pairs(length: int) -> int:
    kept = GLM5.kept
    return sum(min(t + 1, kept) for t in range(length))


def _floor_ms(length: int, rate: float, *, backward: bool) -> float:
    """All FLOPs at the peak rate; index scores of all keys before a query."""
    scored = 0 if backward else INDEX_HEADS * INDEX_DIM * length**2
    return (GLM5.flops(_pairs(length), backward=backward) + scored) / rate * 1e3


def _inputs(length: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    query_THC = torch.randn(length, GLM5.heads, GLM5.row, **make)
    return query_THC, torch.randn(length, GLM5.row, **make)


def _selector(length: int, *, float8: bool) -> Callable[[], Tensor]:
    """Index scores and top-k of every query of a document; includes the cast to float8."""
    torch.manual_seed(1)
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    query_THD = torch.randn(length, INDEX_HEADS, INDEX_DIM, **make)
    key_SD = torch.randn(length, INDEX_DIM, **make)
    weight_TH = torch.randn(length, INDEX_HEADS, device="cuda") / (INDEX_HEADS * INDEX_DIM) ** 0.5
    spans = (Span(0, length, 0, length),)

    def bfloat16() -> Tensor:
        return index_topk_varlen(query_THD, IndexKeys(key_SD), weight_TH, spans, GLM5.kept)

    def fp8() -> Tensor:
        query8_THD, scale_TH = to_float8(query_THD)
        key8_SD, scale_S = to_float8(key_SD)
        keys = IndexKeys(key8_SD, None, scale_S)
        return index_topk_varlen(query8_THD, keys, weight_TH * scale_TH, spans, GLM5.kept)

    return fp8 if float8 else bfloat16


def _forward(length: int, rate: float) -> Iterator[Figure]:
    query_THC, row_SC = _inputs(length)

    def whole(select: Callable[[], Tensor]) -> Callable[[], object]:
        def run() -> object:
            problem = Problem(query_THC, row_SC, select(), GLM5.scale, GLM5.value)
            return fused.forward(problem)

        return run

    ours = [whole(_selector(length, float8=float8)) for float8 in (False, True)]
    dense = dense_arms(length, backward=False)
    repeats = 7 if length <= 32_768 else 3
    bf16_ms, fp8_ms, *peers_ms = medians([*ours, *dense.values()], repeats=repeats, warm=1)
    peer_ms, peer = min(zip(peers_ms, dense, strict=True))
    flops = GLM5.flops(_pairs(length), backward=False) + INDEX_HEADS * INDEX_DIM * length**2
    for kind, ms, min_ratio in (
        ("bf16", bf16_ms, FORWARD_MIN_RATIO.get(length)),
        ("fp8", fp8_ms, FLOAT8_MIN_RATIO.get(length)),
    ):
        figure = Figure(
            section="attention",
            name=f"forward {length // 1024}K, {kind} scores",
            ms=ms,
            rate=flops / ms / 1e9,
            unit="TFLOP/s",
            floor_ms=_floor_ms(length, rate, backward=False),
            peer=peer,
            peer_ms=peer_ms,
        )
        yield at_least(figure, ratio=min_ratio) if min_ratio else figure


def _backward(length: int, rate: float) -> Figure:
    query_THC, row_SC = _inputs(length)
    index_TK = _selector(length, float8=False)()
    problem = Problem(query_THC, row_SC, index_TK, GLM5.scale, GLM5.value)
    attended = fused.forward(problem)
    grad_THV = torch.randn_like(attended.out_THV)

    def ours() -> object:
        return fused.backward(problem, attended, grad_THV, deterministic=False)

    dense = dense_arms(length, backward=True)
    ms, *peers_ms = medians([ours, *dense.values()], repeats=3, warm=1)
    peer_ms, peer = min(zip(peers_ms, dense, strict=True))
    figure = Figure(
        section="attention",
        name=f"backward {length // 1024}K",
        ms=ms,
        rate=GLM5.flops(_pairs(length), backward=True) / ms / 1e9,
        unit="TFLOP/s",
        floor_ms=_floor_ms(length, rate, backward=True),
        peer=peer,
        peer_ms=peer_ms,
    )
    min_ratio = BACKWARD_MIN_RATIO.get(length)
    return at_least(figure, ratio=min_ratio) if min_ratio else figure
