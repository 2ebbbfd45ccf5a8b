"""Reader and writer of quantized checkpoints in the compressed-tensors format.

int4 weights are `pack-quantized` (weight_packed, weight_scale, weight_shape), int8 weights
`int-quantized` (weight, weight_scale); other tensors are as released. The MTP layer of a rotated
network has two more vectors (turn.sign, turn.scale). F outputs, D inputs, G groups, E experts.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paddock.checkpoint import (
    COMPRESSED_TENSORS,
    CheckpointError,
    drop_missing_mtp,
    materialize,
    meta_model,
    open_checkpoint,
    parse_dtype,
    safetensors_folder,
    tensor_names,
)
from paddock.model import GroupedExperts, ModelConfig, Transformer
from paddock.quant.quantized_layers import QuantizedExperts, QuantizedLinear, replace_module
from paddock.quant.rotate import RotatedMTP
from paddock.quant.settings import QuantSettings
from paddock.quant.w4a8 import QuantizedTensor, pack_words, unpack_words

# Required settings of a group's weights and activations.
WEIGHTS = {"type": "int", "symmetric": True, "dynamic": False}
ACTIVATIONS = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
}


# --- writing --------------------------------------------------------------------------------------


def to_compressed_tensors(
    name: str, tensor: Tensor | QuantizedTensor, config: ModelConfig, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """The stored tensors of our tensor `name`; one that is not quantized is stored as `dtype`, or
    in its own where that is None."""
    if isinstance(tensor, Tensor):
        for piece in tensor_names.map_tensor(name, tuple(tensor.shape), config):
            yield (
                piece.released_name,
                tensor_names.slice_tensor(tensor, piece)
                .to("cpu", dtype or tensor.dtype)
                .contiguous()
                .clone(),
            )
        return
    for piece in tensor_names.map_tensor(name, tuple(tensor.integer_XFD.shape), config):
        stem = piece.released_name.removesuffix(".weight")
        integer_FD = tensor_names.slice_tensor(tensor.integer_XFD, piece)
        yield (
            f"{stem}.weight_scale",
            tensor_names.slice_tensor(tensor.scale_XFG, piece).cpu().contiguous().clone(),
        )
        if tensor.bits == 8:
            yield f"{stem}.weight", integer_FD.cpu().contiguous().clone()
        else:
            yield f"{stem}.weight_packed", pack_words(integer_FD).cpu()
            yield f"{stem}.weight_shape", torch.tensor(integer_FD.shape)


def rotation_tensor_names(config: ModelConfig) -> tuple[str, str]:
    """Tensor names of the MTP layer's rotation signs and scale."""
    own = config.family == "paddock"
    prefix = "mtp." if own else f"model.layers.{config.mtp_layer}."
    return f"{prefix}turn.sign", f"{prefix}turn.scale"


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Released names of linear layers by how they are stored: int experts, int linears, not
    quantized."""

    experts: list[str]
    linears: list[str]
    ignored: list[str]


def plan_tensors(network: Transformer, config: ModelConfig, names: set[str]) -> TensorPlan:
    """Sort linear layers by how they are stored; `names` are the tensors on disk."""
    plan = TensorPlan([], [], [])
    for path, module in network.named_modules():
        weights: dict[str, Tensor] = {}
        if isinstance(module, nn.Linear):
            weights = {"weight": module.weight}
        elif isinstance(module, GroupedExperts):
            weights = dict(module.named_parameters())
        integers = plan.experts if isinstance(module, GroupedExperts) else plan.linears
        for name, tensor in weights.items():
            for piece in tensor_names.map_tensor(f"{path}.{name}", tuple(tensor.shape), config):
                where = integers if f"{piece.released_name}_scale" in names else plan.ignored
                where.append(piece.released_name.removesuffix(".weight"))
    return plan


def quantization_config(settings: QuantSettings, plan: TensorPlan) -> dict[str, Any]:
    """The quantization_config of config.json. One pattern names all experts."""
    groups: dict[str, Any] = {}
    if plan.experts:
        targets = [r"re:.*\.mlp\.experts\.\d+\.(gate|up|down)_proj$"]
        if not all(re.match(targets[0][3:], name) for name in plan.experts):
            targets = plan.experts
        form = "pack-quantized" if settings.expert_bits == 4 else "int-quantized"
        groups["group_0"] = _group(targets, settings.expert_bits, settings.expert_group_size, form)
    if plan.linears:
        groups["group_1"] = _group(plan.linears, 8, None, "int-quantized")
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": "mixed-precision" if len(formats) > 1 else min(formats),
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": plan.ignored,
        "kv_cache_scheme": None,
    }


def _group(targets: list[str], bits: int, size: int | None, form: str) -> dict[str, Any]:
    strategy = {"strategy": "channel"} if size is None else {"strategy": "group"}
    return {
        "targets": targets,
        "weights": {"num_bits": bits, **WEIGHTS, **strategy, "group_size": size},
        "input_activations": ACTIVATIONS,
        "output_activations": None,
        "format": form,
    }


# --- reading --------------------------------------------------------------------------------------


def load_quantized(
    folder: str | Path,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    *,
    latent_norm_eps: float | None = None,
) -> Transformer:
    """The network of a quantized checkpoint, in eval mode, with integer weights.

    `dtype` is that of all other tensors. Names and shapes must match the configuration exactly;
    otherwise a CheckpointError names the first problem.
    """
    path, precision = Path(folder), parse_dtype(dtype)
    check_quantization_scheme(safetensors_folder.read_json(path / safetensors_folder.CONFIG), path)
    config, tensors = open_checkpoint(path, latent_norm_eps=latent_norm_eps, integers=True)
    reader = _QuantizedCheckpointReader(drop_missing_mtp(config, tensors), tensors)
    return reader.network(precision, torch.device(device))


def check_quantization_scheme(data: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError unless weights are symmetric int4 or int8 with dynamic per-token int8
    activations."""
    scheme_config = data.get("quantization_config", {})
    where = f"{path / safetensors_folder.CONFIG}: quantization_config"
    if scheme_config.get("quant_method") != COMPRESSED_TENSORS:
        raise CheckpointError(f"{where}.quant_method must be '{COMPRESSED_TENSORS}'")
    if scheme_config.get("kv_cache_scheme"):
        raise CheckpointError(f"{where}.kv_cache_scheme: a quantized KV cache is not supported")
    if scheme_config.get("transform_config"):  # the weights are wrong without these transforms
        raise CheckpointError(f"{where}.transform_config: online rotations are not supported")
    groups = scheme_config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{where}.config_groups is missing or empty")
    for name, group in groups.items():
        where_group = f"{where}.config_groups.{name}"
        scheme = _object(group, where_group)  # the library also allows a scheme given by name only
        weights = _object(scheme.get("weights"), f"{where_group}.weights")
        activations = _object(scheme.get("input_activations"), f"{where_group}.input_activations")
        if weights.get("num_bits") not in (4, 8):
            raise CheckpointError(
                f"{where_group}.weights.num_bits must be 4 or 8, got {weights.get('num_bits')!r}"
            )
        for part, found, known in (
            ("weights", weights, WEIGHTS),
            ("input_activations", activations, ACTIVATIONS),
        ):
            for key, value in known.items():
                if found.get(key, False if key == "dynamic" else None) != value:
                    raise CheckpointError(
                        f"{where_group}.{part}.{key} must be {value!r}, got {found.get(key)!r}"
                    )


