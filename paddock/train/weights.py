"""The weights an optimizer moves, and the ones a network computes with.

In float32 they are the same tensors. A bfloat16 network computes with rounded copies: the exact
float32 weights live here, gradients of micro-batches add up in float32, and after each step the
network's copies are rounded anew.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from paddock.checkpoint.load import blueprint
from paddock.model import Network
from paddock.model.roles import parameter_roles
from paddock.records import NamedParameter


class Weights:
    def __init__(self, network: Network) -> None:
        self._network = network
        self.exact: dict[str, nn.Parameter] = {}
        for name, parameter in network.named_parameters():
            if parameter.dtype in (torch.float32, torch.float64):
                self.exact[name] = parameter
            else:
                self.exact[name] = nn.Parameter(
                    parameter.detach().float(), requires_grad=parameter.requires_grad
                )

    def roles(self, *, split: bool = True, split_rope_rows: bool = False) -> list[NamedParameter]:
        """What the optimizer is told: only parameters that learn."""
        declared = parameter_roles(
            self._network, self._network.config, split_rope_rows=split_rope_rows
        )
        return [
            NamedParameter(
                each.name,
                self.exact[each.name],
                each.role if split else replace(each.role, split=None),
            )
            for each in declared
            if each.parameter.requires_grad
        ]

    def with_gradient(self) -> list[Tensor]:
        return [parameter for parameter in self.exact.values() if parameter.grad is not None]

    def collect_gradients(self) -> None:
        """Move what a backward pass left on the network's copies onto the exact weights."""
        for name, parameter in self._network.named_parameters():
            exact = self.exact[name]
            if exact is parameter or parameter.grad is None:
                continue
            if exact.grad is None:
                exact.grad = parameter.grad.float()
            else:
                exact.grad += parameter.grad
            parameter.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Round the exact weights into the network."""
        for name, parameter in self._network.named_parameters():
            if self.exact[name] is not parameter:
                parameter.copy_(self.exact[name])

    def exact_network(self) -> Network:
        """The network with its exact weights, sharing their memory: what a checkpoint holds."""
        twin = blueprint(self._network.config)
        state = self._network.state_dict() | {name: p.detach() for name, p in self.exact.items()}
        if self._network.config.tied:
            state["head.weight"] = state["embed.weight"]
        twin.load_state_dict(state, assign=True)
        return twin

    @torch.no_grad()
    def restore(self, network: Network) -> None:
        """Take over another network's exact weights and buffers."""
        saved = network.state_dict()
        for name, tensor in self._network.state_dict().items():
            target = self.exact.get(name, tensor)
            target.copy_(saved[name])
        self.publish()
