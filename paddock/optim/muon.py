"""Muon: momentum, orthogonalized block by block. Muon Split is a role whose rows are many blocks.

B matrices of M rows and N columns, all the same size, stepped together.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from paddock.kernels.newton_schulz import JORDAN, Coefficients, newton_schulz
from paddock.records import NamedParameter, ParameterRole

from .adamw import ADAM, AdamSettings, AdamW, adamw_step_, descend_, zeros_for
from .roles import RULES, Rule, block_rows

Scale = Literal["rms", "original"]

# The entries of an orthogonal [M, N] have RMS max(M, N)^-0.5. "rms" makes that 0.2, about what
# AdamW's steps have, so that one learning rate serves both (Moonlight; torch: "match_rms_adamw").
SCALES: dict[Scale, Callable[[int, int], float]] = {
    "rms": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
    "original": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonSettings:
    kinds: tuple[str, ...] = ("matrix",)  # the rest falls to AdamW
    momentum: float = 0.95  # Nesterov's
    coefficients: Coefficients = JORDAN
    steps: int = 5
    eps: float = 1e-7
    scale: Scale = "rms"
    dtype: torch.dtype | None = None  # of the products; None: see `product_dtype`
    stack_bytes: int = 1 << 30  # of matrices orthogonalized in one call


MUON = MuonSettings()


class Muon(AdamW):
    """Muon for the kinds of parameters in `muon.kinds`, AdamW for the others.

    Blocks of equal shape are orthogonalized together, whichever parameters they come from.
    """

    def __init__(
        self,
        roles: Iterable[NamedParameter],
        *,
        lr: float,
        weight_decay: float = 0.1,
        muon: MuonSettings = MUON,
        adam: AdamSettings = ADAM,
        rules: Mapping[str, Rule] = RULES,
    ) -> None:
        roles = list(roles)
        super().__init__(roles, lr=lr, weight_decay=weight_decay, adam=adam, rules=rules)
        self.muon = muon
        self._rows = {
            each.parameter: _rows_of(each) for each in roles if each.role.kind in muon.kinds
        }

    def _advance(self) -> None:
        blocks: list[Blocks] = []
        for parameter, group in self.with_gradient():
            if parameter in self._rows:
                lr, decay = group["lr"] * group["lr_scale"], group["weight_decay"]
                blocks += self._blocks(parameter, lr=lr, decay=decay)
            else:
                adamw_step_(parameter, self.state[parameter], group)
        for stack in stacks(blocks, self.muon.stack_bytes):
            advance_(stack, self.muon)

    def _blocks(self, parameter: Tensor, *, lr: float, decay: float) -> Iterator["Blocks"]:
        """Brings the momentum up to date; the parameter itself waits for its stack."""
        state = self.state[parameter]
        if not state:
            state["momentum"] = zeros_for(parameter)
        momentum, grad = state["momentum"], parameter.grad
        assert grad is not None
        # A running mean, not the running sum of the papers: the same direction, and no growth.
        momentum.lerp_(grad.to(momentum.dtype), 1 - self.muon.momentum)
        rows = self._rows[parameter]
        views = (cut(whole, rows) for whole in (parameter, grad.contiguous(), momentum))
        for parameter_BMN, grad_BMN, momentum_BMN in zip(*views, strict=True):
            yield Blocks(parameter_BMN, grad_BMN, momentum_BMN, lr, decay)


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Matrices of one shape from one parameter: views of it, its gradient and its momentum."""

    parameter_BMN: Tensor
    grad_BMN: Tensor
    momentum_BMN: Tensor
    lr: float
    decay: float

    def __len__(self) -> int:
        return len(self.momentum_BMN)

    def pieces(self, most: int) -> Iterator["Blocks"]:
        """The same matrices, at most so many at a time."""
        views = (self.parameter_BMN, self.grad_BMN, self.momentum_BMN)
        for parameter, grad, momentum in zip(*(view.split(most) for view in views), strict=True):
            yield Blocks(parameter, grad, momentum, self.lr, self.decay)


def stacks(blocks: Iterable[Blocks], stack_bytes: int) -> Iterator[list[Blocks]]:
    """Blocks that may share a call, as many at a time as fit in `stack_bytes`, but at least one."""
    alike: dict[tuple[object, ...], list[Blocks]] = defaultdict(list)
    for block in blocks:
        momentum_BMN = block.momentum_BMN
        alike[*momentum_BMN.shape[1:], momentum_BMN.dtype, momentum_BMN.device].append(block)
    for same in alike.values():
        most = max(1, stack_bytes // same[0].momentum_BMN[0].nbytes)
        stack: list[Blocks] = []
        for piece in (piece for block in same for piece in block.pieces(most)):
            if sum(map(len, stack)) + len(piece) > most:
                yield stack
                stack = []
            stack.append(piece)
        yield stack


def advance_(stack: list[Blocks], muon: MuonSettings) -> None:
    """One step for every block of a stack."""
    update_BMN = torch.cat(
        [
            block.grad_BMN.to(block.momentum_BMN.dtype).lerp(block.momentum_BMN, muon.momentum)
            for block in stack
        ]
    )
    direction_BMN = orthogonalize(update_BMN, muon)
    for block, direction in zip(stack, direction_BMN.split([*map(len, stack)]), strict=True):
        descend_(block.parameter_BMN, direction, lr=block.lr, decay=block.decay)


def orthogonalize_role(momentum: Tensor, role: ParameterRole, muon: MuonSettings = MUON) -> Tensor:
    """The step Muon takes for a parameter of this role; every block on its own."""
    rows = block_rows(role, tuple(momentum.shape))
    directions = [orthogonalize(block_BMN, muon) for block_BMN in cut(momentum, rows)]
    return torch.cat(directions, dim=1).view(momentum.shape)


def orthogonalize(update_BMN: Tensor, muon: MuonSettings) -> Tensor:
    """Singular values near one, times the scale that this shape asks for."""
    direction_BMN = newton_schulz(
        update_BMN,
        coefficients=muon.coefficients,
        steps=muon.steps,
        eps=muon.eps,
        dtype=muon.dtype or product_dtype(update_BMN),
    )
    return direction_BMN * SCALES[muon.scale](*update_BMN.shape[-2:])


def product_dtype(update: Tensor) -> torch.dtype:
    """bfloat16 on an accelerator; a CPU is no faster in it than in float32."""
    return torch.bfloat16 if update.device.type != "cpu" and update.itemsize < 8 else update.dtype


def cut(matrix: Tensor, rows: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Views [B, M, N], one per entry of `rows`, of a matrix or stack whose rows repeat them."""
    return matrix.view(-1, sum(rows), matrix.size(-1)).split(rows, dim=1)


def _rows_of(declared: NamedParameter) -> tuple[int, ...]:
    try:
        return block_rows(declared.role, tuple(declared.parameter.shape))
    except ValueError as error:
        raise ValueError(f"{declared.name}: {error}") from None
