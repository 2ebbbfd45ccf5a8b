"""Load a network from a checkpoint folder (config.json and safetensors)."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from paddock.checkpoint.config_common import COMPRESSED_TENSORS
from paddock.checkpoint.config_json import config_from_json
from paddock.checkpoint.safetensors_folder import (
    CONFIG,
    CheckpointError,
    SafetensorsFolder,
    check_finite,
    read_json,
    require_folder,
)
from paddock.checkpoint.tensor_names import (
    TensorMapping,
    is_mtp,
    is_redundant,
    map_tensor,
    slice_tensor,
)
from paddock.model import ModelConfig, Transformer

Result = TypeVar("Result")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
# Loaders of quantized checkpoints by quant_method. `paddock.quant` depends on this package, so it
# registers its loader here when it is imported.
QUANTIZED_LOADERS: dict[str, Callable[..., Transformer]] = {}


def load_pretrained(
    folder: str | Path,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    *,
    latent_norm_eps: float | None = None,
) -> Transformer:
    """The network in `folder` (config.json and safetensors), in eval mode.

    Names and shapes must match the configuration exactly and every value must be finite; otherwise
    a CheckpointError names the first problem. An MTP layer that the configuration declares but the
    files lack (transformers does not save it) is left out. A quantized checkpoint
    (compressed-tensors) loads as a network with integer weights if `paddock.quant` is imported.

    `latent_norm_eps` overrides the epsilon of MLA's two latent norms: transformers computes them
    with 1e-6 whatever config.json says, serving engines with `rms_norm_eps`, as we do.
    """
    precision = parse_dtype(dtype)
    loader = QUANTIZED_LOADERS.get(quant_method(Path(folder)) or "")
    if loader is not None:
        return loader(folder, precision, device, latent_norm_eps=latent_norm_eps)
    config, tensors = open_checkpoint(Path(folder), latent_norm_eps=latent_norm_eps)
    network = meta_model(drop_missing_mtp(config, tensors))
    plan = match_tensors(network, tensors)
    network = materialize(network, precision, device)
    load_tensors(network, tensors, plan)
    return network.eval()


def open_checkpoint(
    folder: Path, *, latent_norm_eps: float | None = None, integers: bool = False
) -> tuple[ModelConfig, SafetensorsFolder]:
    """Configuration and weights of the same checkpoint, even if it is being replaced.

    Open files stay readable when their folder is replaced, so it is enough that the folder is the
    same before and after opening. A quantized checkpoint is an error unless `integers` is set.
    """

    def open_both() -> tuple[ModelConfig, SafetensorsFolder]:
        return read_config(folder, latent_norm_eps=latent_norm_eps), SafetensorsFolder(folder)

    if not integers and quant_method(folder) is not None:
        raise CheckpointError(
            f"{folder}: holds integers ({COMPRESSED_TENSORS}), not float weights; load it with "
            "paddock.quant.load_quantized"
        )
    return _read_consistently(folder, open_both)


def quant_method(folder: Path) -> str | None:
    """The quantization method of a quantized checkpoint; None for others."""

    def method() -> str | None:
        require_folder(folder)
        quantization = read_json(folder / CONFIG).get("quantization_config")
        name = quantization.get("quant_method") if isinstance(quantization, dict) else None
        return name if name == COMPRESSED_TENSORS else None

    return _read_consistently(folder, method)


def _read_consistently(folder: Path, read: Callable[[], Result]) -> Result:
    """Repeat `read` until the folder is the same before and after it."""
    while True:
        before = _folder_identity(folder)
        try:
            result = read()
        except CheckpointError:
            if _folder_identity(folder) == before:
                raise
        else:
            if _folder_identity(folder) == before:
                return result


def _folder_identity(folder: Path) -> tuple[int, int, int] | None:
    """Identity of a folder. Its inode number alone may be reused at once."""
    try:
        stat = folder.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns


def meta_model(config: ModelConfig) -> Transformer:
    """A network on the meta device: names and shapes without memory."""
    with torch.device("meta"):
        return Transformer(config)


def materialize(
    network: Transformer, dtype: torch.dtype, device: str | torch.device
) -> Transformer:
    """Allocate a meta-device network; its values are undefined until loaded."""
    network = network.cast(dtype).to_empty(device=device)
    if network.config.tied:
        network.head.weight = network.embed.weight
    return network


def read_config(folder: Path, *, latent_norm_eps: float | None = None) -> ModelConfig:
    """The configuration of a checkpoint folder."""
    require_folder(folder)
    config = config_from_json(read_json(folder / CONFIG), str(folder / CONFIG))
    if latent_norm_eps is None or config.mla is None:
        return config
    mla = config.mla.model_copy(update={"norm_eps": latent_norm_eps})
    return config.model_copy(update={"mla": mla})


def drop_missing_mtp(config: ModelConfig, tensors: SafetensorsFolder) -> ModelConfig:
    """The configuration without MTP if the checkpoint has no MTP tensors."""
    if config.mtp is None or any(is_mtp(name, config) for name in tensors.names):
        return config
    return config.model_copy(update={"mtp": None})


def match_tensors(network: Transformer, tensors: SafetensorsFolder) -> list[TensorMapping]:
    """The mapping of every released tensor; raises CheckpointError for the first mismatch."""
    config = network.config
    plan = [
        piece
        for name, tensor in network.state_dict().items()
        for piece in map_tensor(name, tuple(tensor.shape), config)
    ]
    expected = {piece.released_name for piece in plan}
    missing = sorted(expected - tensors.names)
    if missing:
        raise CheckpointError(f"{tensors.path}: tensor '{missing[0]}' is missing{_more(missing)}")
    extra = sorted(
        name
        for name in tensors.names - expected
        if not is_redundant(name, config)
        and name.removesuffix("_scale_inv") not in expected
        and 0 not in tensors.shape(name)  # transformers writes empty shared experts
    )
    if extra:
        raise CheckpointError(f"{tensors.path}: unexpected tensor '{extra[0]}'{_more(extra)}")
    state = network.state_dict()
    for piece in plan:
        expected_shape, shape = (
            tuple(slice_tensor(state[piece.model_name], piece).shape),
            tensors.shape(piece.released_name),
        )
        if expected_shape != shape:
            raise CheckpointError(
                f"{tensors.path}: tensor '{piece.released_name}' has shape {shape}, "
                f"expected {expected_shape}"
            )
    return plan


@torch.no_grad()
def load_tensors(
    network: Transformer, tensors: SafetensorsFolder, plan: list[TensorMapping]
) -> None:
    """Copy every tensor into the network; raises CheckpointError for non-finite values."""
    state = network.state_dict()
    for piece, tensor in read_tensors(tensors, plan):
        slice_tensor(state[piece.model_name], piece).copy_(tensor)


def read_tensors(
    tensors: SafetensorsFolder, plan: list[TensorMapping]
) -> Iterator[tuple[TensorMapping, Tensor]]:
    """The tensors of a plan, each checked to be finite."""
    for piece in plan:
        tensor = tensors.read_tensor(piece.released_name)
        check_finite(tensor, piece.released_name, tensors.path)
        yield piece, tensor


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A supported dtype by name; raises ValueError for others."""
    if dtype in DTYPES.values():
        return dtype  # type: ignore[return-value]
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got '{dtype}'")
    return DTYPES[dtype]
