"""Matrices to orthogonalize, and the Gram form's results in float16 in Triton's interpreter.

TRITON_INTERPRET=1 python -m tests.kernels.newton_schulz_cases FILE
"""

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from paddock.kernels.newton_schulz import JORDAN, XTUNER, reference

COEFFICIENTS = {"jordan": JORDAN, "tight": XTUNER}


def _values(kind: str, count: int) -> Tensor:
    """Singular values, the largest first."""
    if kind == "one loud":
        return torch.full((count,), 0.01).index_fill_(0, torch.tensor([0]), 1.0)
    if kind == "harmonic":
        return 1.0 / torch.arange(1, count + 1)
    return torch.logspace(0, {"hundredfold": -2, "thousandfold": -3, "sinking": -5}[kind], count)


def matrix(kind: str, rows: int, columns: int, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    if kind == "noise":
        return normal(rows, columns)
    if kind == "one loud entry":  # the others are near float16's smallest numbers
        quiet = 1e-4 * normal(rows, columns) / max(rows, columns) ** 0.5
        return quiet.index_put_((torch.tensor(0), torch.tensor(0)), torch.tensor(1.0))
    if kind == "few directions":
        rank = max(1, min(rows, columns) // 16)
        few = normal(rows, rank) @ normal(rank, columns) / rank**0.5
        return few + 0.01 * normal(rows, columns)
    count = min(rows, columns)
    left, right = torch.linalg.qr(normal(rows, count)).Q, torch.linalg.qr(normal(columns, count)).Q
    return left * _values(kind, count) @ right.T


KINDS = (
    "noise", "few directions", "one loud", "one loud entry", "harmonic", "hundredfold",
    "thousandfold", "sinking",
)  # fmt: skip


def singular_values(matrix: Tensor) -> Tensor:
    """Those of the shorter side, to the few digits that a Gram matrix in float64 keeps."""
    wide = matrix.double() if matrix.size(0) <= matrix.size(1) else matrix.double().mT
    return torch.linalg.eigvalsh(wide @ wide.mT).clamp(min=0).sqrt()


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@dataclass(frozen=True)
class Product:
    """Factors are neither symmetric nor commute, so the upper triangle must not matter."""

    matrices: int
    rows: int
    depth: int  # equal to rows: of square matrices
    tall: bool = False  # in memory
    triple: tuple[float, float, float] | None = None

    def factors(self) -> tuple[Tensor, Tensor]:
        rng = torch.Generator().manual_seed(0)
        shape = (self.matrices, self.rows, self.depth)
        if self.tall:
            shape = (self.matrices, self.depth, self.rows)
        left, right = (torch.randn(shape, generator=rng) for _ in range(2))
        return (left.mT, right.mT) if self.tall else (left, right)

    def exact(self) -> Tensor:
        left, right = (x.double() for x in self.factors())
        whole = left @ right.mT
        if self.triple:
            a, b, c = self.triple
            whole = c * whole + b * right + a * torch.eye(self.rows, dtype=torch.float64)
        below = whole.tril()
        return below + below.tril(-1).mT


PRODUCTS = {
    "tiles that end with the matrix": Product(2, 256, 128),
    "tiles that reach beyond": Product(2, 300, 70),
    "a last step that reaches beyond": Product(2, 256, 70),
    "tall in memory, a last step that reaches beyond": Product(2, 128, 33, tall=True),
    "a single tile": Product(3, 40, 200),
    "many tiles that reach beyond": Product(2, 650, 33),
    "tall in memory": Product(2, 256, 192, tall=True),
    "tall in memory, tiles that reach beyond": Product(2, 300, 37, tall=True),
    "a polynomial": Product(2, 256, 256, triple=(3.0, -4.0, 0.5)),
    "a polynomial, tiles that reach beyond": Product(1, 270, 270, triple=(1.0, 2, 3)),
}


@dataclass(frozen=True)
class Stack:
    shape: tuple[int, ...]
    coefficients: str = "jordan"
    steps: int = 5

    @property
    def how(self) -> dict:
        found = {"coefficients": COEFFICIENTS[self.coefficients], "steps": self.steps}
        return found | {"eps": 1e-7}

    def update(self) -> Tensor:
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(0))

    def exact(self) -> Tensor:
        return reference.newton_schulz(self.update().double(), **self.how)


STACKS = {
    "wide": Stack((2, 70, 150)),
    "tall": Stack((2, 150, 70), "tight"),
    "square": Stack((130, 130)),
    "several leading dims": Stack((2, 1, 3, 20, 33), "tight"),
    **{f"{steps} steps": Stack((2, 40, 60), "tight", steps) for steps in (1, 2, 3, 4, 7)},
}
# Shape of the matrices rounded to float16, one of each spectrum: shorter and longer side.
ROUNDED = (100, 300)


def main() -> None:
    from paddock.kernels.newton_schulz import fused

    # Entries not written are NaN.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(1).new_empty(3).isnan().all()
    fused.HALF_FROM = 1
    found: dict[tuple[str, ...], Tensor] = {}
    for name, case in PRODUCTS.items():
        found["product", name] = fused.product(*case.factors(), case.triple)
    for name, stack in STACKS.items():
        exactly = fused.newton_schulz(stack.update(), **stack.how, dtype=torch.float32)
        found["stack", name] = exactly
    for kind in KINDS:
        update = matrix(kind, *ROUNDED)
        for name, triples in COEFFICIENTS.items():
            rounded = fused.newton_schulz(update, coefficients=triples, steps=5, eps=1e-7)
            found["rounded", kind, name] = rounded
    found["nothing",] = fused.newton_schulz(torch.zeros(2, 20, 30), **STACKS["wide"].how)
    torch.save(found, sys.argv[1])


if __name__ == "__main__":
    main()
