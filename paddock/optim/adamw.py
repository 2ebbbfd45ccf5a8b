"""AdamW over parameter roles: torch.optim.AdamW's arithmetic, with a group for each kind.

State is float32 even where parameters are half; so is the arithmetic, rounded once at the end.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from paddock.kernels.precision import wide
from paddock.parallel.shard import local
from paddock.records import NamedParameter

from .roles import RULES, Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8


ADAM = AdamSettings()


class AdamW(torch.optim.Optimizer):
    """One group per kind of parameter. All groups share the number under `lr`, which a schedule
    may set at any time; a group's step is `lr * lr_scale`."""

    def __init__(
        self,
        roles: Iterable[NamedParameter],
        *,
        lr: float,
        weight_decay: float = 0.1,
        adam: AdamSettings = ADAM,
        rules: Mapping[str, Rule] = RULES,
    ) -> None:
        members: dict[str, list[tuple[str, Tensor]]] = {}
        for declared in roles:
            kind = declared.role.kind
            if kind not in rules:
                raise ValueError(f"{declared.name}: no rule for a {kind!r}, only for {[*rules]}")
            members.setdefault(kind, []).append((declared.name, declared.parameter))
        groups = [
            {
                "params": named,
                "kind": kind,
                "lr_scale": rules[kind].lr_scale,
                "weight_decay": weight_decay if rules[kind].decays else 0.0,
                **asdict(adam),
            }
            for kind, named in members.items()
        ]
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        self._advance()
        return loss

    def _advance(self) -> None:
        for parameter, group in self.with_gradient():
            adamw_step_(parameter, self.state[parameter], group)

    def with_gradient(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """The parameters to step, each with its group."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield parameter, group

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuses the state of other parameters, which torch would match by position alone."""
        for ours, theirs in zip(self.param_groups, state_dict["param_groups"], strict=True):
            if ours["param_names"] != theirs["param_names"]:
                differing = sorted({*ours["param_names"]} ^ {*theirs["param_names"]})
                raise ValueError(f"state of other parameters; not in both: {differing}")
        super().load_state_dict(state_dict)
        # torch has cast everything to its parameter's dtype; half loses what float32 had kept.
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, index in zip(group["params"], saved_group["params"], strict=True):
                for key, saved in state_dict["state"].get(index, {}).items():
                    if saved.dtype != self.state[parameter][key].dtype:
                        self.state[parameter][key] = saved.to(parameter.device)


def adamw_step_(parameter: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
    """Advance one parameter and its state by its gradient; of a sharded one, what is held here."""
    assert parameter.grad is not None
    held = local(parameter)
    if not state:
        state["step"] = torch.zeros((), dtype=torch.int64)
        state["mean"], state["square"] = zeros_for(held), zeros_for(held)
    mean, square = state["mean"], state["square"]
    grad = local(parameter.grad).to(mean.dtype)
    beta_mean, beta_square = group["betas"]
    state["step"] += 1
    mean.lerp_(grad, 1 - beta_mean)
    square.mul_(beta_square).addcmul_(grad, grad, value=1 - beta_square)
    direction = adam_direction(
        mean, square, step=int(state["step"]), betas=group["betas"], eps=group["eps"]
    )
    descend_(held, direction, lr=group["lr"] * group["lr_scale"], decay=group["weight_decay"])


def adam_direction(
    mean: Tensor, square: Tensor, *, step: int, betas: tuple[float, float], eps: float
) -> Tensor:
    """The step Adam takes, given running means of the gradient and of its square.

    Both began at zero `step` updates ago and are too small by a known factor, made good here.
    """
    root = square.sqrt().div_((1 - betas[1] ** step) ** 0.5).add_(eps)
    return torch.div(mean, root, out=root).div_(1 - betas[0] ** step)


def descend_(parameter: Tensor, direction: Tensor, *, lr: float, decay: float) -> None:
    """parameter <- (1 - lr * decay) * parameter - lr * direction, in direction's precision."""
    exact = parameter.to(direction.dtype)  # the parameter itself, unless it is half
    exact.mul_(1 - lr * decay).add_(direction, alpha=-lr)
    if exact is not parameter:
        parameter.copy_(exact)


def zeros_for(parameter: Tensor) -> Tensor:
    """Fresh optimizer state, float32 or wider."""
    return torch.zeros_like(parameter, dtype=wide(parameter.dtype))
