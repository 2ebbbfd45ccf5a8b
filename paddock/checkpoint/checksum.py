"""CRC-32 checksums of tensors, stored in the header of their safetensors file.

The header entry `crc32` has eight hex digits per tensor, in the order of tensor names. Other
readers ignore it, and a file without it (a released one, or one written by another tool) is read
unchecked. A tensor is checked when it is read: no file is read twice and no extra memory is needed.

CRC-32 detects every single-bit error and every burst of up to 32 bits, and misses one in four
billion of other errors. It guards against disk and copy errors, not against tampering. It costs
about a tenth of the check for non-finite values: at 7 GB/s on one core, 1 TB takes 2.5 minutes to
write and again to read.
"""

from collections.abc import Collection, Mapping
from zlib import crc32

import torch
from torch import Tensor

KEY = "crc32"


def checksum(name: str, tensor: Tensor) -> str:
    """CRC-32 of a tensor's name and bytes. The name counts: optimizer state under another name
    would look like state that does not exist yet.

    >>> checksum("a", torch.zeros(3)), checksum("a", torch.tensor([0.0, 0.0, -0.0]))
    ('dc114559', '31a9c679')
    """
    flat = tensor.detach().contiguous().flatten().cpu()
    return f"{crc32(flat.view(torch.uint8).numpy().data, crc32(name.encode())):08x}"


def checksum_header(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The header entry for a file with these tensors."""
    return {KEY: "".join(checksum(name, tensors[name]) for name in sorted(tensors))}


def read_checksums(header: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Checksums by tensor name from the header of a file; empty if it has none.

    >>> read_checksums(checksum_header({"b": torch.zeros(3), "a": torch.ones(1)}), ["b", "a"])["b"]
    '61db2997'
    """
    text = header.get(KEY, "")
    return {name: text[8 * i : 8 * i + 8] for i, name in enumerate(sorted(names)) if text}
