"""A device that no machine has: tensors say that they lie there, and are computed here.

What a GPU refuses is refused: tensors of both sides in one call, and `numpy`. As on a GPU, dividing
by a number is multiplying by its inverse. So code that makes a tensor on the wrong side, or that
rounds by a plain division, is found out on machines without a GPU.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

ELSEWHERE, HERE = torch.device("ve", 0), torch.device("cpu")
MOVES = (Tensor.to, Tensor.copy_)
DIVISIONS = {
    Tensor.div: Tensor.mul,
    Tensor.div_: Tensor.mul_,
    Tensor.__truediv__: Tensor.mul,
    Tensor.__itruediv__: Tensor.mul_,
    torch.div: Tensor.mul,
}


class There(Tensor):
    """A tensor elsewhere; `here` holds its numbers."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> "There":
        made = Tensor._make_wrapper_subclass(
            cls, here.shape, strides=here.stride(), dtype=here.dtype, device=ELSEWHERE
        )
        made.here = here
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} went past the one who pretends")


class Pretending(TorchFunctionMode):
    """While it is on, there is such a device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0  # of which tensors elsewhere came

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        there = [x for x in given if isinstance(x, There)]
        place = place_asked_for(func, args, kwargs) or (ELSEWHERE if there else HERE)
        if not there and place != ELSEWHERE:
            return func(*args, **kwargs)
        self.calls += 1
        if func == Tensor.device.__get__:
            return ELSEWHERE
        if func is torch._has_compatible_shallow_copy_type:
            return False
        if func is Tensor.numpy:
            raise TypeError("numpy cannot read what lies elsewhere")
        if there and func not in MOVES and len(there) < len(given):
            raise RuntimeError(f"{func}: {[(str(x.device), tuple(x.shape)) for x in given]}")
        if func in DIVISIONS and isinstance(args[1], int | float):
            func, args = DIVISIONS[func], (args[0], 1.0 / args[1])
        found = func(*brought(args), **brought(kwargs))
        if func is Tensor.__iter__:
            return iter(sent(list(found), there))
        if place == HERE:
            return tree_map_only(Tensor, Tensor.clone, found)
        return sent(found, there)


def place_asked_for(func: Any, args: Any, kwargs: Any) -> torch.device | None:
    if func is Tensor.cpu:
        return HERE
    named = [kwargs.get("device"), *(args[1:] if func is Tensor.to else ())]
    for one in named:
        if isinstance(one, There):
            return ELSEWHERE
        if isinstance(one, torch.device | str):
            return torch.device(one)
        if isinstance(one, Tensor):
            return one.device
    return None


def brought(values: Any) -> Any:
    """Tensors here, and this device where the other was meant."""
    values = tree_map_only(torch.device, lambda x: HERE if x == ELSEWHERE else x, values)
    return tree_map_only(There, lambda x: x.here, values)


def sent(values: Any, known: list[There]) -> Any:
    """Tensors there; what was changed in place is the tensor it was."""
    if isinstance(values, Tensor):
        return next((x for x in known if x.here is values), There(values))
    if type(values) in (list, tuple) or hasattr(values, "n_sequence_fields"):
        return type(values)([sent(value, known) for value in values])
    return values
