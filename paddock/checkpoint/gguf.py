"""Loader for GGUF files of the llama and qwen families.

Quantized tensors are dequantized; the result is an ordinary network that can be trained and saved.
The `gguf` library (extra `data`) reads the file.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from paddock.checkpoint.config_common import (
    POSITIVE_FLOAT,
    POSITIVE_INT,
    STRING,
    TOKEN_ID,
    ConfigJsonReader,
    Json,
    format_validation_error,
)
from paddock.checkpoint.load import materialize, meta_model, parse_dtype
from paddock.checkpoint.safetensors_folder import CheckpointError, check_finite
from paddock.model import ModelConfig, Transformer, inv_freq
from paddock.model import config as model_config

FAMILIES: dict[str, model_config.Family] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
TOP = {"token_embd": "embed", "output_norm": "norm", "output": "head"}
LAYER = {
    "attn_norm": "attention_norm",
    "attn_q": "attention.q",
    "attn_k": "attention.k",
    "attn_v": "attention.v",
    "attn_output": "attention.o",
    "attn_q_norm": "attention.q_norm",
    "attn_k_norm": "attention.k_norm",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "mlp.gate",
    "ffn_up": "mlp.up",
    "ffn_down": "mlp.down",
}
ARCHITECTURE = "general.architecture"
EMBEDDING = "token_embd.weight"
FREQUENCIES = "rope_freqs.weight"
# RoPE scaling of Llama 3.1 and 3.2; GGUF stores only the resulting frequencies.
LLAMA3 = tuple(
    model_config.RopeScaling(kind="llama3", factor=factor, original_context=8192)
    for factor in (8.0, 32.0)
)


@torch.no_grad()
def load_gguf(
    file: str | Path, dtype: str | torch.dtype = "float32", device: str | torch.device = "cpu"
) -> Transformer:
    """The network in a GGUF file, in eval mode; raises CheckpointError if it does not fit."""
    path, precision = Path(file), parse_dtype(dtype)
    reader = open_gguf(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    try:
        config = _config(path, reader, tensors)
    except ValidationError as error:
        raise CheckpointError(f"{path}: {format_validation_error(error)}") from None
    network = materialize(meta_model(config), precision, device)
    targets = network.state_dict()
    if config.tied:
        del targets["head.weight"]
    for name, tensor in _tensors(path, tensors):
        if name not in targets:
            raise CheckpointError(f"{path}: unexpected tensor for '{name}'")
        target = targets.pop(name)
        if target.shape != tensor.shape:
            raise CheckpointError(
                f"{path}: tensor for '{name}' has shape {tuple(tensor.shape)}, "
                f"expected {tuple(target.shape)}"
            )
        check_finite(tensor, name, path)
        target.copy_(_undo_permutation(tensor, name, config))
    if targets:
        raise CheckpointError(f"{path}: tensor for '{next(iter(targets))}' is missing")
    return network.eval()


def open_gguf(path: Path) -> Any:
    """A reader for the file; raises CheckpointError if it cannot be read."""
    try:
        from gguf import GGUFReader  # an optional dependency, needed for conversion only
    except ImportError:
        raise CheckpointError(
            "reading GGUF needs the 'gguf' library: pip install 'paddock[data]'"
        ) from None
    if not path.is_file():
        raise CheckpointError(f"{path}: file not found")
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{path}: truncated or not a GGUF file: {error}") from None


def _config(path: Path, reader: Any, tensors: dict[str, Any]) -> ModelConfig:
    fields = reader.fields
    arch = fields[ARCHITECTURE].contents() if ARCHITECTURE in fields else None
    if arch not in FAMILIES:
        raise CheckpointError(
            f"{path}: architecture must be one of {', '.join(FAMILIES)}, got {arch!r}"
        )
    if EMBEDDING not in tensors:
        raise CheckpointError(f"{path}: tensor '{EMBEDDING}' is missing")
    r = ConfigJsonReader(
        _settings(fields, f"{arch}.") | _settings(fields, "tokenizer.ggml."), str(path)
    )
    hidden, heads = (
        r.pop("embedding_length", POSITIVE_INT),
        r.pop("attention.head_count", POSITIVE_INT),
    )
    layers = r.pop("block_count", POSITIVE_INT)
    dim = r.pop("attention.key_length", POSITIVE_INT, hidden // heads)
    r.expect("attention.value_length", dim)
    r.expect("rope.dimension_count", dim)
    r.expect("attention.sliding_window", 0)
    eos = r.pop("eos_token_id", TOKEN_ID, None)
    return ModelConfig(
        family=FAMILIES[arch],
        vocab=int(tensors[EMBEDDING].shape[-1]),
        hidden=hidden,
        context=r.pop("context_length", POSITIVE_INT),
        attention=("gqa",) * layers,
        mlp=("dense",) * layers,
        dense_inner=r.pop("feed_forward_length", POSITIVE_INT),
        rope=_rope(r, tensors, dim),
        gqa=model_config.GQASettings(
            heads=heads,
            kv_heads=r.pop("attention.head_count_kv", POSITIVE_INT, heads),
            dim=dim,
            bias="qkv" if "blk.0.attn_q.bias" in tensors else "none",
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
        ),
        norm_eps=_round_float32(r.pop("attention.layer_norm_rms_epsilon", POSITIVE_FLOAT)),
        tied="output.weight" not in tensors,
        eos=() if eos is None else (eos,),
        bos=r.pop("bos_token_id", TOKEN_ID, None),
        pad=r.pop("padding_token_id", TOKEN_ID, None),
    )


def _settings(fields: Any, prefix: str) -> Json:
    """Fields under a prefix, except lists: the vocabulary is slow to read and not needed."""
    return {
        key.removeprefix(prefix): field.contents()
        for key, field in fields.items()
        if key.startswith(prefix) and len(field.data) == 1
    }


def _round_float32(value: float) -> float:
    """Undo float32 rounding: GGUF stores 1e-05 as 9.9999997e-06."""
    return float(f"{value:.6g}")


def _rope(r: ConfigJsonReader, tensors: dict[str, Any], dim: int) -> model_config.RopeSettings:
    theta = float(r.pop("rope.freq_base", POSITIVE_FLOAT, 10_000.0))
    unscaled = model_config.RopeSettings(theta=theta, layout="halves")
    kind = r.pop("rope.scaling.type", STRING, "none")
    if kind == "linear":
        scaling = model_config.RopeScaling(
            kind="linear", factor=r.pop("rope.scaling.factor", POSITIVE_FLOAT)
        )
        return unscaled.model_copy(update={"scaling": scaling})
    if kind != "none":
        r.fail(f"'rope.scaling.type' must be 'none' or 'linear', got {kind!r}")
    if FREQUENCIES not in tensors:
        return unscaled
    factors = torch.tensor(tensors[FREQUENCIES].data)
    if factors.shape != (dim // 2,):
        r.fail(f"'{FREQUENCIES}' has shape {tuple(factors.shape)}, expected {(dim // 2,)}")
    stored = inv_freq(unscaled, dim) / factors
    for scaling in LLAMA3:
        candidate = unscaled.model_copy(update={"scaling": scaling})
        if torch.allclose(stored, inv_freq(candidate, dim), rtol=1e-4):
            return candidate
    r.fail(f"'{FREQUENCIES}' does not match the RoPE scaling of Llama 3.1 or 3.2")


def _tensors(path: Path, tensors: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Our tensor names with float32 tensors, rows still in GGUF order."""
    from gguf.quants import dequantize

    for name, tensor in tensors.items():
        if name == FREQUENCIES:
            continue
        try:
            ours = _our_name(name)
            value = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        except (KeyError, ValueError, NotImplementedError) as error:
            raise CheckpointError(f"{path}: cannot use tensor '{name}': {error}") from None
        yield ours, value


def _our_name(name: str) -> str:
    module, kind = name.rsplit(".", 1)
    if not module.startswith("blk."):
        return f"{TOP[module]}.{kind}"
    _, layer, inside = module.split(".")
    return f"layers.{layer}.{LAYER[inside]}.{kind}"


def _undo_permutation(value: Tensor, ours: str, config: ModelConfig) -> Tensor:
    """Undo GGUF's row permutation of llama's heads, which it rotates by interleaved pairs."""
    gqa = config.gqa
    assert gqa is not None
    heads = {"attention.q": gqa.heads, "attention.k": gqa.kv_heads}
    module = ours.rsplit(".", 1)[0].split(".", 2)[-1]
    if config.family != "llama" or module not in heads:
        return value
    return value.unflatten(0, (heads[module], gqa.dim // 2, 2)).transpose(1, 2).flatten(0, 2)
