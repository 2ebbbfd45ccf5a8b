"""Muon on one GPU against torch.optim.Muon: whole steps, and Newton-Schulz alone.

Matrices are those of a GLM-5 layer: 192 blocks of heads (64 of W_UQ, 64 of W_UK, 64 of W_UV), the
attention layer around them with W_O unsplit, the gate, up and down projections of 16 experts.
torch.optim.Muon processes matrices one by one: with many small ones launches dominate its time, and
the ratio has no target. The whole-matrix baseline does not split heads: fewer and larger products,
but another optimizer. The baseline with as few launches as ours is the same step with the reference
Newton-Schulz, batched by torch. Parameters, gradients and momenta are float32, products 16 bit.

Newton-Schulz alone is measured as dispatched, and in the Gram form whether used or not:
`fused.pays` is based on these measurements, `fused.HALF_FROM` on those of the products.

Rates count the FLOPs of the plain form, 5 (4 M^2 N + 2 M^3) for every matrix, whatever is executed;
the floor is the Gram form with symmetric products, at the rate of a large matrix product.
"""

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz as torch_zeropower

from benchmarks.kernels import Figure, at_least, matmul_rate, medians
from paddock.kernels.dispatch import disable_kernels
from paddock.kernels.newton_schulz import JORDAN, fused, newton_schulz, reference
from paddock.optim import Muon
from paddock.optim.muon import split_row_blocks
from paddock.optim.param_groups import block_rows
from paddock.records import NamedParameter, ParameterRole
from paddock.records.parameter import MuonSplit

Shape = tuple[int, ...]
Layer = dict[str, tuple[Shape, MuonSplit | None]]

HEADS: Layer = {
    "q_b": ((64 * 256, 2048), MuonSplit(heads=64, rows=(256,))),
    "kv_b": ((64 * (192 + 256), 512), MuonSplit(heads=64, rows=(192, 256))),
}
REST: Layer = {
    "q_a": ((2048, 6144), None),
    "kv_a": ((576, 6144), None),
    "o": ((6144, 16384), None),
}
EXPERTS: Layer = {
    "gate_up": ((16, 2 * 2048, 6144), MuonSplit(rows=(2048, 2048))),
    "down": ((16, 6144, 2048), None),
}
STACKS: dict[str, Shape] = {
    "query heads": (64, 256, 2048),
    "key heads": (64, 192, 512),
    "value heads": (64, 256, 512),
    "o whole": (1, 6144, 16384),
    "o by head": (64, 256, 6144),
    "q_a": (1, 2048, 6144),
    "kv_a": (1, 576, 6144),
    "16 x gate": (16, 2048, 6144),
    "16 x down": (16, 6144, 2048),
}
PRODUCTS: tuple[Shape, ...] = (
    (16, 2048, 2048),
    (1, 4096, 4096),
    (4, 4096, 4096),
    (1, 6144, 6144),
    (1, 6144, 16384),
)
STEP: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}


def figures() -> Iterator[Figure]:
    """A row that fails is reported, and the next one runs."""
    torch.manual_seed(0)
    rate = matmul_rate()
    rows: list[Callable[[], Iterator[Figure]]] = [
        partial(_steps, "192 blocks of heads", HEADS, rate),
        partial(_steps, "attention layer", HEADS | REST, rate, min_ratio=1.3),
        partial(_steps, "attention layer, nothing split", _unsplit(HEADS | REST), rate),
        partial(_steps, "16 experts", EXPERTS, rate),
        *(partial(_alone, name, shape, rate) for name, shape in STACKS.items()),
        *(partial(_product, shape, rate) for shape in PRODUCTS),
    ]
    for row in rows:
        try:
            yield from row()
        except Exception:
            print(f"{row} failed:", flush=True)
            traceback.print_exc(file=sys.stdout)
        torch.cuda.empty_cache()


def _unsplit(layer: Layer) -> Layer:
    return {name: (shape, None) for name, (shape, _) in layer.items()}


def _steps(
    name: str,
    layer: Layer,
    rate: float,
    *,
    min_ratio: float | None = None,
) -> Iterator[Figure]:
    """Against the same blocks batched by torch, one by one and, if split, as whole matrices."""
    named = [
        NamedParameter(key, _parameter(shape), ParameterRole("matrix", split))
        for key, (shape, split) in layer.items()
    ]
    blocks = [list(_blocks(each)) for each in named]
    ours = Muon(named, **STEP)
    theirs = _torch([block for many in blocks for block in many])
    _compare(ours, theirs, named, blocks)

    def batched() -> None:
        with disable_kernels("newton_schulz"):
            ours.step()

    arms = [ours.step, batched, theirs.step]
    is_split = any(split for _, split in layer.values())
    if is_split and all(each.parameter.ndim == 2 for each in named):
        arms.append(_torch([_parameter(shape) for shape, _ in layer.values()]).step)
    ours_ms, batched_ms, separate_ms, *whole_ms = medians(arms)
    shapes = [(len(many), *many[0].shape) for each in blocks for many in _by_shape(each)]
    figure = _figure(f"{name}, a step", ours_ms, shapes, rate)
    yield replace(figure, peer="the reference, batched", peer_ms=batched_ms)
    yield replace(figure, peer="torch.optim.Muon, one by one (launches)", peer_ms=separate_ms)
    for peer_ms in whole_ms:
        against = replace(figure, peer="torch.optim.Muon on whole matrices", peer_ms=peer_ms)
        yield against if min_ratio is None else at_least(against, ratio=min_ratio)


