"""CPU kernels in C++, compiled once for the machine; each op that has one uses it if it is loaded.

library.py   compilation and cache
cpu.cpp      entry points
pool.h       worker threads
vec.h        vectors of 16 floats
amx.h        products by AMX tiles; amx_probe.cpp tries them
linear.h     products with packed weights
attention.py  attention through a block table
elementwise.h  RMSNorm, LayerNorm and RoPE
attention.h  attention over a paged KV cache; attention_block.h and attention_amx.h: one block of it
experts.h    routed experts
index_topk.h  index scores and top-k keys
decoder_layer.h  a decoder layer in one call
training.h   gradients, and operations that only training has; attention_training.h: attention
training.py  autograd of those

`load(wait=True)` compiles if needed and loads; nothing else compiles. Until then, without a C++
compiler, references are used. The kernels add in a fixed order,
whatever else is computed: a row's result does not depend on the batch.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from paddock.kernels.compile import KernelCompileError
from paddock.kernels.cpu.library import Library, compile_library, library_file
from paddock.kernels.dispatch import is_enabled

log = logging.getLogger(__name__)
_lock = threading.Lock()
_library: Library | None = None


def load(*, wait: bool) -> bool:
    """Load the CPU kernels; True if they can be used now. Without `wait` a missing library is
    not compiled. A failed compilation is logged, and references stay in use."""
    global _library
    with _lock:
        if _library is not None:
            return True
        try:
            file = library_file()
            if file is None:
                return False
            if not file.exists():
                if not wait:
                    return False
                compile_library(file)
            _library = Library(file)
        except (OSError, KernelCompileError) as error:
            log.warning("CPU kernels are not used: %s", error)
            return False
    return True


def compile_in_background() -> None:
    """Compile for later processes; this one continues with references."""
    file = library_file()
    if file is not None and not file.exists():
        threading.Thread(target=_compile_quietly, args=(file,), daemon=True).start()


def _compile_quietly(file: Path) -> None:
    try:
        compile_library(file)
    except (OSError, KernelCompileError) as error:
        log.warning("CPU kernels could not be compiled: %s", error)


def set_threads(threads: int) -> None:
    """The number of threads of a kernel that this thread calls, if kernels are loaded."""
    if _library is not None:
        _library.set_threads(threads)


def can_compile() -> bool:
    """Whether this machine has a C++ compiler."""
    return library_file() is not None


def is_loaded() -> bool:
    return _library is not None


def suits(*tensors: Tensor) -> bool:
    """Whether the kernels take these tensors: one float dtype on the CPU, no gradients, and the
    last dimension contiguous."""
    return not torch.is_grad_enabled() and suits_training(*tensors)


def suits_training(*tensors: Tensor) -> bool:
    """The same for kernels that have gradients."""
    if _library is None:
        return False
    dtype = tensors[0].dtype
    return (
        (dtype == torch.float32 or dtype == torch.bfloat16)
        and all(x.device.type == "cpu" and x.dtype == dtype and x.stride(-1) == 1 for x in tensors)
        and is_enabled("cpu")
    )


def loaded() -> Library:
    assert _library is not None
    return _library


def function(
    name: str, dtype: torch.dtype, weight_dtype: torch.dtype | None = None
) -> Callable[..., None]:
    """A kernel for inputs of `dtype` and packed weights of the same, or of 8 bits."""
    return loaded()[name, dtype, weight_dtype or dtype]


__all__ = [
    "can_compile",
    "compile_in_background",
    "function",
    "is_loaded",
    "load",
    "loaded",
    "set_threads",
    "suits",
    "suits_training",
]