def _object(value: Any, where_group: str) -> dict[str, Any]:
    """A JSON object; null counts as empty."""
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{where_group} must be an object, got {value!r}")
    return value or {}


class _QuantizedCheckpointReader:
    """Builds a network from the tensors of a folder; tensors left unread are an error."""

    def __init__(self, config: ModelConfig, tensors: safetensors_folder.SafetensorsFolder) -> None:
        self._config, self._tensors = config, tensors
        self._unread = {
            name for name in tensors.names if not tensor_names.is_redundant(name, config)
        }

    def network(self, dtype: torch.dtype, device: torch.device) -> Transformer:
        network_plan = meta_model(self._config)
        found: dict[str, nn.Module] = {}
        for path, module in list(network_plan.named_modules()):
            quantized = self._load_quantized_module(path, module, device)
            if quantized is not None:
                found[path] = quantized
                replace_module(network_plan, path, nn.Identity())
        network = materialize(network_plan, dtype, device)
        self._load_unquantized(network)
        for path, quantized in found.items():
            replace_module(network, path, quantized)
        self._load_rotation(network, device)
        if self._unread:
            raise CheckpointError(
                f"{self._tensors.path}: tensor '{min(self._unread)}' is unexpected"
            )
        return network.eval()

    def _load_quantized_module(
        self, path: str, module: nn.Module, device: torch.device
    ) -> nn.Module | None:
        if isinstance(module, nn.Linear):
            weight = self._load_weight(f"{path}.weight", tuple(module.weight.shape), device)
            if weight is None:
                return None
            bias = None
            if module.bias is not None:
                (piece,) = tensor_names.map_tensor(
                    f"{path}.bias", tuple(module.bias.shape), self._config
                )
                bias = self._take(piece.released_name, tuple(module.bias.shape)).to(device)
            return QuantizedLinear(weight, bias)
        if isinstance(module, GroupedExperts):
            gate_up = self._load_weight(f"{path}.gate_up", tuple(module.gate_up.shape), device)
            down = self._load_weight(f"{path}.down", tuple(module.down.shape), device)
            if gate_up is None and down is None:
                return None
            if gate_up is None or down is None:
                raise CheckpointError(f"{self._tensors.path}: '{path}' is only partly quantized")
            return QuantizedExperts(gate_up, down)
        return None

    def _load_weight(
        self, name: str, shape: tuple[int, ...], device: torch.device
    ) -> QuantizedTensor | None:
        """Our tensor `name` assembled from its released parts, or None if it is not quantized."""
        parts = list(tensor_names.map_tensor(name, shape, self._config))  # empty for a tied head
        if not parts or f"{parts[0].released_name}_scale" not in self._tensors.names:
            return None
        bits = 4 if f"{parts[0].released_name}_packed" in self._tensors.names else 8
        integer = torch.empty(shape, dtype=torch.int8, device=device)
        scale: Tensor | None = None
        for piece in parts:
            target = tensor_names.slice_tensor(integer, piece)
            values_FD, scale_FG = self._load_matrix(piece, (target.shape[0], target.shape[1]), bits)
            target.copy_(values_FD)
            if scale is None:
                scale = torch.empty(*shape[:-1], scale_FG.shape[1], device=device)
            if tensor_names.slice_tensor(scale, piece).shape != scale_FG.shape:
                raise CheckpointError(
                    f"{self._tensors.path}: tensor '{piece.released_name}_scale' has "
                    f"{scale_FG.shape[1]} groups, expected {scale.shape[-1]} as its stack has"
                )
            tensor_names.slice_tensor(scale, piece).copy_(scale_FG)
        assert scale is not None
        return QuantizedTensor(integer, scale, bits)

    def _load_matrix(
        self, piece: tensor_names.TensorMapping, shape: tuple[int, int], bits: int
    ) -> tuple[Tensor, Tensor]:
        name, (rows, columns) = piece.released_name, shape
        scale_FG = self._take(f"{name}_scale").float()
        if scale_FG.ndim != 2 or scale_FG.shape[0] != rows or columns % scale_FG.shape[1]:
            raise CheckpointError(
                f"{self._tensors.path}: tensor '{name}_scale' has shape {tuple(scale_FG.shape)}, "
                f"which does not fit a matrix of shape {shape}"
            )
        if not bool((scale_FG.isfinite() & (scale_FG > 0)).all()):
            raise CheckpointError(
                f"{self._tensors.path}: tensor '{name}_scale' holds a scale that is not a "
                "positive finite number"
            )
        if bits == 8:
            return self._take(name, shape, torch.int8), scale_FG
        stored_shape = tuple(self._take(f"{name}_shape").tolist())
        if stored_shape != shape:
            raise CheckpointError(
                f"{self._tensors.path}: tensor '{name}_shape' is {stored_shape}, expected {shape}"
            )
        words = self._take(f"{name}_packed", (rows, -(-columns // 8)), torch.int32)
        return unpack_words(words, columns), scale_FG

    @torch.no_grad()
    def _load_unquantized(self, network: Transformer) -> None:
        """Load the tensors that are not quantized."""
        targets = network.state_dict()
        for name, tensor in targets.items():
            for piece in tensor_names.map_tensor(name, tuple(tensor.shape), self._config):
                target = tensor_names.slice_tensor(tensor, piece)
                target.copy_(self._take(piece.released_name, tuple(target.shape)))

    def _load_rotation(self, network: Transformer, device: torch.device) -> None:
        sign, scale = rotation_tensor_names(self._config)
        if network.mtp is None or sign not in self._unread:
            return
        sign_D = self._take(sign, (self._config.hidden,)).to(device)
        scale_D = self._take(scale, (self._config.hidden,)).to(device)
        network.mtp = RotatedMTP(network.mtp, sign_D, scale_D)

    def _take(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Read a tensor as stored and mark it as read."""
        where = self._tensors.path
        if name not in self._unread:
            raise CheckpointError(f"{where}: tensor '{name}' is missing")
        self._unread.remove(name)
        found = self._tensors.read_stored(name)
        if shape is not None and tuple(found.shape) != shape:
            raise CheckpointError(
                f"{where}: tensor '{name}' has shape {tuple(found.shape)}, expected {shape}"
            )
        if dtype is not None and found.dtype != dtype:
            raise CheckpointError(f"{where}: tensor '{name}' is {found.dtype}, expected {dtype}")
        if found.is_floating_point() and not bool(found.isfinite().all()):
            raise CheckpointError(f"{where}: tensor '{name}' holds a non-finite value")
        return found
