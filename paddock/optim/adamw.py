"""AdamW over parameter roles: torch.optim.AdamW's arithmetic, with a group for each kind.

State is float32 even where parameters are half; so is the arithmetic, rounded once at the end.
On an accelerator float32 parameters step together, in PyTorch's fused kernel of the same
arithmetic: one pass over memory instead of eight.
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
    """One group per kind of parameter. All groups share the number under `lr`, which a schedule
    may set at any time; a group's step is `lr * lr_scale`."""

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
                "weight_decay": weight_decay if rules[kind].apply_weight_decay else 0.0,
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
        adamw_steps_([(p, self.state[p], group) for p, group in self.params_with_grad()])

    def params_with_grad(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
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


ParamStateGroup = tuple[
    Tensor, dict[str, Any], Mapping[str, Any]
]  # a parameter, its state, its group


def adamw_steps_(stepping: Sequence[ParamStateGroup]) -> None:
    """Advance parameters and their states by their gradients."""
    together: dict[Any, list[ParamStateGroup]] = defaultdict(list)
    for parameter, state, group in stepping:
        if is_enabled("adamw") and can_fuse(parameter):
            step = int(_state_of(parameter, state)["step"]) + 1
            together[id(group), step, parameter.device].append((parameter, state, group))
        else:
            adamw_step_(parameter, state, group)
    for run in together.values():
        fused_adamw_step_(run)


def can_fuse(parameter: Tensor) -> bool:
    """Float32 on an accelerator, its gradient laid out alike."""
    assert parameter.grad is not None
    held, grad = to_local(parameter), to_local(parameter.grad)
    return (
        held.device.type != "cpu"
        and held.dtype == grad.dtype == torch.float32
        and held.is_contiguous()
        and grad.is_contiguous()
    )


def fused_adamw_step_(run: Sequence[ParamStateGroup]) -> None:
    """Parameters of one group that have taken equally many steps."""
    first, _, group = run[0]
    for parameter, state, _ in run:
        _state_of(parameter, state)["step"] += 1
    step = torch.full((), float(run[0][1]["step"]), device=to_local(first).device)
    beta_mean, beta_square = group["betas"]
    torch._fused_adamw_(
        [to_local(parameter) for parameter, _, _ in run],
        [to_local(parameter.grad) for parameter, _, _ in run],  # type: ignore[arg-type]
        [state["mean"] for _, state, _ in run],
        [state["square"] for _, state, _ in run],
        [],
        [step] * len(run),
        lr=group["lr"] * group["lr_scale"],
        beta1=beta_mean,
        beta2=beta_square,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


def _state_of(parameter: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """The state, begun where there is none."""
    if not state:
        held = to_local(parameter)
        state["step"] = torch.zeros((), dtype=torch.int64)
        state["mean"], state["square"] = init_state(held), init_state(held)
    return state


def adamw_step_(parameter: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
    """Advance one parameter and its state by its gradient; of a sharded one, what is held here."""
    assert parameter.grad is not None
    held = to_local(parameter)
    _state_of(parameter, state)
    mean, square = state["mean"], state["square"]
    grad = to_local(parameter.grad).to(mean.dtype)
    beta_mean, beta_square = group["betas"]
    state["step"] += 1
    mean.lerp_(grad, 1 - beta_mean)
    square.mul_(beta_square).addcmul_(grad, grad, value=1 - beta_square)
    direction = adam_direction(
        mean, square, step=int(state["step"]), betas=group["betas"], eps=group["eps"]
    )
    apply_update_(held, direction, lr=group["lr"] * group["lr_scale"], decay=group["weight_decay"])


def adam_direction(
    mean: Tensor, square: Tensor, *, step: int, betas: tuple[float, float], eps: float
) -> Tensor:
    """The step Adam takes, given running means of the gradient and of its square.

    Both began at zero `step` updates ago and are too small by a known factor, made good here.
    """
    root = square.sqrt().div_((1 - betas[1] ** step) ** 0.5).add_(eps)
    return torch.div(mean, root, out=root).div_(1 - betas[0] ** step)


def apply_update_(parameter: Tensor, direction: Tensor, *, lr: float, decay: float) -> None:
    """parameter <- (1 - lr * decay) * parameter - lr * direction, in direction's precision."""
    exact = parameter.to(direction.dtype)  # the parameter itself, unless it is half
    exact.mul_(1 - lr * decay).add_(direction, alpha=-lr)
    if exact is not parameter:
        parameter.copy_(exact)


def init_state(parameter: Tensor) -> Tensor:
    """Fresh optimizer state, float32 or wider."""
    return torch.zeros_like(parameter, dtype=opmath_dtype(parameter.dtype))
