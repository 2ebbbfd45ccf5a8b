"""AdamW by parameter role: torch.optim.AdamW's arithmetic with one group per parameter kind.

State and arithmetic are float32 even where parameters are half precision; the result is rounded
once. Float32 parameters use PyTorch's fused kernel of the same arithmetic: one pass over memory
instead of eight.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from paddock.kernels.dispatch import is_enabled
from paddock.kernels.precision import opmath_dtype
from paddock.parallel import to_local
from paddock.records import NamedParameter

from .param_groups import PARAM_GROUP_OPTIONS, ParamGroupOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8


ADAM_DEFAULTS = AdamSettings()


class AdamW(torch.optim.Optimizer):
    """AdamW with one group per kind of parameter. All groups share `lr`, which a schedule may set
    at any time; the learning rate of a group is `lr * lr_scale`."""

    def __init__(
        self,
        roles: Iterable[NamedParameter],
        *,
        lr: float,
        weight_decay: float = 0.1,
        adam: AdamSettings = ADAM_DEFAULTS,
        rules: Mapping[str, ParamGroupOptions] = PARAM_GROUP_OPTIONS,
    ) -> None:
        members: dict[str, list[tuple[str, Tensor]]] = {}
        for named in roles:
            kind = named.role.kind
            if kind not in rules:
                raise ValueError(
                    f"{named.name}: no options for kind {kind!r}; known kinds: {[*rules]}"
                )
            members.setdefault(kind, []).append((named.name, named.parameter))
        groups = [
            {
                "params": group_params,
                "kind": kind,
                "lr_scale": rules[kind].lr_scale,
                "weight_decay": weight_decay if rules[kind].apply_weight_decay else 0.0,
                **asdict(adam),
            }
            for kind, group_params in members.items()
        ]
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        self._advance()
        return loss

    def _advance(self) -> None:
        adamw_steps_([(p, self.state[p], group) for p, group in self.params_with_grad()])

    def params_with_grad(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Parameters that have a gradient, each with its group."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield parameter, group

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError for state of other parameters, which torch would match by position."""
        for ours, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            if ours["param_names"] != saved["param_names"]:
                differing = sorted({*ours["param_names"]} ^ {*saved["param_names"]})
                raise ValueError(f"the state belongs to other parameters; not in both: {differing}")
        super().load_state_dict(state_dict)
        # torch casts state to the dtype of its parameter; restore the saved dtype and precision.
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, index in zip(group["params"], saved_group["params"], strict=True):
                for key, saved in state_dict["state"].get(index, {}).items():
                    if saved.dtype != self.state[parameter][key].dtype:
                        self.state[parameter][key] = saved.to(parameter.device)


ParamStateGroup = tuple[
    Tensor, dict[str, Any], Mapping[str, Any]
]  # a parameter, its state, its group


def adamw_steps_(entries: Sequence[ParamStateGroup]) -> None:
    """One AdamW step for each parameter, fused where possible."""
    fused: dict[Any, list[ParamStateGroup]] = defaultdict(list)
    for parameter, state, group in entries:
        if is_enabled("adamw") and can_fuse(parameter):
            step = int(_get_state(parameter, state)["step"]) + 1
            fused[id(group), step, parameter.device].append((parameter, state, group))
        else:
            adamw_step_(parameter, state, group)
    for members in fused.values():
        fused_adamw_step_(members)


def can_fuse(parameter: Tensor) -> bool:
    """Whether PyTorch's fused kernel applies: float32, contiguous."""
    assert parameter.grad is not None
    local, grad = to_local(parameter), to_local(parameter.grad)
    return (
        local.dtype == grad.dtype == torch.float32
        and local.is_contiguous()
        and grad.is_contiguous()
    )


def fused_adamw_step_(members: Sequence[ParamStateGroup]) -> None:
    """One fused step for parameters of one group with the same step count."""
    first, _, group = members[0]
    for parameter, state, _ in members:
        _get_state(parameter, state)["step"] += 1
    step = torch.full((), float(members[0][1]["step"]), device=to_local(first).device)
    beta_mean, beta_square = group["betas"]
    torch._fused_adamw_(
        [to_local(parameter) for parameter, _, _ in members],
        [to_local(parameter.grad) for parameter, _, _ in members],  # type: ignore[arg-type]
        [state["mean"] for _, state, _ in members],
        [state["square"] for _, state, _ in members],
        [],
        [step] * len(members),
        lr=group["lr"] * group["lr_scale"],
        beta1=beta_mean,
        beta2=beta_square,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


def _get_state(parameter: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """The state of a parameter, initialised if it is empty."""
    if not state:
        local = to_local(parameter)
        state["step"] = torch.zeros((), dtype=torch.int64)
        state["mean"], state["square"] = init_state(local), init_state(local)
    return state


def adamw_step_(parameter: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
    """One AdamW step for one parameter, or for the local shard of a sharded one."""
    assert parameter.grad is not None
    local = to_local(parameter)
    _get_state(parameter, state)
    mean, square = state["mean"], state["square"]
    grad = to_local(parameter.grad).to(mean.dtype)
    beta_mean, beta_square = group["betas"]
    state["step"] += 1
    mean.lerp_(grad, 1 - beta_mean)
    square.mul_(beta_square).addcmul_(grad, grad, value=1 - beta_square)
    direction = adam_direction(
        mean, square, step=int(state["step"]), betas=group["betas"], eps=group["eps"]
    )
    apply_update_(local, direction, lr=group["lr"] * group["lr_scale"], decay=group["weight_decay"])


def adam_direction(
    mean: Tensor, square: Tensor, *, step: int, betas: tuple[float, float], eps: float
) -> Tensor:
    """Adam's update direction from the running means of the gradient and of its square.

    Includes the bias correction for means that started at zero `step` updates ago.
    """
    root = square.sqrt().div_((1 - betas[1] ** step) ** 0.5).add_(eps)
    return torch.div(mean, root, out=root).div_(1 - betas[0] ** step)


def apply_update_(parameter: Tensor, direction: Tensor, *, lr: float, decay: float) -> None:
    """parameter <- (1 - lr * decay) * parameter - lr * direction, in direction's precision."""
    wide = parameter.to(direction.dtype)  # the parameter itself, unless it has a smaller dtype
    wide.mul_(1 - lr * decay).add_(direction, alpha=-lr)
    if wide is not parameter:
        parameter.copy_(wide)


def init_state(parameter: Tensor) -> Tensor:
    """Zero optimizer state, float32 or wider."""
    return torch.zeros_like(parameter, dtype=opmath_dtype(parameter.dtype))
