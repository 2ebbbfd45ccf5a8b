"""Top-k masked attention on this GPU: TFLOP/s, and whether other block sizes would be faster.

    python -m benchmarks.attention_blocks [--documents 8] [--tokens 4096] [--heads 16] [--dim 128]
        [--topk 1024] [--block-sizes]

Selected keys are random, so that no tile can be skipped. TFLOP/s count two products of the causal
half forward and five backward. The baseline is PyTorch's causal attention to every key.
`--block-sizes` tries other block sizes, one kernel at a time, and marks wrong results.
"""

import argparse
import statistics
import sys
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


def random_topk(documents: int, tokens: int, topk: int) -> Tensor:
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
def launch_config(width: int, part: str, blocks: LaunchConfig) -> Iterator[None]:
    """One kernel with other block sizes, until the block ends."""
    max_width = next(each for each in packed.MASKED_LAUNCHES if width <= each)
    before = packed.MASKED_LAUNCHES[max_width]
    packed.MASKED_LAUNCHES[max_width] = replace(before, **{part: blocks})
    try:
        yield
    finally:
        packed.MASKED_LAUNCHES[max_width] = before


class Case:
    """Inputs of one call, for forward and backward."""

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


def print_baselines(case: Case, documents: int) -> None:
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
            f"{backend.name + ', dense':28}forward {f:6.2f} ms {case.flop / f / 1e9:5.0f}"
            f" TFLOP/s   backward {b:6.2f} ms {2.5 * case.flop / b / 1e9:5.0f} TFLOP/s"
        )


def print_block_sizes(case: Case, dim: int) -> None:
    expected = case.gradients()
    for part, others in OTHERS.items():
        for blocks in (LaunchConfig(*other) for other in others):
            try:
                with launch_config(dim, part, blocks):
                    found = case.gradients()
                    error = max(
                        float((a - b).float().norm() / b.float().norm())
                        for a, b in zip(found, expected, strict=True)
                    )
                    text = case.rates() + ("" if error < 1e-2 else f"   WRONG by {error:.1e}")
            except Exception as exception:  # for example block sizes that do not fit
                text = f"{exception!r}"[:100]
            print(f"{part:9}{tuple(blocks)!s:19}{text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--topk", type=int, default=1024)
    parser.add_argument("--block-sizes", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    count, length = options.documents, options.tokens
    spans = tuple(Span(i * length, length, i * length, length) for i in range(count))
    index_TK = random_topk(count, length, options.topk)
    case = Case(spans, index_TK, options.heads, options.dim)
    print(f"{'mask':28}{milliseconds(lambda: KeyBlockMask.of(index_TK, spans)):.2f} ms to build")
    print(f"{'transposed mask':28}{milliseconds(lambda: case.kept.turned(spans)):.2f} ms to build")
    print(f"{'top-k masked':28}{case.rates()}", flush=True)
    print_baselines(case, count)
    if options.block_sizes:
        print_block_sizes(case, options.dim)


if __name__ == "__main__":
    main()
