"""The indexer's loss with its gradients, fused against the reference on the same GPU, at GLM-5's
shape: 64 heads of 576 teach 32 index heads of 128.

Operations: two for each product of a teacher's head with a key (once), and of an index head three
times (score, gradient of the query, gradient of the key). The twin multiplies more than that, so
that nothing is kept: the teacher's twice, the index head's up to five times. The floor is what they
would take, counted like that, at the rate of PyTorch's product of two 8192 x 8192 matrices. Rows
named `targets` are the teacher's part alone, both walks counted, in tiles of several sizes; the
first is the one in use.

"peak" is what a call needs beyond its inputs; "off" is the largest distance of loss and gradients
from the reference, of their norm. Kept keys: the last T - 2048 queries of a document, 2048 keys
each; neighbours choose alike, as trained ones do, or independently.
"""

import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels import Figure, matmul_rate, medians
from benchmarks.kernels_sparse_mla import choices
from paddock.kernels import dispatch
from paddock.kernels.index_kl import IndexerInputs, IndexerTarget, fused, index_kl, index_kl_topk
from paddock.kernels.index_kl import triton as twin
from paddock.kernels.index_scores import IndexKeys
from paddock.kernels.index_scores.triton import scores
from paddock.kernels.spans import Span

H, C, G, D, K = 64, 576, 32, 128, 2048
TEACHER, STUDENT = 2 * H * C, 2 * G * D  # operations of a pair of query and key
SLOWEST_MS = 2000.0  # of a reference that is measured more than once
DENSE_TILES = (
    twin.DENSE,
    twin.TargetTile(256, 128, 8, 3),
    twin.TargetTile(128, 128, 8, 4),
    twin.TargetTile(256, 64, 8, 2, registers=128),
)
KEPT_TILES = (
    twin.KEPT,
    twin.TargetTile(128, 64, 4, 6),
    twin.TargetTile(128, 64, 4, 4),
    twin.TargetTile(64, 64, 4, 4),
)
Rows = Iterator[Callable[[], Figure]]


def figures() -> Iterator[Figure]:
    """One after the other; one that fails says so, and the next is taken."""
    torch.manual_seed(0)
    rate = matmul_rate()
    for row in (*_dense_rows(rate), *_kept_rows(rate), *_tile_rows(rate), *_part_rows(rate)):
        try:
            yield row()
        except Exception:
            traceback.print_exc(file=sys.stdout)
        torch.cuda.empty_cache()


def _dense_rows(rate: float) -> Rows:
    for keys in (4096, 8192, 16384):
        yield partial(_dense, keys, rate)


def _kept_rows(rate: float) -> Rows:
    for keys, overlapping in ((8192, True), (32768, True), (32768, False)):
        yield partial(_kept, keys, rate, overlapping=overlapping)


def _tile_rows(rate: float) -> Rows:
    for tile in DENSE_TILES:
        yield partial(_dense_targets, 8192, tile, rate)
    for tile in KEPT_TILES:
        yield partial(_kept_targets, 8192, tile, rate)


def _part_rows(rate: float) -> Rows:
    for part in ("scores", "losses", "gradients"):
        yield partial(_dense_part, part, 8192, rate)
    yield partial(_kept_part, 8192, rate)


def _sides(queries: int, keys: int) -> tuple[IndexerInputs, IndexerTarget]:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    weight_TH = torch.randn(queries, G, device="cuda") * (G * D) ** -0.5
    index = IndexerInputs(drawn(queries, G, D), drawn(keys, D), weight_TH)
    return (
        IndexerInputs(*(x.requires_grad_() for x in index)),
        IndexerTarget(drawn(queries, H, C), drawn(keys, C), 256**-0.5),
    )


