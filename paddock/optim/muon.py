"""Muon: momentum, orthogonalized block by block. Muon Split is a role whose rows are many blocks.

A matrix whose rows are sharded over ranks is orthogonalized whole on one of them, its owner, and
dealt out again; a stack is sharded between its matrices and stays where it is.

B matrices of M rows and N columns, all the same size, stepped together.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor

from paddock.kernels.newton_schulz import JORDAN, Coefficients, newton_schulz
from paddock.parallel import OptimizerOwners, is_row_sharded, to_local
from paddock.records import NamedParameter, ParameterRole

from .adamw import ADAM_DEFAULTS, AdamSettings, AdamW, adamw_steps_, apply_update_, init_state
from .param_groups import PARAM_GROUP_OPTIONS, ParamGroupOptions, block_rows

UpdateScale = Literal["rms", "original"]

# The entries of an orthogonal [M, N] have RMS max(M, N)^-0.5. "rms" makes that 0.2, about what
# AdamW's steps have, so that one learning rate serves both (Moonlight; torch: "match_rms_adamw").
UPDATE_SCALES: dict[UpdateScale, Callable[[int, int], float]] = {
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
    scale: UpdateScale = "rms"
    dtype: torch.dtype | None = None  # of the products; None: see `product_dtype`
    stack_bytes: int = 1 << 30  # of matrices orthogonalized in one call


MUON_DEFAULTS = MuonSettings()


class Muon(AdamW):
    """Muon for the kinds of parameters in `muon.kinds`, AdamW for the others.

    Blocks of equal shape are orthogonalized together, whichever parameters they come from. Each
    rank orthogonalizes what it holds whole and what it owns of the rest.
    """

    def __init__(
        self,
        roles: Iterable[NamedParameter],
        *,
        lr: float,
        weight_decay: float = 0.1,
        muon: MuonSettings = MUON_DEFAULTS,
        adam: AdamSettings = ADAM_DEFAULTS,
        rules: Mapping[str, ParamGroupOptions] = PARAM_GROUP_OPTIONS,
    ) -> None:
        roles = list(roles)
        super().__init__(roles, lr=lr, weight_decay=weight_decay, adam=adam, rules=rules)
        self.muon = muon
        self._rows = {
            each.parameter: _rows_of(each) for each in roles if each.role.kind in muon.kinds
        }

    def _advance(self) -> None:
        blocks: list[MatrixBatch] = []
        shared: list[tuple[Tensor, dict[str, Any]]] = []
        plain: list[tuple[Tensor, dict[str, Any], dict[str, Any]]] = []
        for parameter, group in self.params_with_grad():
            if parameter not in self._rows:
                plain.append((parameter, self.state[parameter], group))
            elif is_row_sharded(parameter):
                shared.append((parameter, group))
            else:
                blocks += self._blocks(parameter, group)
        adamw_steps_(plain)
        for stack in batch_by_shape(blocks, self.muon.stack_bytes):
            muon_step_(stack, self.muon)
        if shared:
            self._advance_shared(shared)

    def _blocks(self, parameter: Tensor, group: Mapping[str, Any]) -> Iterator["LocalMatrixBatch"]:
        """The parameter itself waits for its stack."""
        grad, momentum = self._up_to_date(parameter)
        rows, (lr, decay) = self._rows[parameter], lr_and_weight_decay(group)
        views = (
            split_row_blocks(whole, rows)
            for whole in (to_local(parameter), grad.contiguous(), momentum)
        )
        for parameter_BMN, grad_BMN, momentum_BMN in zip(*views, strict=True):
            yield LocalMatrixBatch(parameter_BMN, grad_BMN, momentum_BMN, lr, decay)

    def _advance_shared(self, shared: list[tuple[Tensor, dict[str, Any]]]) -> None:
        """Gather every matrix's update on its owner, orthogonalize there, deal the rows out."""
        matrices = [parameter for parameter, _ in shared]
        rows = []
        for matrix in matrices:
            grad, momentum = self._up_to_date(matrix)
            rows.append(grad.to(momentum.dtype).lerp(momentum, self.muon.momentum))
        owners = OptimizerOwners(
            matrices, [orthogonalization_cost(m.shape, self._rows[m]) for m in matrices]
        )
        whole = owners.gather(rows)
        blocks = [
            GatheredMatrixBatch(update_BMN)
            for i, matrix in zip(owners.local_indices, whole, strict=True)
            for update_BMN in split_row_blocks(matrix, self._rows[matrices[i]])
        ]
        for stack in batch_by_shape(blocks, self.muon.stack_bytes):
            muon_step_(stack, self.muon)
        owners.scatter(whole, rows)
        for (parameter, group), direction in zip(shared, rows, strict=True):
            lr, decay = lr_and_weight_decay(group)
            apply_update_(to_local(parameter), direction, lr=lr, decay=decay)

    def _up_to_date(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient and new momentum, of a sharded parameter what is held here."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum"] = init_state(to_local(parameter))
        grad, momentum = to_local(parameter.grad), state["momentum"]
        # A running mean, not the running sum of the papers: the same direction, and no growth.
        momentum.lerp_(grad.to(momentum.dtype), 1 - self.muon.momentum)
        return grad, momentum


