"""How fast attention under a mask runs on this GPU, and whether other block sizes would be faster.

    python -m benchmarks.attention_blocks [--documents 8] [--tokens 4096] [--heads 16] [--dim 128]
        [--topk 1024] [--plans]

Random choices of keys, so that no tile can be left out. TFLOP/s count two products of the causal
half forward and five backward. PyTorch's own causal attention, which sees every key, is the peer.
`--plans` tries other block sizes, one kernel at a time, and marks those that are wrong.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from paddock.kernels.dense_attention import packed
from paddock.kernels.dense_attention.packed import KeyBlockMask, LaunchConfig
from paddock.kernels.spans import Span

OTHERS = {
    "forward": [(128, 64, 8, 3), (128, 128, 8, 3), (64, 64, 4, 3), (64, 64, 4, 5), (64, 128, 4, 3)],
    "queries": [(128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (64, 128, 4, 3)],
    "keys": [(64, 128, 8, 3), (64, 128, 8, 2), (32, 128, 8, 5), (64, 64, 4, 3), (32, 64, 4, 5)],
}


def milliseconds(call: Callable[[], object], repeats: int = 7) -> float:
    times = []
    for i in range(repeats + 2):
        start, stop = (torch.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.accelerator.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(stop))
    return statistics.median(times)


def chosen(documents: int, tokens: int, topk: int) -> Tensor:
    """Random keys for queries that see more than top-k, -1 for the others."""
    rows = []
    for document in range(documents):
        score_TS = torch.rand(tokens, tokens, device="cuda")
        score_TS.masked_fill_(torch.ones_like(score_TS, dtype=torch.bool).triu(1), -1.0)
        index_TK = score_TS.topk(topk, dim=1).indices.sort(1).values + document * tokens
        index_TK[:topk] = -1
        rows.append(index_TK.int())
    return torch.cat(rows)


@contextmanager
def planned(width: int, part: str, blocks: LaunchConfig) -> Iterator[None]:
    """One kernel cut another way, until the block ends."""
    most = next(most for most in packed.MASKED_LAUNCHES if width <= most)
    before = packed.MASKED_LAUNCHES[most]
    packed.MASKED_LAUNCHES[most] = replace(before, **{part: blocks})
    try:
        yield
    finally:
        packed.MASKED_LAUNCHES[most] = before


class Case:
    """One call, ready to be run forward or backward."""

    def __init__(self, spans: tuple[Span, ...], index_TK: Tensor, heads: int, dim: int) -> None:
        torch.manual_seed(0)
        self.spans, self.index_TK, self.scale = spans, index_TK, dim**-0.5
        T = len(index_TK)
        shape = (T, heads, dim)
        self.heads = [torch.randn(shape, device="cuda").bfloat16() for _ in range(3)]
        self.above_THV = torch.randn(shape, device="cuda").bfloat16()
        pairs = sum(span.keys * (span.keys + 1) / 2 for span in spans)
        self.flop = 4 * pairs * heads * dim
        self.kept = KeyBlockMask.of(index_TK, spans)

    def forward(self) -> Tensor:
        frame = packed._Frame(self.spans, self.scale)
        return packed._Attention.apply(*self.heads, self.kept, frame)  # type: ignore[no-any-return]

    def gradients(self) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in self.heads]
        frame = packed._Frame(self.spans, self.scale)
        out = packed._Attention.apply(*leaves, self.kept, frame)
        return [out.detach(), *torch.autograd.grad(out, leaves, self.above_THV)]

    def backward(self) -> Callable[[], object]:
        leaves = [x.detach().requires_grad_() for x in self.heads]
        frame = packed._Frame(self.spans, self.scale)
        out = packed._Attention.apply(*leaves, self.kept, frame)
        return lambda: torch.autograd.grad(out, leaves, self.above_THV, retain_graph=True)

    def rates(self) -> str:
        f, b = milliseconds(self.forward), milliseconds(self.backward())
        return (
            f"forward {f:6.2f} ms {self.flop / f / 1e9:5.0f} TFLOP/s   "
            f"backward {b:6.2f} ms {2.5 * self.flop / b / 1e9:5.0f} TFLOP/s"
        )


def print_peers(case: Case, documents: int) -> None:
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        batched = [x.unflatten(0, (documents, -1)).transpose(1, 2) for x in case.heads]
        leaves = [x.detach().requires_grad_() for x in batched]
        above = case.above_THV.unflatten(0, (documents, -1)).transpose(1, 2)
        try:
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(*leaves, is_causal=True, scale=case.scale)
                f = milliseconds(
                    lambda batched=batched: F.scaled_dot_product_attention(
                        *batched, is_causal=True, scale=case.scale
                    )
                )
                b = milliseconds(
                    lambda out=out, leaves=leaves, above=above: torch.autograd.grad(
                        out, leaves, above, retain_graph=True
                    )
                )
        except RuntimeError as error:
            print(f"{backend.name:28}{str(error)[:80]}")
            continue
        print(
            f"{backend.name + ', every key':28}forward {f:6.2f} ms {case.flop / f / 1e9:5.0f}"
            f" TFLOP/s   backward {b:6.2f} ms {2.5 * case.flop / b / 1e9:5.0f} TFLOP/s"
        )


def print_plans(case: Case, dim: int) -> None:
    expected = case.gradients()
    for part, others in OTHERS.items():
        for blocks in (LaunchConfig(*other) for other in others):
            try:
                with planned(dim, part, blocks):
                    found = case.gradients()
                    near = max(
                        float((a - b).float().norm() / b.float().norm())
                        for a, b in zip(found, expected, strict=True)
                    )
                    said = case.rates() + ("" if near < 1e-2 else f"   WRONG by {near:.1e}")
            except Exception as error:  # block sizes that do not fit are an answer too
                said = f"{error!r}"[:100]
            print(f"{part:9}{tuple(blocks)!s:19}{said}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--topk", type=int, default=1024)
    parser.add_argument("--plans", action="store_true")
    options = parser.parse_args()
    count, length = options.documents, options.tokens
    spans = tuple(Span(i * length, length, i * length, length) for i in range(count))
    index_TK = chosen(count, length, options.topk)
    case = Case(spans, index_TK, options.heads, options.dim)
    print(
        f"{'the mask':28}{milliseconds(lambda: KeyBlockMask.of(index_TK, spans)):.2f} ms to build"
    )
    print(f"{'from the keys':28}{milliseconds(lambda: case.kept.turned(spans)):.2f} ms to turn")
    print(f"{'under a mask, as planned':28}{case.rates()}", flush=True)
    print_peers(case, count)
    if options.plans:
        print_plans(case, options.dim)


if __name__ == "__main__":
    main()
