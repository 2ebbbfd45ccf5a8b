"""A released folder as a network."""

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

Found = TypeVar("Found")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
# Who reads checkpoints of integers, by quant_method. The room that computes with integers stands
# below this one, so it enters itself here when it is imported.
QUANTIZED_LOADERS: dict[str, Callable[..., Transformer]] = {}


def load_pretrained(
    folder: str | Path,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    *,
    latent_norm_eps: float | None = None,
) -> Transformer:
    """The network in `folder` (config.json and safetensors), in eval mode.

    Names and shapes must fit the configuration exactly and every value must be finite; otherwise a
    CheckpointError names the first thing that is wrong. An MTP layer that the configuration
    promises but the files lack altogether (transformers does not save it) is left out. A folder of
    integers (compressed-tensors) becomes a network that computes with them, once `paddock.quant` is
    imported.

    `latent_norm_eps` overrides the epsilon of MLA's two latent norms: transformers computes them
    with 1e-6 whatever config.json says, the serving engines with `rms_norm_eps`, as we do.
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
    """Configuration and weights of one and the same checkpoint, though it be replaced meanwhile.

    What is open stays readable when its folder is replaced; so it is enough that the folder is
    still the same after everything was opened. Integers are refused unless they are expected.
    """

    def opened() -> tuple[ModelConfig, SafetensorsFolder]:
        return read_config(folder, latent_norm_eps=latent_norm_eps), SafetensorsFolder(folder)

    if not integers and quant_method(folder) is not None:
        raise CheckpointError(
            f"{folder}: holds integers ({COMPRESSED_TENSORS}), not weights; paddock.quant.load_quantized "
            "reads them"
        )
    return _unreplaced(folder, opened)


def quant_method(folder: Path) -> str | None:
    """How a checkpoint of integers says it was made; None for all others."""

    def method() -> str | None:
        require_folder(folder)
        said = read_json(folder / CONFIG).get("quantization_config")
        found = said.get("quant_method") if isinstance(said, dict) else None
        return found if found == COMPRESSED_TENSORS else None

    return _unreplaced(folder, method)


def _unreplaced(folder: Path, read: Callable[[], Found]) -> Found:
    """What `read` finds in a folder that is the same before and after."""
    while True:
        before = _identity(folder)
        try:
            found = read()
        except CheckpointError:
            if _identity(folder) == before:
                raise
        else:
            if _identity(folder) == before:
                return found


def _identity(folder: Path) -> tuple[int, int, int] | None:
    """What tells a folder from its successor. The inode number alone may be used again at once."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def meta_model(config: ModelConfig) -> Transformer:
    """The network's names and shapes, holding no memory."""
    with torch.device("meta"):
        return Transformer(config)


def materialize(
    network: Transformer, dtype: torch.dtype, device: str | torch.device
) -> Transformer:
    """Memory for a blueprint, its values undefined until filled."""
    network = network.cast(dtype).to_empty(device=device)
    if network.config.tied:
        network.head.weight = network.embed.weight
    return network


def read_config(folder: Path, *, latent_norm_eps: float | None = None) -> ModelConfig:
    """The configuration a folder's config.json describes."""
    require_folder(folder)
    config = config_from_json(read_json(folder / CONFIG), str(folder / CONFIG))
    if latent_norm_eps is None or config.mla is None:
        return config
    mla = config.mla.model_copy(update={"norm_eps": latent_norm_eps})
    return config.model_copy(update={"mla": mla})


def drop_missing_mtp(config: ModelConfig, tensors: SafetensorsFolder) -> ModelConfig:
    if config.mtp is None or any(is_mtp(name, config) for name in tensors.names):
        return config
    return config.model_copy(update={"mtp": None})


def match_tensors(network: Transformer, tensors: SafetensorsFolder) -> list[TensorMapping]:
    """Every released tensor with its place, or a CheckpointError about the first misfit."""
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
        and 0 not in tensors.shape(name)  # transformers writes shared experts that are none
    )
    if extra:
        raise CheckpointError(
            f"{tensors.path}: tensor '{extra[0]}' has no place in the network{_more(extra)}"
        )
    places = network.state_dict()
    for piece in plan:
        wanted, found = (
            tuple(slice_tensor(places[piece.model_name], piece).shape),
            tensors.shape(piece.released_name),
        )
        if wanted != found:
            raise CheckpointError(
                f"{tensors.path}: tensor '{piece.released_name}' has shape {found}, expected {wanted}"
            )
    return plan


@torch.no_grad()
def load_tensors(
    network: Transformer, tensors: SafetensorsFolder, plan: list[TensorMapping]
) -> None:
    """Read every tensor into its place, refusing what is not a finite number."""
    places = network.state_dict()
    for piece, tensor in read_tensors(tensors, plan):
        slice_tensor(places[piece.model_name], piece).copy_(tensor)


def read_tensors(
    tensors: SafetensorsFolder, plan: list[TensorMapping]
) -> Iterator[tuple[TensorMapping, Tensor]]:
    """The tensors of a plan, each known to be finite."""
    for piece in plan:
        tensor = tensors.read_tensor(piece.released_name)
        check_finite(tensor, piece.released_name, tensors.path)
        yield piece, tensor


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    if dtype in DTYPES.values():
        return dtype  # type: ignore[return-value]
    if dtype not in DTYPES:
        raise ValueError(f"no dtype called '{dtype}'; there are {', '.join(DTYPES)}")
    return DTYPES[dtype]
