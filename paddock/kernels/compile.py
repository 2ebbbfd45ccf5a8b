"""CUDA C++ compilation with NVRTC at first use, cached on disk.

NVRTC comes with every CUDA build of PyTorch, so no CUDA toolkit is needed; this file calls it and
the driver through their C interfaces. Sources include no headers. A compiled kernel is cached in
the user's cache folder under a hash of inputs it depends on; without such a folder every
process compiles, which takes a second.
"""

import ctypes
import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch

MAX_DYNAMIC_SHARED = 8  # of CUfunction_attribute
MAX_SHARED_OPTIN = 97  # of CUdevice_attribute


class KernelCompileError(RuntimeError):
    """A source does not compile, or the driver rejects the result."""


@cache
def nvrtc() -> ctypes.CDLL | None:
    """The NVRTC library: the one installed with PyTorch or, failing that, the system's."""
    for name in _nvrtc_names():
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _nvrtc_names() -> list[str]:
    major = (torch.version.cuda or "13").split(".")[0]
    name = f"libnvrtc.so.{major}"
    spec = importlib.util.find_spec("nvidia")  # a namespace package of one or several folders
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    packaged = sorted(str(file) for root in roots for file in root.glob(f"*/lib/{name}"))
    bundled = sorted(str(f) for f in (Path(torch.__file__).parent / "lib").glob("libnvrtc.so*"))
    toolkit = [f"/usr/local/cuda{suffix}/lib64/{name}" for suffix in ("", f"-{major}")]
    return [*packaged, *bundled, name, *toolkit]


def compile_cuda(
    source: str, arch: str, options: Sequence[str] = (), folder: Path | None = None
) -> tuple[bytes, str]:
    """Machine code of `source` for `arch` ("sm_90"), and the compiler log.

    Cached in `folder`, or in the user's cache.
    """
    library = nvrtc()
    if library is None:
        raise KernelCompileError("NVRTC library not found in PyTorch's packages or on this system")
    flags = ("--std=c++17", f"--gpu-architecture={arch}", "--ptxas-options=-v", *options)
    stem = (folder or cache_folder()) / _digest(library, source, flags)
    code, report = stem.with_suffix(".cubin"), stem.with_suffix(".txt")
    with suppress(OSError):
        return code.read_bytes(), report.read_text()
    binary, log = _compile(library, source, flags)
    with suppress(OSError):
        stem.parent.mkdir(parents=True, exist_ok=True)
        _write(report, log.encode())
        _write(code, binary)
    return binary, log


def cache_folder() -> Path:
    """The folder of compiled kernels in the user's cache."""
    try:
        return Path.home() / ".cache" / "paddock" / "kernels"
    except RuntimeError:  # the user has no home folder
        return Path("/nonexistent")


def _digest(library: ctypes.CDLL, source: str, flags: Sequence[str]) -> str:
    major, minor = c_int(), c_int()
    library.nvrtcVersion(byref(major), byref(minor))
    inputs = "\0".join((f"{major.value}.{minor.value}", *flags, source))
    return hashlib.sha256(inputs.encode()).hexdigest()[:32]


def _write(file: Path, content: bytes) -> None:
    """Write atomically, so that another process never reads a partial file."""
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as temporary:
        temporary.write(content)
    os.replace(temporary.name, file)


def _compile(library: ctypes.CDLL, source: str, flags: Sequence[str]) -> tuple[bytes, str]:
    program = c_void_p()
    library.nvrtcCreateProgram(byref(program), source.encode(), b"kernel.cu", 0, None, None)
    try:
        options = (c_char_p * len(flags))(*(flag.encode() for flag in flags))
        failed = library.nvrtcCompileProgram(program, len(flags), options)
        log = _read(program, library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog)
        message = log.rstrip(b"\0").decode()
        if failed:
            raise KernelCompileError(f"NVRTC could not compile a source:\n{message}")
        return _read(program, library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN), message
    finally:
        library.nvrtcDestroyProgram(byref(program))


def _read(program: c_void_p, size_of: Callable[..., int], read: Callable[..., int]) -> bytes:
    size = c_size_t()
    size_of(program, byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    read(program, buffer)
    return buffer.raw


class CudaKernel:
    """A function of a compiled source, loaded on one device."""

    def __init__(self, code: bytes, name: str, device: torch.device, shared_bytes: int) -> None:
        self._driver = _driver()
        self._device = device
        self._module, self._function = c_void_p(), c_void_p()
        with torch.cuda.device(device):
            _set_context(device)
            self._call("cuModuleLoadData", byref(self._module), code)
            self._call("cuModuleGetFunction", byref(self._function), self._module, name.encode())
            self._call("cuFuncSetAttribute", self._function, MAX_DYNAMIC_SHARED, shared_bytes)

    def launch(
        self, blocks: int, threads: int, shared_bytes: int, arguments: Sequence[Any]
    ) -> None:
        """Launch on PyTorch's current stream. `arguments` are ctypes values or device tensors."""
        values = [c_void_p(x.data_ptr()) if isinstance(x, torch.Tensor) else x for x in arguments]
        pointers = (c_void_p * len(values))(*map(ctypes.addressof, values))
        shape = (blocks, 1, 1, threads, 1, 1, shared_bytes)
        with torch.cuda.device(self._device):
            _set_context(self._device)
            stream = torch.cuda.current_stream(self._device).cuda_stream
            self._call("cuLaunchKernel", self._function, *shape, stream, pointers, None)

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._driver, function)(*arguments)
        if status:
            reason = c_char_p()
            self._driver.cuGetErrorString(status, byref(reason))
            message = (reason.value or b"unknown").decode()
            raise KernelCompileError(f"{function} returned {status} on {self._device}: {message}")


@cache
def max_shared_memory_bytes(device: torch.device) -> int:
    """Maximal shared memory of a thread block, in bytes."""
    torch.cuda.init()
    handle, value = c_int(), c_int()
    _driver().cuDeviceGet(byref(handle), device.index)
    _driver().cuDeviceGetAttribute(byref(value), MAX_SHARED_OPTIN, handle)
    return value.value


@cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuLaunchKernel.argtypes = [c_void_p, *[c_uint] * 7, *[c_void_p] * 3]
    return library


def _set_context(device: torch.device) -> None:
    """Set the device's primary context on a thread that has none yet: PyTorch creates contexts
    lazily."""
    current = c_void_p()
    _driver().cuCtxGetCurrent(byref(current))
    if current.value is None:
        _driver().cuCtxSetCurrent(_context(device))


@cache
def _context(device: torch.device) -> c_void_p:
    torch.cuda.init()
    handle, context = c_int(), c_void_p()
    _driver().cuDeviceGet(byref(handle), device.index)
    _driver().cuDevicePrimaryCtxRetain(byref(context), handle)
    return context
