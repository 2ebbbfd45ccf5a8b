"""Muon: orthogonalized momentum for matrices. With Muon Split a matrix is split into row blocks.

A matrix whose rows are sharded over ranks is gathered on one of them, its owner, orthogonalized and
scattered again; a stack of experts is sharded between its matrices and needs no communication.

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
    kinds: tuple[str, ...] = ("matrix",)  # other kinds use AdamW
    momentum: float = 0.95  # Nesterov
    coefficients: Coefficients = JORDAN
    steps: int = 5
    eps: float = 1e-7
    scale: UpdateScale = "rms"
    dtype: torch.dtype | None = None  # of the Newton-Schulz products; None: see `matmul_dtype`
    stack_bytes: int = 1 << 30  # maximal size of the matrices orthogonalized in one call


MUON_DEFAULTS = MuonSettings()


class Muon(AdamW):
    """Muon for the kinds of parameters in `muon.kinds`, AdamW for the others.

    Blocks of equal shape are orthogonalized in one batch, across parameters. Each rank
    orthogonalizes the matrices it holds whole and those row-sharded ones that it owns.
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
            each.parameter: _named_block_rows(each)
            for each in roles
            if each.role.kind in muon.kinds
        }

    def _advance(self) -> None:
        blocks: list[MatrixBatch] = []
        sharded: list[tuple[Tensor, dict[str, Any]]] = []
        adamw_entries: list[tuple[Tensor, dict[str, Any], dict[str, Any]]] = []
        for parameter, group in self.params_with_grad():
            if parameter not in self._rows:
                adamw_entries.append((parameter, self.state[parameter], group))
            elif is_row_sharded(parameter):
                sharded.append((parameter, group))
            else:
                blocks += self._row_blocks(parameter, group)
        adamw_steps_(adamw_entries)
        for stack in batch_by_shape(blocks, self.muon.stack_bytes):
            muon_step_(stack, self.muon)
        if sharded:
            self._advance_sharded(sharded)

    def _row_blocks(
        self, parameter: Tensor, group: Mapping[str, Any]
    ) -> Iterator["LocalMatrixBatch"]:
        """Row blocks of one parameter, to be batched with others of the same shape."""
        grad, momentum = self._update_momentum(parameter)
        rows, (lr, decay) = self._rows[parameter], lr_and_weight_decay(group)
        views = (
            split_row_blocks(matrix, rows)
            for matrix in (to_local(parameter), grad.contiguous(), momentum)
        )
        for parameter_BMN, grad_BMN, momentum_BMN in zip(*views, strict=True):
            yield LocalMatrixBatch(parameter_BMN, grad_BMN, momentum_BMN, lr, decay)

    def _advance_sharded(self, sharded: list[tuple[Tensor, dict[str, Any]]]) -> None:
        """Gather each matrix's update on its owner, orthogonalize there, scatter the rows."""
        matrices = [parameter for parameter, _ in sharded]
        rows = []
        for matrix in matrices:
            grad, momentum = self._update_momentum(matrix)
            rows.append(grad.to(momentum.dtype).lerp(momentum, self.muon.momentum))
        owners = OptimizerOwners(
            matrices, [orthogonalization_cost(m.shape, self._rows[m]) for m in matrices]
        )
        owned = owners.gather(rows)
        blocks = [
            GatheredMatrixBatch(update_BMN)
            for i, matrix in zip(owners.local_indices, owned, strict=True)
            for update_BMN in split_row_blocks(matrix, self._rows[matrices[i]])
        ]
        for stack in batch_by_shape(blocks, self.muon.stack_bytes):
            muon_step_(stack, self.muon)
        owners.scatter(owned, rows)
        for (parameter, group), direction in zip(sharded, rows, strict=True):
            lr, decay = lr_and_weight_decay(group)
            apply_update_(to_local(parameter), direction, lr=lr, decay=decay)

    def _update_momentum(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient and updated momentum, the local shard of a sharded parameter."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum"] = init_state(to_local(parameter))
        grad, momentum = to_local(parameter.grad), state["momentum"]
        # A running mean instead of the papers' running sum: same direction, bounded magnitude.
        momentum.lerp_(grad.to(momentum.dtype), 1 - self.muon.momentum)
        return grad, momentum


class MatrixBatch(Protocol):
    """Matrices of one shape that can be orthogonalized in a batch with others."""

    @property
    def like_BMN(self) -> Tensor:
        """A tensor with the shape, dtype and device of the update."""

    def update(self, momentum: float) -> Tensor:
        """What to orthogonalize, [B, M, N]."""

    def apply(self, direction_BMN: Tensor) -> None:
        """Apply the orthogonalized update."""

    def split(self, max_matrices: int) -> Iterator[Self]:
        """The same matrices in batches of at most `max_matrices`."""

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

    def split(self, max_matrices: int) -> Iterator["LocalMatrixBatch"]:
        views = (self.parameter_BMN, self.grad_BMN, self.momentum_BMN)
        for parameter, grad, momentum in zip(
            *(view.split(max_matrices) for view in views), strict=True
        ):
            yield LocalMatrixBatch(parameter, grad, momentum, self.lr, self.decay)