class MatrixBatch(Protocol):
    """Matrices of one shape that can be orthogonalized together with others."""

    @property
    def like_BMN(self) -> Tensor:
        """Of the update's shape, dtype and device."""

    def update(self, momentum: float) -> Tensor:
        """What to orthogonalize, [B, M, N]."""

    def apply(self, direction_BMN: Tensor) -> None:
        """Make use of the orthogonalized update."""

    def split(self, most: int) -> Iterator[Self]:
        """The same matrices, at most so many at a time."""

    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class LocalMatrixBatch:
    """Matrices from one parameter: views of it, its gradient and its momentum."""

    parameter_BMN: Tensor
    grad_BMN: Tensor
    momentum_BMN: Tensor
    lr: float
    decay: float

    def __len__(self) -> int:
        return len(self.momentum_BMN)

    @property
    def like_BMN(self) -> Tensor:
        return self.momentum_BMN

    def update(self, momentum: float) -> Tensor:
        return self.grad_BMN.to(self.momentum_BMN.dtype).lerp(self.momentum_BMN, momentum)

    def apply(self, direction_BMN: Tensor) -> None:
        apply_update_(self.parameter_BMN, direction_BMN, lr=self.lr, decay=self.decay)

    def split(self, most: int) -> Iterator["LocalMatrixBatch"]:
        views = (self.parameter_BMN, self.grad_BMN, self.momentum_BMN)
        for parameter, grad, momentum in zip(*(view.split(most) for view in views), strict=True):
            yield LocalMatrixBatch(parameter, grad, momentum, self.lr, self.decay)


@dataclass(frozen=True, slots=True, eq=False)
class GatheredMatrixBatch:
    """Updates of matrices whose parameters lie elsewhere, replaced by their directions."""

    like_BMN: Tensor

    def __len__(self) -> int:
        return len(self.like_BMN)

    def update(self, momentum: float) -> Tensor:  # noqa: ARG002
        return self.like_BMN

    def apply(self, direction_BMN: Tensor) -> None:
        self.like_BMN.copy_(direction_BMN)

    def split(self, most: int) -> Iterator["GatheredMatrixBatch"]:
        return map(GatheredMatrixBatch, self.like_BMN.split(most))


def batch_by_shape(blocks: Iterable[MatrixBatch], stack_bytes: int) -> Iterator[list[MatrixBatch]]:
    """Blocks that may share a call, as many at a time as fit in `stack_bytes`, but at least one."""
    alike: dict[tuple[object, ...], list[MatrixBatch]] = defaultdict(list)
    for block in blocks:
        like_BMN = block.like_BMN
        if len(like_BMN):  # the last shards of a stack may be empty
            alike[*like_BMN.shape[1:], like_BMN.dtype, like_BMN.device].append(block)
    for same in alike.values():
        most = max(1, stack_bytes // same[0].like_BMN[0].nbytes)
        stack: list[MatrixBatch] = []
        for piece in (piece for block in same for piece in block.split(most)):
            if sum(map(len, stack)) + len(piece) > most:
                yield stack
                stack = []
            stack.append(piece)
        yield stack


def muon_step_(stack: list[MatrixBatch], muon: MuonSettings) -> None:
    """One step for every block of a stack."""
    updates = [block.update(muon.momentum) for block in stack]
    update_BMN = torch.cat(updates) if len(updates) > 1 else updates[0]  # cat copies even one
    direction_BMN = orthogonalize(update_BMN, muon)
    for block, direction in zip(stack, direction_BMN.split([*map(len, stack)]), strict=True):
        block.apply(direction)


def lr_and_weight_decay(group: Mapping[str, Any]) -> tuple[float, float]:
    """Learning rate and weight decay."""
    return group["lr"] * group["lr_scale"], group["weight_decay"]


def orthogonalization_cost(shape: Sequence[int], rows: tuple[int, ...]) -> float:
    """Of orthogonalizing a matrix in blocks of these heights, in no particular unit."""
    columns = shape[-1]
    each = sum(min(height, columns) ** 2 * max(height, columns) for height in rows)
    return shape[-2] / sum(rows) * each


def orthogonalize_role(
    momentum: Tensor, role: ParameterRole, muon: MuonSettings = MUON_DEFAULTS
) -> Tensor:
    """The step Muon takes for a parameter of this role; every block on its own."""
    rows = block_rows(role, tuple(momentum.shape))
    directions = [orthogonalize(block_BMN, muon) for block_BMN in split_row_blocks(momentum, rows)]
    return torch.cat(directions, dim=1).view(momentum.shape)


def orthogonalize(update_BMN: Tensor, muon: MuonSettings) -> Tensor:
    """Singular values near one, times the scale that this shape asks for."""
    direction_BMN = newton_schulz(
        update_BMN,
        coefficients=muon.coefficients,
        steps=muon.steps,
        eps=muon.eps,
        dtype=muon.dtype or matmul_dtype(update_BMN),
    )
    return direction_BMN * UPDATE_SCALES[muon.scale](*update_BMN.shape[-2:])


def matmul_dtype(update: Tensor) -> torch.dtype:
    """bfloat16 on an accelerator; a CPU is no faster in it than in float32."""
    return torch.bfloat16 if update.device.type != "cpu" and update.itemsize < 8 else update.dtype


def split_row_blocks(matrix: Tensor, rows: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Views [B, M, N], one per entry of `rows`, of a matrix or stack whose rows repeat them."""
    return matrix.view(-1, sum(rows), matrix.size(-1)).split(rows, dim=1)


def _rows_of(declared: NamedParameter) -> tuple[int, ...]:
    try:
        return block_rows(declared.role, tuple(declared.parameter.shape))
    except ValueError as error:
        raise ValueError(f"{declared.name}: {error}") from None
