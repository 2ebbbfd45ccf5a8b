"""The indexer's KL loss with its gradients, kernel against reference on the same GPU, at GLM-5's
shape: 64 attention heads of 576 are the target of 32 index heads of 128.

FLOPs: two for each product of an attention head with a key (once), and of an index head three times
(score, gradient of the query, gradient of the key). The kernel recomputes instead of storing: the
attention heads' products twice, the index heads' up to five times. The floor is the former count at
the rate of PyTorch's product of two 8192 x 8192 matrices. Rows named `targets` are the attention
part alone, both passes counted, with several tile sizes; the first is the one in use.

"peak" is the memory of a call beyond its inputs; "error" is the largest relative error of loss and
gradients against the reference. Top-k: the last T - 2048 queries of a document, 2048 keys each;
neighbours select similar keys, as trained ones do, or independent ones.
"""

import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels import Figure, matmul_rate, medians
from benchmarks.kernels_sparse_mla import random_selection
from paddock.kernels import dispatch
from paddock.kernels.index_kl import IndexerInputs, IndexerTarget, fused, index_kl, index_kl_topk
from paddock.kernels.index_kl import triton as kernel
from paddock.kernels.index_scores import IndexKeys
from paddock.kernels.index_scores.triton import scores
from paddock.kernels.spans import Span

H, C, G, D, K = 64, 576, 32, 128, 2048
ATTENTION, INDEX = 2 * H * C, 2 * G * D  # FLOPs per pair of query and key
SLOWEST_MS = 2000.0  # a slower reference is measured once
DENSE_TILES = (
    kernel.DENSE,
    kernel.TargetTile(256, 128, 8, 3),
    kernel.TargetTile(128, 128, 8, 4),
    kernel.TargetTile(256, 64, 8, 2, registers=128),
)
TOPK_TILES = (
    kernel.KEPT,
    kernel.TargetTile(128, 64, 4, 6),
    kernel.TargetTile(128, 64, 4, 4),
    kernel.TargetTile(64, 64, 4, 4),
)
Rows = Iterator[Callable[[], Figure]]


def figures() -> Iterator[Figure]:
    """A row that fails is reported, and the next one runs."""
    torch.manual_seed(0)
    rate = matmul_rate()
    for row in (*_dense_rows(rate), *_topk_rows(rate), *_tile_rows(rate), *_part_rows(rate)):
        try:
            yield row()
        except Exception:
            traceback.print_exc(file=sys.stdout)
        torch.cuda.empty_cache()


def _dense_rows(rate: float) -> Rows:
    for keys in (4096, 8192, 16384):
        yield partial(_dense, keys, rate)


def _topk_rows(rate: float) -> Rows:
    for keys, overlapping in ((8192, True), (32768, True), (32768, False)):
        yield partial(_topk, keys, rate, overlapping=overlapping)


def _tile_rows(rate: float) -> Rows:
    for tile in DENSE_TILES:
        yield partial(_dense_targets, 8192, tile, rate)
    for tile in TOPK_TILES:
        yield partial(_topk_targets, 8192, tile, rate)


def _part_rows(rate: float) -> Rows:
    for part in ("scores", "losses", "gradients"):
        yield partial(_dense_part, part, 8192, rate)
    yield partial(_topk_part, 8192, rate)


def _inputs(queries: int, keys: int) -> tuple[IndexerInputs, IndexerTarget]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    weight_TH = torch.randn(queries, G, device="cuda") * (G * D) ** -0.5
    index = IndexerInputs(randn(queries, G, D), randn(keys, D), weight_TH)
    return (
        IndexerInputs(*(x.requires_grad_() for x in index)),
        IndexerTarget(randn(queries, H, C), randn(keys, C), 256**-0.5),
    )


