"""Lazily opened folder of safetensors files, with checks of names, index and checksums."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paddock.checkpoint.checksum import checksum, read_checksums

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = "model-{:05d}-of-{:05d}.safetensors"
SHARDS = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
BLOCK = 128  # float8 weights have one scale per BLOCK x BLOCK tile
FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file or tensor and what is wrong."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises CheckpointError if there is none."""
    if not path.is_file():
        raise CheckpointError(f"{path}: file not found")
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return data


class SafetensorsFolder:
    """Names, shapes and tensors of a checkpoint's shards."""

    def __init__(self, path: Path, files: Sequence[str] | None = None) -> None:
        """`files`: file names of a folder that has no index yet; None: those of its index."""
        self.path = path
        self._files: dict[str, Any] = {}
        self._checksums: dict[str, str] = {}  # by tensor, where its file has them
        self._file_of: dict[str, str] = {}  # tensor -> file
        for file in _shards(path) if files is None else files:
            try:
                self._files[file] = safe_open(path / file, framework="pt", device="cpu")
            except (SafetensorError, OSError, RuntimeError) as error:
                raise CheckpointError(
                    f"{path / file}: truncated or not a safetensors file: {error}"
                ) from None
            names = list(self._files[file].keys())
            self._checksums |= read_checksums(self._files[file].metadata() or {}, names)
            for name in names:
                if name in self._file_of:
                    raise CheckpointError(
                        f"tensor '{name}' is in both {self._file_of[name]} and {file}"
                    )
                self._file_of[name] = file
        if files is None:
            self._check_index()

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def file(self, name: str) -> str:
        """The name of the file that holds a tensor."""
        return self._file_of[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[self._file_of[name]].get_slice(name).get_shape())

    def read_stored(self, name: str) -> Tensor:
        """The tensor as stored, of any dtype; verified if the file has checksums."""
        file = self._file_of[name]
        try:
            tensor: Tensor = self._files[file].get_tensor(name)
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.path / file}: cannot read tensor '{name}': {error}"
            ) from None
        if name in self._checksums and checksum(name, tensor) != self._checksums[name]:
            raise CheckpointError(
                f"{self.path / file}: tensor '{name}' is damaged: its checksum differs from the one"
                " it was written with"
            )
        return tensor

    def read_tensor(self, name: str) -> Tensor:
        """The tensor as floats; block-scaled float8 is dequantized to float32."""
        stored = self.read_stored(name)
        scale = f"{name}_scale_inv"
        if stored.dtype == torch.float8_e4m3fn and scale in self._file_of:
            return dequantize_fp8(stored, self.read_tensor(scale), f"{self.path}: tensor '{name}'")
        if stored.dtype not in FLOAT_DTYPES or scale in self._file_of:
            has = "a" if scale in self._file_of else "no"
            raise CheckpointError(
                f"{self.path}: tensor '{name}' is {stored.dtype} with {has} '{scale}'; known are "
                f"float8_e4m3fn with one and {', '.join(map(str, FLOAT_DTYPES))} without"
            )
        return stored

    def _check_index(self) -> None:
        if not (self.path / INDEX).is_file():
            return
        for name, file in _weight_map(self.path).items():
            if self._file_of.get(name) != file:
                raise CheckpointError(
                    f"{self.path / INDEX} maps tensor '{name}' to {file}, which does not hold it"
                )


def dequantize_fp8(stored: Tensor, scale: Tensor, what: str) -> Tensor:
    """Dequantize block-scaled float8 weights to float32."""
    if stored.ndim != 2:
        raise CheckpointError(f"{what} is float8 of shape {tuple(stored.shape)}, not a matrix")
    rows, columns = stored.shape
    expected = (-(-rows // BLOCK), -(-columns // BLOCK))
    if tuple(scale.shape) != expected:
        raise CheckpointError(f"{what} has scales of shape {tuple(scale.shape)}, not {expected}")
    wide = scale.float().repeat_interleave(BLOCK, 0)[:rows]
    return stored.float() * wide.repeat_interleave(BLOCK, 1)[:, :columns]


def require_folder(path: Path) -> None:
    if path.is_file():
        raise CheckpointError(f"{path}: is a file, not a folder")
    if not path.is_dir():
        raise CheckpointError(f"{path}: folder not found")


def _shards(path: Path) -> list[str]:
    require_folder(path)
    has_single = (path / SINGLE).is_file()
    if (path / INDEX).is_file():
        files = sorted(set(_weight_map(path).values()))
        for file in files:
            if not is_plain_filename(file):
                raise CheckpointError(f"{path / INDEX} names a file outside its folder: {file}")
            if not (path / file).is_file():
                raise CheckpointError(f"{path / INDEX} names {file}, which is missing")
        if (
            has_single and SINGLE not in files
        ):  # readers disagree on which of the two takes precedence
            raise CheckpointError(f"{path}: holds {SINGLE}, but {INDEX} does not list it")
        return files
    if has_single:
        return [SINGLE]
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLES)
    if pickles:
        raise CheckpointError(
            f"{path}: holds only pickled weights ({pickles[0]}); unpickling can run arbitrary "
            "code, so only safetensors are supported"
        )
    raise CheckpointError(f"{path}: neither {SINGLE} nor {INDEX} found")


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{path / INDEX}: 'weight_map' is missing or malformed")
    return weight_map


def check_finite(tensor: Tensor, name: str, where: object) -> None:
    """Raise CheckpointError if the tensor holds NaN or infinity."""
    bad = ~torch.isfinite(tensor)
    if bool(bad.any()):
        position = tuple(bad.nonzero()[0].tolist())
        raise CheckpointError(
            f"{where}: tensor '{name}' holds {tensor[position].item()} at {position}"
        )


def is_plain_filename(name: str) -> bool:
    """Whether a name has no folder part."""
    return Path(name).name == name and name not in ("", "..")


def is_checkpoint_file(name: str) -> bool:
    """Whether saving a checkpoint writes a file of this name; other files are left alone."""
    return name in (CONFIG, SINGLE, INDEX) or SHARDS.fullmatch(name) is not None


def list_extra_files(path: Path) -> Iterator[Path]:
    """Other files of a checkpoint folder: tokenizer, chat template and so on."""
    for file in sorted(path.iterdir()):
        if file.is_file() and file.suffix != ".safetensors" and not is_checkpoint_file(file.name):
            yield file
