"""Compilation of the CPU kernels with the system's C++ compiler, cached on disk.

The sources include no headers but the compiler's own, so compilation takes seconds. The result is
for this machine's instruction set and lies in the user's cache folder under a hash of all that it
depends on. Without a compiler there are no CPU kernels, and references are used.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

import torch

from paddock.kernels.compile import KernelCompileError, cache_folder

log = logging.getLogger(__name__)
FLAGS = ("-O3", "-march=native", "-std=c++17", "-pthread")
NO_AMX = ("-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")
SOURCES = Path(__file__).parent
TIMEOUT_S = 300
_L, _P, _F, _I = c_long, c_void_p, c_float, c_int
_SEQUENCES = (_L, _P, _P, _P, _P, _L, _L)
# Argument types by entry point of cpu.cpp, the same for each dtype.
ENTRY_POINTS = {
    "linear": (_L, _L, _L, _P, _L, _P, _P, _P, _L),
    "linear_to_f32": (_L, _L, _L, _P, _L, _P, _P, _P, _L),
    "gate_up": (_L, _L, _L, _P, _L, _P, _P, _L),
    "rms_norm": (_L, _L, _P, _L, _P, _F, _P, _L),
    "rope": (_L, _L, _L, _P, _L, _L, _P, _L, _P, _P, _L, _I),
    "linear_fp32": (_L, _L, _L, _P, _L, _P, _P),
    "linear_stack": (_L, _L, _L, _L, _P, _L, _L, _P, _P, _L, _L),
    "experts": (*[_L] * 5, _P, _L, *[_P] * 5),
    "index_topk": (*_SEQUENCES, _L, _L, _P, _P, _P, _L, _P),
    "rope_and_cache": (_L, _L, _L, _L, _P, _P, _P, _L, _I, _P, _P, _P, _P),
    "layer_norm": (_L, _L, _P, _L, _P, _P, _F, _P, _L),
    "decoder_layer": (_P, _P, _P, _P, _P, _P),
    "weight_grad": (_L, _L, _L, _P, _L, _P, _L, _P, _I),
    "swiglu": (_L, _L, _P, _L, _P, _L, _P),
    "swiglu_grad": (_L, _L, _P, _P, _L, _P, _L, _P, _P, _L),
    "rms_norm_grad": (_L, _L, _P, _L, _P, _L, _P, _F, _P, _P),
    "causal_attention": (_L, _P, _P, _L, _L, _L, _L, _F, *[_P] * 5),
    "causal_attention_grad": (_L, _P, _P, _L, _L, _L, _L, _F, *[_P] * 9),
    "cross_entropy": (_L, _L, _P, _P, _F, _P, _P),
    "attention": (*_SEQUENCES, _P, _L, _P, *[_L] * 4, _F, _L, _P, _L, *[_P, _L, _L] * 2, _P),
}
SUFFIXES = {torch.float32: "_f32", torch.bfloat16: "_bf16"}
# Entry points that also take 8-bit weights.
WEIGHTED = ("linear", "linear_to_f32", "gate_up", "experts", "decoder_layer")


class Library:
    """The loaded kernels: `library[name, dtype, dtype of packed weights]` is a function."""

    def __init__(self, file: Path) -> None:
        loaded = ctypes.CDLL(str(file))
        self._functions = {}
        for name, types in ENTRY_POINTS.items():
            for dtype, suffix in SUFFIXES.items():
                variants = {dtype: suffix}
                if name in WEIGHTED:
                    variants[torch.int8] = f"{suffix}_int8"
                for weight_dtype, ending in variants.items():
                    function = getattr(loaded, name + ending)
                    function.argtypes, function.restype = types, None
                    self._functions[name, dtype, weight_dtype] = function

        self.set_threads = loaded.set_threads
        self.set_threads(torch.get_num_threads())
        self.route_experts = loaded.route_experts
        self.route_experts.argtypes = (_L, _L, _L, _P, _P, _I, _F, _P, _P, _P)
        self.route_experts.restype = None

    def __getitem__(self, key: tuple[str, torch.dtype, torch.dtype]) -> Callable[..., None]:
        return self._functions[key]


def library_file() -> Path | None:
    """Where this machine's library is, or will be once compiled; None without a compiler."""
    compiler = _compiler()
    return None if compiler is None else cache_folder() / f"{_digest(compiler)}.so"


@cache
def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)


def _digest(compiler: str) -> str:
    sources = [file.read_text() for file in sorted(SOURCES.glob("*.[hc]*"))]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    parts = (version.stdout, _cpu_features(), *FLAGS, *sources)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _cpu_features() -> str:
    """A home folder may be shared by machines that differ."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "\n".join(dict.fromkeys(x for x in lines if x.startswith(("flags", "Features"))))
    return torch.backends.cpu.get_cpu_capability()


def compile_library(file: Path) -> None:
    """Compile into `file`. Raises KernelCompileError with the compiler's message."""
    compiler = _compiler()
    assert compiler is not None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, suffix=".so")
    except OSError as error:
        raise KernelCompileError(f"cannot write CPU kernels: {error}") from error
    os.close(handle)
    try:
        without = NO_AMX if "amx_bf16" in _cpu_features() and not _amx_works(compiler) else ()
        shared = ("-shared", "-fPIC")
        _run([compiler, *FLAGS, *without, *shared, str(SOURCES / "cpu.cpp"), "-o", name])
        os.replace(name, file)  # atomically: another process may load it
    finally:
        with suppress(OSError):
            os.unlink(name)


def _amx_works(compiler: str) -> bool:
    """Whether a small product by AMX succeeds: some virtual machines announce it and refuse it."""
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "probe")
        try:
            _run([compiler, *FLAGS, str(SOURCES / "amx_probe.cpp"), "-o", program])
            _run([program])
        except KernelCompileError as error:
            log.info("AMX is not used: %s", error)
            return False
    return True


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelCompileError(f"{command[0]} failed: {error}") from error
    if done.returncode:
        raise KernelCompileError(f"{command[0]} failed ({done.returncode}):\n{done.stderr}")