def _parameter(shape: Shape) -> nn.Parameter:
    made = nn.Parameter(0.02 * torch.randn(shape, device="cuda"))
    made.grad = torch.randn(shape, device="cuda")
    return made


def _blocks(named: NamedParameter) -> Iterator[nn.Parameter]:
    """Copies of the blocks of a parameter and of their gradients, in the order of its rows."""
    rows = block_rows(named.role, tuple(named.parameter.shape))
    assert named.parameter.grad is not None
    both = (split_row_blocks(x, rows) for x in (named.parameter.detach(), named.parameter.grad))
    for values, grads in zip(*both, strict=True):
        for value, grad in zip(values, grads, strict=True):
            made = nn.Parameter(value.clone())
            made.grad = grad.clone()
            yield made


def _by_shape(blocks: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    for shape in dict.fromkeys(block.shape for block in blocks):
        yield [block for block in blocks if block.shape == shape]


def _torch(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, **STEP, adjust_lr_fn="match_rms_adamw")


def _compare(
    ours: Muon,
    theirs: torch.optim.Optimizer,
    named: Sequence[NamedParameter],
    blocks: Sequence[Sequence[nn.Parameter]],
) -> None:
    """One step of both must give the same update; bfloat16 has an error of about 1 %."""
    before = [each.parameter.detach().clone() for each in named]
    ours.step()
    theirs.step()
    for each, start, many in zip(named, before, blocks, strict=True):
        rows = block_rows(each.role, tuple(each.parameter.shape))
        ends, starts = (
            split_row_blocks(each.parameter.detach(), rows),
            split_row_blocks(start, rows),
        )
        pairs = [both for two in zip(ends, starts, strict=True) for both in zip(*two, strict=True)]
        for (end, begin), block in zip(pairs, many, strict=True):
            error = float((end - block.detach()).norm() / (end - begin).norm())
            assert error < 0.05, f"{each.name}: the updates differ by {error:.3f}"


def _alone(name: str, shape: Shape, rate: float) -> Iterator[Figure]:
    """Newton-Schulz as dispatched and in the Gram form, against torch's one matrix at a time."""
    B, *sides = shape
    update = torch.randn(shape, device="cuda")

    def ours() -> Tensor:
        return newton_schulz(update, dtype=torch.bfloat16)

    def gram() -> Tensor:
        return fused.newton_schulz(update, coefficients=JORDAN, steps=5, eps=1e-7)

    def by_reference() -> Tensor:
        return reference.newton_schulz(update, dtype=torch.bfloat16)

    def theirs() -> list[Tensor]:
        return [torch_zeropower(one, JORDAN[0], 5, 1e-7) for one in update]

    ours_ms, gram_ms, reference_ms, peer_ms = medians([ours, gram, by_reference, theirs])
    name = f"{name}, {' x '.join(map(str, shape))}"
    figure = _figure(name, ours_ms, [shape], rate)
    yield replace(figure, peer="torch, one by one", peer_ms=peer_ms)
    form = "Gram form, used" if fused.pays(B, *sorted(sides)) else "Gram form, not used"
    figure = _figure(f"{name}: {form}", gram_ms, [shape], rate)
    yield replace(figure, peer="the reference, batched", peer_ms=reference_ms)


def _product(shape: Shape, rate: float) -> Iterator[Figure]:
    """A symmetric product that computes one half, against torch's; square ones with polynomial."""
    B, M, K = shape
    x = torch.randn(shape, device="cuda", dtype=torch.float16) / K**0.5
    triples = {"x x^T": None} | ({"I + x + x x^T": (1.0, 1.0, 1.0)} if M == K else {})
    needed = B * M * (M + 1) * K
    for name, triple in triples.items():
        arms = [partial(product, x, x, triple) for product in (fused.mirrored, fused.whole)]
        ours_ms, torch_ms = medians(arms, repeats=15)
        yield Figure(
            section="muon",
            name=f"{name}, {' x '.join(map(str, shape))}",
            ms=ours_ms,
            rate=needed / ours_ms / 1e9,
            unit="TFLOP/s",
            floor_ms=needed / rate * 1e3,
            peer="torch.bmm" if triple is None else "torch.baddbmm and the diagonal",
            peer_ms=torch_ms,
        )


def _figure(name: str, ms: float, shapes: Sequence[Shape], rate: float) -> Figure:
    plain = executed = 0
    for B, *sides in shapes:
        M, N = min(sides), max(sides)
        plain += 5 * B * (4 * M * M * N + 2 * M**3)
        executed += B * (6 * M * M * N + 14 * M**3)
    return Figure(
        section="muon",
        name=name,
        ms=ms,
        rate=plain / ms / 1e9,
        unit="TFLOP/s",
        floor_ms=executed / rate * 1e3,
    )