def _dense(keys: int, rate: float) -> Figure:
    index, attention = _inputs(keys, keys)
    spans = (Span(0, keys, 0, keys),)
    call = partial(index_kl, index, attention, spans)
    return _compare(f"dense {keys // 1024}K", call, index, keys * (keys + 1) // 2, rate)


def _topk(keys: int, rate: float, *, overlapping: bool) -> Figure:
    index, attention = _inputs(keys - K, keys)
    index_TK = random_selection(K, keys - K, K, overlapping=overlapping)
    call = partial(index_kl_topk, index, attention, index_TK)
    name = f"top-k {keys // 1024}K {'overlapping' if overlapping else 'independent'}"
    return _compare(name, call, index, int((index_TK >= 0).sum()), rate)


def _compare(
    name: str, call: Callable[[], Tensor], index: IndexerInputs, pairs: int, rate: float
) -> Figure:
    assert fused.suits(index, call.args[1])  # type: ignore[attr-defined]

    def reference() -> Tensor:
        with dispatch.disable_kernels("index_kl"):
            return call()

    ours, our_peak = _peak(call)
    theirs, their_peak = _peak(reference)
    error = max(_relative_errors(ours, theirs, index))
    del ours, theirs
    once = _time_once(reference)
    if once < SLOWEST_MS:
        ms, peer_ms = medians([call, reference], repeats=3, warm=1)
    else:
        (ms,), peer_ms = medians([call], repeats=3, warm=1), once
    flops = pairs * (ATTENTION + 3 * INDEX)
    return Figure(
        section="kl",
        name=f"{name}, peak {our_peak:.2f} GB against {their_peak:.2f}, error {error:.0e}",
        ms=ms,
        rate=flops / ms / 1e9,
        unit="TFLOP/s",
        floor_ms=flops / rate * 1e3,
        peer="reference",
        peer_ms=peer_ms,
    )


def _time_once(arm: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    arm()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _peak(arm: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """Its result, and its peak memory in GB beyond what was allocated before."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = arm()
    torch.cuda.synchronize()
    return result, (torch.cuda.max_memory_allocated() - before) / 1e9


def _relative_errors(ours: Tensor, theirs: Tensor, index: IndexerInputs) -> Iterator[float]:
    pairs = zip(
        (ours, *torch.autograd.grad(ours, index)),
        (theirs, *torch.autograd.grad(theirs, index)),
        strict=True,
    )
    for found, expected in pairs:
        yield float((found.float() - expected.float()).norm() / expected.float().norm())


def _timed(name: str, arm: Callable[[], object], flops: float, rate: float) -> Figure:
    (ms,) = medians([arm], repeats=5)
    return Figure(
        section="kl",
        name=name,
        ms=ms,
        rate=flops / ms / 1e9,
        unit="TFLOP/s",
        floor_ms=flops / rate * 1e3 if flops else None,
    )


def _describe(tile: kernel.TargetTile) -> str:
    limit = f", {tile.registers} registers" if tile.registers else ""
    return f"{tile.keys} x {tile.columns}, {tile.warps} warps, {tile.stages} stages{limit}"


def _dense_targets(keys: int, tile: kernel.TargetTile, rate: float) -> Figure:
    _, attention = _inputs(keys, keys)
    # A workspace for all of it, so that a tile is measured in one launch.
    ((block, _),) = fused.plan((Span(0, keys, 0, keys),), attention.row_SC.device, 1 << 34)
    out = torch.empty(block.shape, device="cuda")
    arm = partial(kernel.dense_target, attention, block, out, tile)
    flops = ATTENTION * keys * (keys + 1)
    return _timed(f"dense {keys // 1024}K targets, {_describe(tile)}", arm, flops, rate)


def _topk_targets(keys: int, tile: kernel.TargetTile, rate: float) -> Figure:
    _, attention = _inputs(keys - K, keys)
    index_TK = random_selection(K, keys - K, K, overlapping=True)
    out = torch.empty(index_TK.shape, device="cuda")
    arm = partial(kernel.kept_target, attention, index_TK, out, tile)
    flops = 2 * ATTENTION * int((index_TK >= 0).sum())
    return _timed(f"top-k {keys // 1024}K targets, {_describe(tile)}", arm, flops, rate)


def _dense_part(part: str, keys: int, rate: float) -> Figure:
    """The rest: index scores, the loss of every row, the gradients."""
    index, _ = _inputs(keys, keys)
    index = IndexerInputs(*(x.detach() for x in index))
    device = index.key_SD.device
    ((block, key_tile_N8),) = fused.plan((Span(0, keys, 0, keys),), device, 1 << 34)
    score, target = (torch.zeros(block.shape, device=device) for _ in range(2))
    grad = torch.randn(block.shape, device=device, dtype=torch.bfloat16)
    out = IndexerInputs(
        torch.zeros_like(index.query_THD),
        torch.zeros(kernel.SHARES, keys, D, device=device),
        torch.zeros_like(index.weight_TH),
    )
    arms: dict[str, tuple[Callable[[], object], int]] = {
        "scores": (
            partial(
                scores, index.query_THD, IndexKeys(index.key_SD), index.weight_TH, block, score
            ),
            1,
        ),
        "losses": (partial(kernel.losses, score, target, grad, block.visible_R), 0),
        "gradients": (partial(kernel.dense_gradients, index, grad, block, key_tile_N8, out), 4),
    }
    arm, products = arms[part]
    flops = products * INDEX * (keys * (keys + 1) // 2)
    return _timed(f"dense {keys // 1024}K {part}", arm, flops, rate)


def _topk_part(keys: int, rate: float) -> Figure:
    index, _ = _inputs(keys - K, keys)
    index = IndexerInputs(*(x.detach() for x in index))
    index_TK = random_selection(K, keys - K, K, overlapping=True)
    grad = torch.randn(index_TK.shape, device="cuda", dtype=torch.bfloat16)
    out = IndexerInputs(
        torch.zeros_like(index.query_THD),
        torch.zeros(keys, D, device="cuda"),
        torch.zeros_like(index.weight_TH),
    )
    unit = torch.ones(1, device="cuda")
    arm = partial(kernel.kept_gradients, index, grad, index_TK, unit, out)
    flops = 3 * INDEX * int((index_TK >= 0).sum())
    return _timed(f"top-k {keys // 1024}K gradients", arm, flops, rate)