def _dense(keys: int, rate: float) -> Figure:
    index, attention = _sides(keys, keys)
    spans = (Span(0, keys, 0, keys),)
    ask = partial(index_kl, index, attention, spans)
    return _compared(f"dense {keys // 1024}K", ask, index, keys * (keys + 1) // 2, rate)


def _kept(keys: int, rate: float, *, overlapping: bool) -> Figure:
    index, attention = _sides(keys - K, keys)
    index_TK = choices(K, keys - K, K, overlapping=overlapping)
    ask = partial(index_kl_topk, index, attention, index_TK)
    name = f"kept {keys // 1024}K {'alike' if overlapping else 'independent'}"
    return _compared(name, ask, index, int((index_TK >= 0).sum()), rate)


def _compared(
    name: str, ask: Callable[[], Tensor], index: IndexerInputs, pairs: int, rate: float
) -> Figure:
    assert fused.suits(index, ask.args[1])  # type: ignore[attr-defined]

    def reference() -> Tensor:
        with dispatch.disable_kernels("index_kl"):
            return ask()

    ours, our_peak = _peak(ask)
    theirs, their_peak = _peak(reference)
    off = max(_distances(ours, theirs, index))
    del ours, theirs
    once = _once(reference)
    if once < SLOWEST_MS:
        ms, peer_ms = medians([ask, reference], repeats=3, warm=1)
    else:
        (ms,), peer_ms = medians([ask], repeats=3, warm=1), once
    operations = pairs * (TEACHER + 3 * STUDENT)
    return Figure(
        section="kl",
        name=f"{name}, peak {our_peak:.2f} GB against {their_peak:.2f}, off {off:.0e}",
        ms=ms,
        rate=operations / ms / 1e9,
        unit="TFLOP/s",
        floor_ms=operations / rate * 1e3,
        peer="reference",
        peer_ms=peer_ms,
    )


def _once(arm: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    arm()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _peak(arm: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """Its answer, and the most GB that it held beyond what was held before."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    answer = arm()
    torch.cuda.synchronize()
    return answer, (torch.cuda.max_memory_allocated() - before) / 1e9


def _distances(ours: Tensor, theirs: Tensor, index: IndexerInputs) -> Iterator[float]:
    pairs = zip(
        (ours, *torch.autograd.grad(ours, index)),
        (theirs, *torch.autograd.grad(theirs, index)),
        strict=True,
    )
    for found, right in pairs:
        yield float((found.float() - right.float()).norm() / right.float().norm())


def _timed(name: str, arm: Callable[[], object], operations: float, rate: float) -> Figure:
    (ms,) = medians([arm], repeats=5)
    return Figure(
        section="kl",
        name=name,
        ms=ms,
        rate=operations / ms / 1e9,
        unit="TFLOP/s",
        floor_ms=operations / rate * 1e3 if operations else None,
    )


def _described(tile: twin.TargetTile) -> str:
    limit = f", {tile.registers} registers" if tile.registers else ""
    return f"{tile.keys} x {tile.columns}, {tile.warps} warps, {tile.stages} stages{limit}"


def _dense_targets(keys: int, tile: twin.TargetTile, rate: float) -> Figure:
    _, attention = _sides(keys, keys)
    # Scratch for all of it, so that a tile is measured in one launch.
    ((block, _),) = fused.plan((Span(0, keys, 0, keys),), attention.row_SC.device, 1 << 34)
    out = torch.empty(block.shape, device="cuda")
    arm = partial(twin.dense_target, attention, block, out, tile)
    operations = TEACHER * keys * (keys + 1)
    return _timed(f"dense {keys // 1024}K targets, {_described(tile)}", arm, operations, rate)


def _kept_targets(keys: int, tile: twin.TargetTile, rate: float) -> Figure:
    _, attention = _sides(keys - K, keys)
    index_TK = choices(K, keys - K, K, overlapping=True)
    out = torch.empty(index_TK.shape, device="cuda")
    arm = partial(twin.kept_target, attention, index_TK, out, tile)
    operations = 2 * TEACHER * int((index_TK >= 0).sum())
    return _timed(f"kept {keys // 1024}K targets, {_described(tile)}", arm, operations, rate)


def _dense_part(part: str, keys: int, rate: float) -> Figure:
    """What is not the teacher's: scores of the index, the loss of every row, the gradients."""
    index, _ = _sides(keys, keys)
    index = IndexerInputs(*(x.detach() for x in index))
    device = index.key_SD.device
    ((block, key_tile_N8),) = fused.plan((Span(0, keys, 0, keys),), device, 1 << 34)
    score, target = (torch.zeros(block.shape, device=device) for _ in range(2))
    grad = torch.randn(block.shape, device=device, dtype=torch.bfloat16)
    out = IndexerInputs(
        torch.zeros_like(index.query_THD),
        torch.zeros(twin.SHARES, keys, D, device=device),
        torch.zeros_like(index.weight_TH),
    )
    arms: dict[str, tuple[Callable[[], object], int]] = {
        "scores": (
            partial(
                scores, index.query_THD, IndexKeys(index.key_SD), index.weight_TH, block, score
            ),
            1,
        ),
        "losses": (partial(twin.losses, score, target, grad, block.visible_R), 0),
        "gradients": (partial(twin.dense_gradients, index, grad, block, key_tile_N8, out), 4),
    }
    arm, products = arms[part]
    operations = products * STUDENT * (keys * (keys + 1) // 2)
    return _timed(f"dense {keys // 1024}K {part}", arm, operations, rate)


def _kept_part(keys: int, rate: float) -> Figure:
    index, _ = _sides(keys - K, keys)
    index = IndexerInputs(*(x.detach() for x in index))
    index_TK = choices(K, keys - K, K, overlapping=True)
    grad = torch.randn(index_TK.shape, device="cuda", dtype=torch.bfloat16)
    out = IndexerInputs(
        torch.zeros_like(index.query_THD),
        torch.zeros(keys, D, device="cuda"),
        torch.zeros_like(index.weight_TH),
    )
    unit = torch.ones(1, device="cuda")
    arm = partial(twin.kept_gradients, index, grad, index_TK, unit, out)
    operations = 3 * STUDENT * int((index_TK >= 0).sum())
    return _timed(f"kept {keys // 1024}K gradients", arm, operations, rate)
