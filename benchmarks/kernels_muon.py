"""Muon on one GPU against torch.optim.Muon: whole steps, and Newton-Schulz alone.

Matrices are those of a GLM-5 layer: 192 blocks of heads (64 of W_UQ, 64 of W_UK, 64 of W_UV), the
attention layer around them with W_O whole, the gate, up and down projections of 16 experts.
torch.optim.Muon takes matrices one by one: with many small ones its time is that of launches, and
nothing is claimed of the ratio. `whole` peers have heads together: fewer and larger products, but
another optimizer. The peer that launches as seldom as we do is the same step with the definition's
products, batched by the library. Parameters, gradients and momenta are float32, products halves.

Newton-Schulz alone is measured as taken, and in the Gram form whether taken or not: that is what
`fused.pays` rests on, as `fused.HALF_FROM` rests on the products.

Rates count the operations of the plain form, 5 (4 M^2 N + 2 M^3) for every matrix, whatever is
executed; the floor is what the Gram form needs, by halves, at the rate of a large product.
"""

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

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
STEP = {"lr": 1e-3, "weight_decay": 0.1}


def figures() -> Iterator[Figure]:
    """A row that breaks is reported, and the next one is taken."""
    torch.manual_seed(0)
    rate = matmul_rate()
    rows: list[Callable[[], Iterator[Figure]]] = [
        partial(_steps, "192 blocks of heads", HEADS, rate),
        partial(_steps, "attention layer", HEADS | REST, rate, least_whole=1.3),
        partial(_steps, "attention layer, nothing split", _unsplit(HEADS | REST), rate),
        partial(_steps, "16 experts", EXPERTS, rate),
        *(partial(_alone, name, shape, rate) for name, shape in STACKS.items()),
        *(partial(_product, shape, rate) for shape in PRODUCTS),
    ]
    for row in rows:
        try:
            yield from row()
        except Exception:
            print(f"{row} broke off:", flush=True)
            traceback.print_exc(file=sys.stdout)
        torch.cuda.empty_cache()


def _unsplit(layer: Layer) -> Layer:
    return {name: (shape, None) for name, (shape, _) in layer.items()}


def _steps(
    name: str,
    layer: Layer,
    rate: float,
    *,
    least_whole: float | None = None,
) -> Iterator[Figure]:
    """Against the same blocks batched by the library, one by one and, where there are blocks,
    against whole matrices."""
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
    mine, library, same, *whole = medians(arms)
    shapes = [(len(many), *many[0].shape) for each in blocks for many in _alike(each)]
    figure = _figure(f"{name}, a step", mine, shapes, rate)
    yield replace(figure, peer="the definition, batched by the library", peer_ms=library)
    yield replace(figure, peer="torch.optim.Muon, one by one (launches)", peer_ms=same)
    for peer_ms in whole:
        against = replace(figure, peer="torch.optim.Muon on whole matrices", peer_ms=peer_ms)
        yield against if least_whole is None else at_least(against, ratio=least_whole)


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


def _alike(blocks: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
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
    """One step of both, which must lead to the same place; bfloat16 errs by about a hundredth."""
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
            apart = float((end - block.detach()).norm() / (end - begin).norm())
            assert apart < 0.05, f"{each.name} went elsewhere: {apart:.3f}"


def _alone(name: str, shape: Shape, rate: float) -> Iterator[Figure]:
    """Newton-Schulz against torch's on one matrix after the other; both forms of it."""
    B, *sides = shape
    update = torch.randn(shape, device="cuda")

    def ours() -> Tensor:
        return newton_schulz(update, dtype=torch.bfloat16)

    def gram() -> Tensor:
        return fused.newton_schulz(update, coefficients=JORDAN, steps=5, eps=1e-7)

    def by_definition() -> Tensor:
        return reference.newton_schulz(update, dtype=torch.bfloat16)

    def theirs() -> list[Tensor]:
        return [torch_zeropower(one, JORDAN[0], 5, 1e-7) for one in update]

    mine, fewer, definition, peer = medians([ours, gram, by_definition, theirs])
    name = f"{name}, {' x '.join(map(str, shape))}"
    figure = _figure(name, mine, [shape], rate)
    yield replace(figure, peer="torch, one by one", peer_ms=peer)
    form = "Gram form, taken" if fused.pays(B, *sorted(sides)) else "Gram form, not taken"
    figure = _figure(f"{name}: {form}", fewer, [shape], rate)
    yield replace(figure, peer="the definition, batched", peer_ms=definition)


def _product(shape: Shape, rate: float) -> Iterator[Figure]:
    """A symmetric product by halves against the library's; of square ones the polynomial too."""
    B, M, K = shape
    x = torch.randn(shape, device="cuda", dtype=torch.float16) / K**0.5
    triples = {"x x^T": None} | ({"I + x + x x^T": (1.0, 1.0, 1.0)} if M == K else {})
    needed = B * M * (M + 1) * K
    for name, triple in triples.items():
        arms = [partial(way, x, x, triple) for way in (fused.mirrored, fused.whole)]
        mine, library = medians(arms, repeats=15)
        yield Figure(
            section="muon",
            name=f"{name}, {' x '.join(map(str, shape))}",
            ms=mine,
            rate=needed / mine / 1e9,
            unit="TFLOP/s",
            floor_ms=needed / rate * 1e3,
            peer="torch.bmm" if triple is None else "torch.baddbmm and the diagonal",
            peer_ms=library,
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
