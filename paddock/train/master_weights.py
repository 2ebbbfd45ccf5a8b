"""The weights an optimizer moves, and the ones a network computes with.

In float32 they are the same tensors. A bfloat16 network computes with rounded copies: the exact
float32 weights live here, gradients of micro-batches add up in float32, and after each step the
network's copies are rounded anew. A sharded network is float32 and rounds what it gathers: its
exact weights are its shards.

Quantization-aware training is the same with a coarser rounding: the network computes with what
`FakeQuant` makes of the exact weights, and its gradients go to the exact ones as they are
(straight-through).
"""

from dataclasses import replace
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from paddock.checkpoint import meta_model
from paddock.model import GroupedExperts, Transformer, parameter_roles
from paddock.parallel import (
    SINGLE_PROCESS,
    SINGLE_RANK,
    Mesh,
    gather_to_rank_zero,
    local_rows,
    to_local,
)
from paddock.records import NamedParameter, ParameterRole

SplitRows = Literal["none", "heads", "all"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class FakeQuant(Protocol):
    """The values a network computes with, in place of its exact weights."""

    def __call__(self, name: str, weight: Tensor) -> Tensor:
        """What a quantizer would make of this parameter, as numbers of the same shape and dtype. A
        weight that is left alone comes back itself."""


def no_fake_quant(name: str, weight: Tensor) -> Tensor:  # noqa: ARG001
    """No quantization."""
    return weight


class MasterWeights:
    """`network` comes with its exact weights; from here on it computes in `dtype`, and with what
    `fake_quant` makes of them."""

    def __init__(
        self,
        network: Transformer,
        mesh: Mesh = SINGLE_PROCESS,
        dtype: torch.dtype = torch.float32,
        fake_quant: FakeQuant = no_fake_quant,
    ) -> None:
        self._network, self._mesh, self._fake_quant = network, mesh, fake_quant
        self.master: dict[str, nn.Parameter] = dict(network.named_parameters())
        if dtype.itemsize < 4 and mesh.all_ranks.size == 1:
            before = {name: parameter.data for name, parameter in self.master.items()}
            network.cast(dtype)
            for name, parameter in network.named_parameters():
                if parameter.dtype == dtype:
                    learns = parameter.requires_grad
                    self.master[name] = nn.Parameter(before[name], requires_grad=learns)
        self._keep_apart_what_is_quantized()
        split = {
            f"{name}.{stack}": module.axis
            for name, module in network.named_modules()
            if isinstance(module, GroupedExperts)
            for stack, _ in module.named_parameters()
        }
        self._held = {
            name: local_rows(parameter, split.get(name, SINGLE_RANK))
            for name, parameter in self.master.items()
        }
        self._shapes = {
            name: (len(parameter) * split.get(name, SINGLE_RANK).size, *parameter.shape[1:])
            for name, parameter in self.master.items()
        }

    def _keep_apart_what_is_quantized(self) -> None:
        if self._fake_quant is no_fake_quant:
            return
        assert self._mesh.all_ranks.size == 1, "shards are their own exact weights"
        for name, parameter in self._network.named_parameters():
            given = self.master[name].detach()
            if self.master[name] is parameter and self._fake_quant(name, given) is not given:
                learns = parameter.requires_grad
                self.master[name] = nn.Parameter(given.clone(), requires_grad=learns)
        self.copy_to_model()

    def roles(
        self, *, split: SplitRows = "all", split_rope_rows: bool = False
    ) -> list[NamedParameter]:
        """What the optimizer is told: only parameters that learn, their rows split as asked."""
        declared = parameter_roles(
            self._network, self._network.config, split_rope_rows=split_rope_rows
        )
        return [
            NamedParameter(
                each.name,
                self.master[each.name],
                _split(each.role, split),
            )
            for each in declared
            if each.parameter.requires_grad
        ]

    def params_with_grad(self) -> list[Tensor]:
        return [parameter for parameter in self.master.values() if parameter.grad is not None]

    def accumulate_gradients(self) -> None:
        """Move what a backward pass left on the network's copies onto the exact weights."""
        for name, parameter in self._network.named_parameters():
            exact = self.master[name]
            if exact is parameter or parameter.grad is None:
                continue
            if exact.grad is None:
                exact.grad = parameter.grad.float()
            else:
                exact.grad += parameter.grad
            parameter.grad = None

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Round the exact weights into the network."""
        rounded = [
            (parameter, self._fake_quant(name, self.master[name].detach()))
            for name, parameter in self._network.named_parameters()
            if self.master[name] is not parameter
        ]
        if rounded:
            torch._foreach_copy_([r for r, _ in rounded], [exact for _, exact in rounded])

    def gather_full(self, name: str, rows: Tensor) -> Tensor | None:
        """From each rank's rows of something shaped like this parameter, all of them on the first
        rank, and None on the others. All ranks must ask."""
        if self._mesh.all_ranks.size == 1:
            return rows
        found = gather_to_rank_zero(
            rows, self._held[name], self._shapes[name], self._mesh.all_ranks
        )
        return None if found is None else found.cpu()

    def local_part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's rows of something shaped like this parameter."""
        return whole if self._mesh.all_ranks.size == 1 else whole[self._held[name]].clone()

    def master_model(self) -> Transformer | None:
        """The network with its exact weights: what a checkpoint holds. A single process shares
        their memory; of many the first rank gathers them in host memory, and the others get None.
        """
        exact = {
            name: self.gather_full(name, to_local(p.detach())) for name, p in self.master.items()
        }
        if not self._mesh.is_rank_zero:
            return None
        twin = meta_model(self._network.config)
        state = {**self._network.state_dict(), **exact}
        if self._network.config.tied:
            state["head.weight"] = state["embed.weight"]
        twin.load_state_dict(state, assign=True)
        return twin

    @torch.no_grad()
    def restore(self, network: Transformer) -> None:
        """Take over another network's exact weights and buffers."""
        saved = network.state_dict()
        for name, tensor in self._network.state_dict().items():
            if name in self.master:
                to_local(self.master[name]).copy_(self.local_part(name, saved[name]))
            else:
                tensor.copy_(saved[name])
        self.copy_to_model()


def _split(role: ParameterRole, wanted: SplitRows) -> ParameterRole:
    kept = role.split is not None and (
        wanted == "all" or (wanted == "heads" and role.split.heads > 1)
    )
    return role if kept else replace(role, split=None)
