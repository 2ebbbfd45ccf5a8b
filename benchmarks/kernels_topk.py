"""Top-k of 4096 rows against torch.topk, which has no tie rule and does not sort by index.

Rows are fully visible; `causal` ones end at the row's own position, as in prefill.

Bytes: every visible score read once and every index written once, at the rate of a device copy.
"""

from collections.abc import Callable, Iterator

import torch

from benchmarks.kernels import Figure, at_least, copy_rate, medians
from paddock.kernels.topk import cuda, topk

ROWS = 4096
KINDS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "random": lambda n, L: torch.randn(n, L, device="cuda"),
    "zero plateau": lambda n, L: (torch.randn(n, L, device="cuda") - 2.5).relu_(),
    "many ties": lambda n, L: (torch.randn(n, L, device="cuda") * 20).round_(),
}
MIN_RATIO = {
    ("random", 8192): 3.0,
    ("random", 32768): 4.0,
    ("random", 131072): 6.0,
    ("zero plateau", 8192): 3.0,
    ("zero plateau", 32768): 3.0,
    ("zero plateau", 131072): 3.0,
}


def figures() -> Iterator[Figure]:
    torch.manual_seed(0)
    bytes_s = copy_rate()
    for length in (8192, 32768, 131072):
        for kind in KINDS:
            figure = _figure(kind, length, 2048, bytes_s)
            min_ratio = MIN_RATIO.get((kind, length))
            yield figure if min_ratio is None else at_least(figure, ratio=min_ratio)
        yield _figure("random", length, 2048, bytes_s, causal=True)
    for length, k in ((1024, 64), (4096, 512), (4096, 1024), (16384, 1024)):
        yield _figure("random", length, k, bytes_s)
    yield from _one_row(bytes_s)
    yield from _block_sizes(bytes_s)


def _figure(kind: str, length: int, k: int, bytes_s: float, *, causal: bool = False) -> Figure:
    score = KINDS[kind](ROWS, length)
    first = length - ROWS + 1 if causal and length > ROWS else 1 if causal else length
    visible = torch.arange(first, first + ROWS, device="cuda") if causal else _full(length)
    visible = visible.clamp(max=length).int()
    out = torch.empty(ROWS, k, dtype=torch.int32, device="cuda")
    _check(score, visible, k)

    def ours() -> None:
        cuda.topk(score, visible, k, start_T=None, out_TK=out)

    ours_ms, theirs_ms = medians([ours, lambda: score.topk(k, dim=-1, sorted=False)])
    name = f"{kind}, {ROWS} x {length}, k {k}{', causal' if causal else ''}"
    needed = 4 * int(visible.sum()) + 4 * out.numel()
    return Figure(
        section="topk",
        name=name,
        ms=ours_ms,
        rate=needed / ours_ms / 1e9,
        unit="TB/s",
        floor_ms=needed / bytes_s * 1e3,
        peer="torch.topk",
        peer_ms=theirs_ms,
    )


def _full(length: int) -> torch.Tensor:
    return torch.full((ROWS,), length, device="cuda")


def _check(score: torch.Tensor, visible: torch.Tensor, k: int) -> None:
    """Check the result on some rows against a stable sort."""
    at = torch.arange(0, ROWS, ROWS // 32, device="cuda")
    some = score[at].clone()
    some[torch.arange(some.shape[1], device="cuda") >= visible[at, None]] = -torch.inf
    order = some.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values
    order[order >= visible[at, None]] = -1
    found = topk(score[at], visible[at], k)
    if not torch.equal(found, order.int()):
        raise AssertionError(f"wrong indices for rows of {score.shape[1]}, k {k}")


def _one_row(bytes_s: float) -> Iterator[Figure]:
    """A decode step: few rows, so that the time of one block per row dominates."""
    for rows in (1, 32):
        score = torch.randn(rows, 131072, device="cuda")
        visible = torch.full((rows,), 131072, dtype=torch.int32, device="cuda")
        out = torch.empty(rows, 2048, dtype=torch.int32, device="cuda")
        arms = [
            lambda s=score, v=visible, o=out: cuda.topk(s, v, 2048, start_T=None, out_TK=o),
            lambda s=score: s.topk(2048, dim=-1, sorted=False),
        ]
        ours_ms, theirs_ms = medians(arms, repeats=21)
        yield Figure(
            section="topk",
            name=f"random, {rows} x 131072, k 2048",
            ms=ours_ms,
            rate=4 * score.numel() / ours_ms / 1e9,
            unit="TB/s",
            floor_ms=4 * score.numel() / bytes_s * 1e3,
            peer="torch.topk",
            peer_ms=theirs_ms,
        )


def _block_sizes(bytes_s: float) -> Iterator[Figure]:
    """Other numbers of threads per row."""
    for length in (8192, 32768, 131072):
        score, visible = torch.randn(ROWS, length, device="cuda"), _full(length).int()
        out = torch.empty(ROWS, 2048, dtype=torch.int32, device="cuda")
        arms = [
            lambda threads=threads, s=score, v=visible, o=out: cuda.topk(
                s, v, 2048, start_T=None, out_TK=o, threads=threads
            )
            for threads in (256, 512)
        ]
        for threads, ms in zip((256, 512), medians(arms), strict=True):
            yield Figure(
                section="topk",
                name=f"{threads} threads, {ROWS} x {length}",
                ms=ms,
                rate=4 * score.numel() / ms / 1e9,
                unit="TB/s",
                floor_ms=4 * score.numel() / bytes_s * 1e3,
            )
