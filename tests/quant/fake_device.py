"""A fake accelerator: tensors report its device and are computed on the CPU.

Like a GPU it rejects tensors of both devices in one call, and `numpy`, and it divides by a number
by multiplying with its inverse. So code that creates a tensor on the wrong device, or that rounds
after a plain division, fails on machines without a GPU too.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

FAKE_DEVICE, CPU = torch.device("ve", 0), torch.device("cpu")
MOVES = (Tensor.to, Tensor.copy_)
DIVISIONS = {
    Tensor.div: Tensor.mul,
    Tensor.div_: Tensor.mul_,
    Tensor.__truediv__: Tensor.mul,
    Tensor.__itruediv__: Tensor.mul_,
    torch.div: Tensor.mul,
}


class FakeDeviceTensor(Tensor):
    """A tensor on the fake device; `data_cpu` holds its values."""

    data_cpu: Tensor

    @staticmethod
    def __new__(cls, data_cpu: Tensor) -> "FakeDeviceTensor":
        made = Tensor._make_wrapper_subclass(
            cls, data_cpu.shape, strides=data_cpu.stride(), dtype=data_cpu.dtype, device=FAKE_DEVICE
        )
        made.data_cpu = data_cpu
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was not intercepted by FakeDeviceMode")


class FakeDeviceMode(TorchFunctionMode):
    """While active, the fake device exists."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0  # calls with tensors on the fake device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_fake = [x for x in given if isinstance(x, FakeDeviceTensor)]
        device = requested_device(func, args, kwargs) or (FAKE_DEVICE if on_fake else CPU)
        if not on_fake and device != FAKE_DEVICE:
            return func(*args, **kwargs)
        self.calls += 1
        if func == Tensor.device.__get__:
            return FAKE_DEVICE
        if func is torch._has_compatible_shallow_copy_type:
            return False
        if func is Tensor.numpy:
            raise TypeError("numpy cannot read tensors of the fake device")
        if on_fake and func not in MOVES and len(on_fake) < len(given):
            raise RuntimeError(f"{func}: {[(str(x.device), tuple(x.shape)) for x in given]}")
        if func in DIVISIONS and isinstance(args[1], int | float):
            func, args = DIVISIONS[func], (args[0], 1.0 / args[1])
        found = func(*to_cpu(args), **to_cpu(kwargs))
        if func is Tensor.__iter__:
            return iter(to_fake(list(found), on_fake))
        if device == CPU:
            return tree_map_only(Tensor, Tensor.clone, found)
        return to_fake(found, on_fake)


def requested_device(func: Any, args: Any, kwargs: Any) -> torch.device | None:
    if func is Tensor.cpu:
        return CPU
    named = [kwargs.get("device"), *(args[1:] if func is Tensor.to else ())]
    for one in named:
        if isinstance(one, FakeDeviceTensor):
            return FAKE_DEVICE
        if isinstance(one, torch.device | str):
            return torch.device(one)
        if isinstance(one, Tensor):
            return one.device
    return None


def to_cpu(values: Any) -> Any:
    """CPU tensors, and the CPU in place of the fake device."""
    values = tree_map_only(torch.device, lambda x: CPU if x == FAKE_DEVICE else x, values)
    return tree_map_only(FakeDeviceTensor, lambda x: x.data_cpu, values)


def to_fake(values: Any, known: list[FakeDeviceTensor]) -> Any:
    """Tensors on the fake device; tensors changed in place keep their identity."""
    if isinstance(values, Tensor):
        return next((x for x in known if x.data_cpu is values), FakeDeviceTensor(values))
    if type(values) in (list, tuple) or hasattr(values, "n_sequence_fields"):
        return type(values)([to_fake(value, known) for value in values])
    return values
