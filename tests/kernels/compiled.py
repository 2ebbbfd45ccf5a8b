"""Compiles Triton kernels for Hopper (sm_90) without a GPU and counts what they use."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class KernelResources:
    registers: int
    spilled: int  # bytes of stack and local memory
    products: int  # warpgroup matrix multiplications (wgmma)
    small_products: int  # matrix multiplications of single warps
    fences: int  # two per product mean that the assembler serialised them


def compiled(
    function: Any,
    arg_types: dict[str, str],
    constants: dict[str, Any],
    folder: Path,
    **options: int,
) -> KernelResources:
    """`arg_types` holds the types of the runtime arguments; pointers and integers are declared
    divisible by 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = function.arg_names
    aligned = [name for name in names if arg_types.get(name, "").startswith(("*", "i"))]
    source = ASTSource(
        function,
        {name: arg_types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    (folder / "cubin").write_bytes(made.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [tool, "-res-usage", "-sass", folder / "cubin"]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def used(what: str) -> int:
        return max(int(found) for found in re.findall(rf"\b{what}:(\d+)", code))

    return KernelResources(
        registers=used("REG"),
        spilled=used("STACK") + used("LOCAL"),
        products=len(re.findall("[HI]GMMA", code)),
        small_products=len(re.findall("[HI]MMA", code)),
        fences=len(re.findall("WARPGROUP", code)),
    )
