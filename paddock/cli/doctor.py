"""`paddock doctor`: what is installed, what is missing, and how to install it."""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import typer

from paddock import __version__
from paddock.cli.tables import print_parts, table
from paddock.launch import units

# Dependencies of pyproject.toml, by import name.
CORE = (
    "torch", "numpy", "safetensors", "tokenizers", "jinja2", "pydantic", "typer", "rich",
    "fastapi", "uvicorn", "httptools", "uvloop", "httpx", "orjson", "prometheus_client",
)  # fmt: skip
EXTRAS = {
    "grammar": ("xgrammar",),
    "gpu": ("triton",),
    "web": ("playwright",),
    "dash": ("plotly",),
    "data": ("datasets", "pyarrow", "gguf"),
    "envs": ("reasoning_gym", "math_verify", "yaml", "websockets"),
    "mcp": ("mcp",),
    "track": ("tensorboard", "trackio", "wandb"),
}
# Programs, any one of which is enough, and how to install one.
PROGRAMS = {
    "nvcc": (("nvcc",), "the CUDA toolkit, to build kernels written in CUDA C++"),
    "C++ compiler": (("g++", "clang++", "c++"), "apt install g++, for kernels on the CPU"),
    "podman or docker": (
        ("podman", "docker"),
        "apt install podman, for environments in containers",
    ),
    "chromium": (("chromium", "chromium-browser", "google-chrome"), "apt install chromium"),
}
BUBBLEWRAP = "apt install bubblewrap, for environments that run code"


@dataclass(frozen=True, slots=True)
class DoctorCheck:
    """One check: what was found, or how to fix it."""

    what: str
    found: str | None
    remedy: str = ""
    vital: bool = False


def doctor() -> None:
    """Show what is installed, what is missing, and how to install it."""
    checks = [*_libraries(), *_machine(), *_programs(), *_isolation(), *_extras()]
    rows = table("", "check", "found, or how to install it")
    for each in checks:
        state = "ok" if each.found else "BROKEN" if each.vital else "-"
        rows.add_row(state, each.what, each.found or each.remedy)
    print_parts(rows)
    if any(each.vital and not each.found for each in checks):
        raise typer.Exit(1)


def _libraries() -> Iterator[DoctorCheck]:
    yield DoctorCheck("Python", platform.python_version())
    yield DoctorCheck("paddock", __version__)
    broken = {}
    for name in CORE:
        try:
            import_module(name)
        except Exception as error:  # a broken library may raise anything
            broken[name] = f"{type(error).__name__}: {error}"
    for name, problem in broken.items():
        yield DoctorCheck(
            name, None, f"pip install --force-reinstall {name} ({problem})", vital=True
        )
    if not broken:
        yield DoctorCheck("libraries", f"all {len(CORE)} load")
    if "torch" not in broken:
        yield from _torch()


def _torch() -> Iterator[DoctorCheck]:
    import torch

    versions = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    built = [f"{name} {version}" for name, version in versions.items() if version] or ["the CPU"]
    threads = f"{torch.get_num_threads()} CPU threads"
    yield DoctorCheck("torch", f"{torch.__version__}, built for {built[0]}, {threads}")
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        yield DoctorCheck("accelerator", None, "none that this torch can use; runs on the CPU")
        return
    device = torch.get_device_module(kind)
    for i in range(torch.accelerator.device_count()):
        name = device.get_device_name(i) if hasattr(device, "get_device_name") else str(kind)
        _, memory = torch.accelerator.get_memory_info(i)
        yield DoctorCheck(f"accelerator {i}", f"{name}, {units.format_bytes(memory)}")


def _machine() -> Iterator[DoctorCheck]:
    yield DoctorCheck("CPU", f"{os.cpu_count()} cores, {platform.machine()}")
    yield DoctorCheck(
        "memory", units.format_bytes(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    )


def _programs() -> Iterator[DoctorCheck]:
    yield _bubblewrap()
    for what, (names, remedy) in PROGRAMS.items():
        path = next(filter(None, map(_which, names)), None)
        yield DoctorCheck(what, path and _version(path), remedy)


def _isolation() -> Iterator[DoctorCheck]:
    """Every isolation layer between sandboxed code and this machine."""
    from paddock.sandbox import check_isolation

    for layer in check_isolation():
        yield DoctorCheck(f"sandbox: {layer.name}", layer.found, f"without it: {layer.lost}")


def _which(name: str) -> str | None:
    cuda = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which(name) or shutil.which(name, path=os.path.join(cuda, "bin"))


def _bubblewrap() -> DoctorCheck:
    path = shutil.which("bwrap")
    if path is None:
        return DoctorCheck("bubblewrap", None, BUBBLEWRAP)
    return DoctorCheck("bubblewrap", _version(path))


def _version(path: str) -> str:
    found = re.search(r"\d+(\.\d+)+", _run(path, "--version").stdout)
    return f"{found[0]}, {path}" if found else path


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)


def _extras() -> Iterator[DoctorCheck]:
    for extra, modules in EXTRAS.items():
        missing = [name for name in modules if find_spec(name) is None]
        found = None if missing else ", ".join(modules)
        remedy = f"pip install 'paddock[{extra}]' for {', '.join(missing)}"
        yield DoctorCheck(f"extra {extra}", found, remedy)