@dataclass(frozen=True, slots=True, eq=False)
class GatheredMatrixBatch:
    """Gathered updates of row-sharded matrices, replaced in place by their directions."""

    like_BMN: Tensor

    def __len__(self) -> int:
        return len(self.like_BMN)

    def update(self, momentum: float) -> Tensor:  # noqa: ARG002
        return self.like_BMN

    def apply(self, direction_BMN: Tensor) -> None:
        self.like_BMN.copy_(direction_BMN)

    def split(self, max_matrices: int) -> Iterator["GatheredMatrixBatch"]:
        return map(GatheredMatrixBatch, self.like_BMN.split(max_matrices))


def batch_by_shape(blocks: Iterable[MatrixBatch], stack_bytes: int) -> Iterator[list[MatrixBatch]]:
    """Batches of equally shaped blocks that fit in `stack_bytes`, at least one block each."""
    by_shape: dict[tuple[object, ...], list[MatrixBatch]] = defaultdict(list)
    for block in blocks:
        like_BMN = block.like_BMN
        if len(like_BMN):  # the last shards of a stack may be empty
            by_shape[*like_BMN.shape[1:], like_BMN.dtype, like_BMN.device].append(block)
    for blocks_of_shape in by_shape.values():
        max_matrices = max(1, stack_bytes // blocks_of_shape[0].like_BMN[0].nbytes)
        stack: list[MatrixBatch] = []
        for piece in (piece for block in blocks_of_shape for piece in block.split(max_matrices)):
            if sum(map(len, stack)) + len(piece) > max_matrices:
                yield stack
                stack = []
            stack.append(piece)
        yield stack


def muon_step_(stack: list[MatrixBatch], muon: MuonSettings) -> None:
    """One Muon step for a batch of equally shaped blocks."""
    updates = [block.update(muon.momentum) for block in stack]
    update_BMN = (
        torch.cat(updates) if len(updates) > 1 else updates[0]
    )  # cat would copy a single tensor
    direction_BMN = orthogonalize(update_BMN, muon)
    for block, direction in zip(stack, direction_BMN.split([*map(len, stack)]), strict=True):
        block.apply(direction)


def lr_and_weight_decay(group: Mapping[str, Any]) -> tuple[float, float]:
    """Learning rate and weight decay of a group."""
    return group["lr"] * group["lr_scale"], group["weight_decay"]


def orthogonalization_cost(shape: Sequence[int], rows: tuple[int, ...]) -> float:
    """Relative cost of orthogonalizing a matrix in row blocks of these heights."""
    columns = shape[-1]
    each = sum(min(height, columns) ** 2 * max(height, columns) for height in rows)
    return shape[-2] / sum(rows) * each


def orthogonalize_role(
    momentum: Tensor, role: ParameterRole, muon: MuonSettings = MUON_DEFAULTS
) -> Tensor:
    """Muon's update direction for a parameter of this role, orthogonalized block by block."""
    rows = block_rows(role, tuple(momentum.shape))
    directions = [orthogonalize(block_BMN, muon) for block_BMN in split_row_blocks(momentum, rows)]
    return torch.cat(directions, dim=1).view(momentum.shape)


def orthogonalize(update_BMN: Tensor, muon: MuonSettings) -> Tensor:
    """Newton-Schulz orthogonalization, times the update scale for this shape."""
    direction_BMN = newton_schulz(
        update_BMN,
        coefficients=muon.coefficients,
        steps=muon.steps,
        eps=muon.eps,
        dtype=muon.dtype or matmul_dtype(update_BMN),
    )
    return direction_BMN * UPDATE_SCALES[muon.scale](*update_BMN.shape[-2:])


def matmul_dtype(update: Tensor) -> torch.dtype:
    """bfloat16 on an accelerator; on a CPU it would not be faster than float32."""
    return torch.bfloat16 if update.device.type != "cpu" and update.itemsize < 8 else update.dtype


def split_row_blocks(matrix: Tensor, rows: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Views [B, M, N], one per entry of `rows`, of a matrix or stack whose rows repeat `rows`."""
    return matrix.view(-1, sum(rows), matrix.size(-1)).split(rows, dim=1)


def _named_block_rows(named: NamedParameter) -> tuple[int, ...]:
    try:
        return block_rows(named.role, tuple(named.parameter.shape))
    except ValueError as error:
        raise ValueError(f"{named.name}: {error}") from None
