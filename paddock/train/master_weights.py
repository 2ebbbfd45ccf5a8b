"""Float32 master weights, and the rounded or fake-quantized copies that the model computes with.

In float32 both are the same tensors. A bfloat16 model computes with rounded copies: the float32
master weights live here, gradients of micro batches accumulate in float32, and after each step the
copies are rounded again. A sharded (FSDP) model is float32 and casts what it all-gathers: its
master weights are its shards.

Quantization-aware training works the same way: the model computes with `FakeQuant` of the master
weights, and gradients pass straight through to the master weights.
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
    """Quantize and dequantize a parameter, for quantization-aware training."""

    def __call__(self, name: str, weight: Tensor) -> Tensor:
        """The dequantized values, with the shape and dtype of `weight`.

        A parameter that is not quantized is returned itself, not as a copy.
        """


def no_fake_quant(name: str, weight: Tensor) -> Tensor:  # noqa: ARG001
    """No quantization."""
    return weight


class MasterWeights:
    """Master weights of `network`, which from here on computes in `dtype` with fake quantization.

    `network` must hold its full-precision weights.
    """

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
                    requires_grad = parameter.requires_grad
                    self.master[name] = nn.Parameter(before[name], requires_grad=requires_grad)
        self._separate_quantized()
        expert_dims = {
            f"{name}.{stack}": module.axis
            for name, module in network.named_modules()
            if isinstance(module, GroupedExperts)
            for stack, _ in module.named_parameters()
        }
        self._local_rows = {
            name: local_rows(parameter, expert_dims.get(name, SINGLE_RANK))
            for name, parameter in self.master.items()
        }
        self._shapes = {
            name: (len(parameter) * expert_dims.get(name, SINGLE_RANK).size, *parameter.shape[1:])
            for name, parameter in self.master.items()
        }

    def _separate_quantized(self) -> None:
        """Give every fake-quantized parameter a master weight of its own."""
        if self._fake_quant is no_fake_quant:
            return
        assert self._mesh.all_ranks.size == 1, (
            "fake quantization needs a single process: shards are their own master weights"
        )
        for name, parameter in self._network.named_parameters():
            weight = self.master[name].detach()
            if self.master[name] is parameter and self._fake_quant(name, weight) is not weight:
                requires_grad = parameter.requires_grad
                self.master[name] = nn.Parameter(weight.clone(), requires_grad=requires_grad)
        self.copy_to_model()

    def roles(
        self, *, split: SplitRows = "all", split_rope_rows: bool = False
    ) -> list[NamedParameter]:
        """Trainable master weights with their roles, for the optimizer.

        `split` says which Muon splits are kept: of attention heads only, all, or none.
        """
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

    def params_with_grad(self, *, mtp: bool | None = None) -> list[Tensor]:
        """Master weights that have a gradient; with `mtp` only those of the MTP layer, or all
        others."""
        return [
            parameter
            for name, parameter in self.master.items()
            if parameter.grad is not None and mtp in (None, name.startswith("mtp."))
        ]

    def accumulate_gradients(self) -> None:
        """Move the gradients of the model's copies to the master weights, adding up in float32."""
        for name, parameter in self._network.named_parameters():
            master = self.master[name]
            if master is parameter or parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad += parameter.grad
            parameter.grad = None

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Round or fake-quantize the master weights into the model's copies."""
        rounded = [
            (parameter, self._fake_quant(name, self.master[name].detach()))
            for name, parameter in self._network.named_parameters()
            if self.master[name] is not parameter
        ]
        if rounded:
            torch._foreach_copy_([copy for copy, _ in rounded], [value for _, value in rounded])

    def gather_full(self, name: str, rows: Tensor) -> Tensor | None:
        """Gather a tensor shaped like parameter `name` from each rank's rows.

        Collective: all ranks must call it. Returns the full tensor on rank zero, None elsewhere.
        """
        if self._mesh.all_ranks.size == 1:
            return rows
        found = gather_to_rank_zero(
            rows, self._local_rows[name], self._shapes[name], self._mesh.all_ranks
        )
        return None if found is None else found.cpu()

    def local_part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's rows of a full tensor shaped like parameter `name`."""
        return whole if self._mesh.all_ranks.size == 1 else whole[self._local_rows[name]].clone()

    def master_model(self) -> Transformer | None:
        """The model with its master weights, as checkpoints store it.

        A single process shares their memory. With several, rank zero gathers them in host memory
        and the others get None.
        """
        master = {
            name: self.gather_full(name, to_local(p.detach())) for name, p in self.master.items()
        }
        if not self._mesh.is_rank_zero:
            return None
        model = meta_model(self._network.config)
        state = {**self._network.state_dict(), **master}
        if self._network.config.tied:
            state["head.weight"] = state["embed.weight"]
        model.load_state_dict(state, assign=True)
        return model

    @torch.no_grad()
    def restore(self, network: Transformer) -> None:
        """Load master weights and buffers from another model, which has them in full."""
        saved = network.state_dict()
        for name, tensor in self._network.state_dict().items():
            if name in self.master:
                to_local(self.master[name]).copy_(self.local_part(name, saved[name]))
            else:
                tensor.copy_(saved[name])
        self.copy_to_model()


def _split(role: ParameterRole, wanted: SplitRows) -> ParameterRole:
    """The role with its Muon split, or without it if `wanted` excludes it."""
    kept = role.split is not None and (
        wanted == "all" or (wanted == "heads" and role.split.heads > 1)
    )
    return role if kept else replace(role, split=None)
