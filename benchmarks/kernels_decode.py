"""Decode attention of one layer: sparse attention with its indexer against dense attention.

Sequences of equal length in pages of 64, one query each, GLM-5's shapes: 64 heads, latent KV
entries of 512 + 64, an indexer of 32 x 128, top-k 2048. Every arm is a CUDA graph, so launches cost
little. `sparse` is the indexer (index scores, top-k) and attention to the selected tokens; `dense`
attends to every entry.

Bytes: every index key or KV entry read once, without queries and outputs, at the rate of a device
copy.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels import Figure, at_least, copy_rate, medians
from paddock.kernels.block_table import BlockTable
from paddock.kernels.fused_experts import fused_experts
from paddock.kernels.grouped_gemm import grouped_gemm
from paddock.kernels.index_scores import IndexKeys
from paddock.kernels.mla_decode import mla_paged_decode, mla_sparse_decode
from paddock.kernels.moe_permute import permute, sort_by_expert, unpermute
from paddock.kernels.swiglu import silu_and_mul
from paddock.kernels.topk import index_topk_paged, topk_indices

HEADS, LATENT, ROPE, TOPK, PAGE = 64, 512, 64, 2048, 64
INDEX_HEADS, INDEX_DIM = 32, 128
KWARGS: dict[str, Any] = {"scale": 1 / 16, "value": LATENT}
SHAPES = ((1, 4096), (1, 32768), (1, 131072), (8, 32768), (8, 131072), (32, 4096), (32, 32768))
TARGETS = {(8, 131072): 2.0}


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Inputs of a layer's decode attention."""

    query_BHC: Tensor
    row_SC: Tensor
    index_query_BHD: Tensor
    weight_BH: Tensor
    key_SD: Tensor
    pages: BlockTable
    visible_B1: Tensor

    @classmethod
    def of(cls, batch: int, length: int) -> "Step":
        def rows(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        slots = batch * length
        page = torch.randperm(slots // PAGE, device="cuda").int().view(batch, -1)
        return cls(
            rows(batch, HEADS, LATENT + ROPE),
            rows(slots, LATENT + ROPE),
            rows(batch, INDEX_HEADS, INDEX_DIM),
            torch.rand(batch, INDEX_HEADS, device="cuda"),
            rows(slots, INDEX_DIM),
            BlockTable(page, PAGE),
            torch.full((batch, 1), length, dtype=torch.int32, device="cuda"),
        )

    def select(self) -> Tensor:
        keys, weight = IndexKeys(self.key_SD), self.weight_BH
        return index_topk_paged(
            self.index_query_BHD, keys, weight, self.pages, self.visible_B1, TOPK
        )

    def sparse(self) -> Tensor:
        return self.attend(self.select())

    def attend(self, index_BK: Tensor) -> Tensor:
        return mla_sparse_decode(self.query_BHC, self.row_SC, self.pages, index_BK, **KWARGS)

    def dense(self) -> Tensor:
        query_B1HC = self.query_BHC.unsqueeze(1)
        return mla_paged_decode(query_B1HC, self.row_SC, self.pages, self.visible_B1, **KWARGS)


def captured(work: Callable[[], object]) -> Callable[[], None]:
    """Replay of a CUDA graph of `work`."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


@torch.inference_mode()
def figures() -> Iterator[Figure]:
    torch.manual_seed(0)
    bytes_s = copy_rate()
    for batch, length in SHAPES:
        yield from _step(batch, length, bytes_s)
        torch.cuda.empty_cache()
    for tokens in (1, 8, 32, 64):
        yield _experts(tokens, bytes_s)


def _step(batch: int, length: int, bytes_s: float) -> Iterator[Figure]:
    step, name = Step.of(batch, length), f"{batch} x {length // 1024}K"
    index_BK = step.select()
    arms = [step.dense, step.sparse, step.select, lambda: step.attend(index_BK)]
    dense, sparse, select, attend = medians([captured(arm) for arm in arms], repeats=15)
    tokens, selected_tokens = batch * length, batch * min(TOPK, length)
    key, row = 2 * INDEX_DIM * tokens, 2 * (LATENT + ROPE) * tokens
    selected = 2 * (LATENT + ROPE) * selected_tokens
    yield _figure(f"dense, {name}", dense, row, bytes_s)
    yield _figure(f"indexer and top-k, {name}", select, key, bytes_s)
    yield _figure(f"selected tokens, {name}", attend, selected, bytes_s)
    whole = _figure(f"sparse, {name}", sparse, key + selected, bytes_s, peer="dense", peer_ms=dense)
    min_ratio = TARGETS.get((batch, length))
    yield whole if min_ratio is None else at_least(whole, ratio=min_ratio)


def _experts(tokens: int, bytes_s: float) -> Figure:
    """64 experts of GLM-5's width, 8 per token, fused, against sorting and grouped GEMMs."""
    E, K, D, F = 64, 8, 6144, 2048
    gate_up = torch.randn(E, 2 * F, D, device="cuda", dtype=torch.bfloat16)
    down = torch.randn(E, D, F, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(tokens, D, device="cuda", dtype=torch.bfloat16)
    expert = topk_indices(torch.randn(tokens, E, device="cuda"), K)
    weight = torch.rand(tokens, K, device="cuda")

    def grouped() -> Tensor:
        order = sort_by_expert(expert, E)
        inner = silu_and_mul(grouped_gemm(permute(x, order), gate_up, order.counts_E))
        return unpermute(grouped_gemm(inner, down, order.counts_E), weight, order)

    def fused() -> Tensor:
        return fused_experts(x, expert, weight, gate_up, down)

    ours, theirs = medians([captured(fused), captured(grouped)], repeats=15)
    needed = len(expert.unique()) * 3 * 2 * D * F
    name = f"experts of {tokens} tokens"
    return _figure(name, ours, needed, bytes_s, peer="grouped GEMM", peer_ms=theirs)


def _figure(
    name: str,
    ms: float,
    needed: int,
    bytes_s: float,
    *,
    peer: str = "",
    peer_ms: float | None = None,
) -> Figure:
    return Figure(
        section="decode",
        name=name,
        ms=ms,
        rate=needed / ms / 1e9,
        unit="TB/s",
        floor_ms=needed / bytes_s * 1e3,
        peer=peer,
        peer_ms=peer_ms,
    )
