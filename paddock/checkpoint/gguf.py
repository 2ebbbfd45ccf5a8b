"""GGUF files of the llama and qwen families, as networks.

Quantised tensors are multiplied out; the result is an ordinary network that can be trained and
saved. The `gguf` library (extra `data`) reads the file.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paddock.checkpoint.folder import CheckpointError, first_non_finite
from paddock.checkpoint.load import blueprint, materialize
from paddock.model import ModelConfig, Network
from paddock.model.config import Family, GroupedSettings, RopeScaling, RopeSettings
from paddock.model.rope import frequencies

FAMILIES: dict[str, Family] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
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
FREQUENCIES = "rope_freqs.weight"
# The stretchings Llama 3.1 and 3.2 were released with; GGUF keeps only their effect.
LLAMA3 = tuple(
    RopeScaling(kind="llama3", factor=factor, original_context=8192) for factor in (8.0, 32.0)
)


@torch.no_grad()
def load_gguf(
    file: str | Path, dtype: str | torch.dtype = "float32", device: str | torch.device = "cpu"
) -> Network:
    """The network in a GGUF file, in eval mode; CheckpointError names what does not fit."""
    path = Path(file)
    reader = open_gguf(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(path, reader, tensors)
    network = materialize(blueprint(config), dtype, device)
    places = network.state_dict()
    if config.tied:
        del places["head.weight"]
    for name, tensor in _tensors(path, tensors, config):
        if name not in places:
            raise CheckpointError(f"{path}: tensor for '{name}' has no place in the network")
        place = places.pop(name)
        if place.shape != tensor.shape:
            raise CheckpointError(
                f"{path}: tensor for '{name}' has shape {tuple(tensor.shape)}, "
                f"expected {tuple(place.shape)}"
            )
        if (where := first_non_finite(tensor)) is not None:
            raise CheckpointError(f"{path}: tensor for '{name}' is not finite at {where}")
        place.copy_(tensor)
    if places:
        raise CheckpointError(f"{path}: tensor for '{next(iter(places))}' is missing")
    return network.eval()


def open_gguf(path: Path) -> Any:
    """A reader over the file, or a CheckpointError that says why not."""
    try:
        from gguf import GGUFReader  # an extra: only those who convert need it
    except ImportError:
        raise CheckpointError("reading GGUF needs the 'gguf' library: pip install 'paddock[data]'") from None
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError, TypeError) as error:
        raise CheckpointError(f"{path}: truncated or not a GGUF file: {error}") from None


def _field(path: Path, reader: Any, key: str, default: Any = ...) -> Any:
    field = reader.get_field(key)
    if field is None:
        if default is ...:
            raise CheckpointError(f"{path}: '{key}' is missing")
        return default
    return field.contents()


def _config(path: Path, reader: Any, tensors: dict[str, Any]) -> ModelConfig:
    arch = _field(path, reader, "general.architecture")
    if arch not in FAMILIES:
        raise CheckpointError(
            f"{path}: no architecture called '{arch}' is known; there are {', '.join(FAMILIES)}"
        )

    def get(key: str, default: Any = ...) -> Any:
        return _field(path, reader, f"{arch}.{key}", default)

    hidden, heads, layers = get("embedding_length"), get("attention.head_count"), get("block_count")
    dim = get("attention.key_length", hidden // heads)
    eos = _field(path, reader, "tokenizer.ggml.eos_token_id", None)
    theta = float(get("rope.freq_base", 10_000.0))
    return ModelConfig(
        family=FAMILIES[arch],
        vocab=int(tensors["token_embd.weight"].shape[1]),
        hidden=hidden,
        context=get("context_length"),
        attention=("gqa",) * layers,
        mlp=("dense",) * layers,
        dense_inner=get("feed_forward_length"),
        rope=RopeSettings(theta=theta, layout="halves", scaling=_scaling(path, tensors, theta, dim)),
        gqa=GroupedSettings(
            heads=heads,
            kv_heads=get("attention.head_count_kv", heads),
            dim=dim,
            bias="qkv" if "blk.0.attn_q.bias" in tensors else "none",
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
        ),
        norm_eps=_short(get("attention.layer_norm_rms_epsilon")),
        tied="output.weight" not in tensors,
        eos=() if eos is None else (eos,),
        bos=_field(path, reader, "tokenizer.ggml.bos_token_id", None),
        pad=_field(path, reader, "tokenizer.ggml.padding_token_id", None),
    )


def _short(value: float) -> float:
    """GGUF stores float32: 9.9999997e-06 was meant as 1e-05."""
    return float(f"{value:.6g}")


def _scaling(path: Path, tensors: dict[str, Any], theta: float, dim: int) -> RopeScaling | None:
    if FREQUENCIES not in tensors:
        return None
    plain = frequencies(RopeSettings(theta=theta, layout="halves"), dim)
    stored = plain / torch.tensor(tensors[FREQUENCIES].data)
    for scaling in LLAMA3:
        guess = frequencies(RopeSettings(theta=theta, layout="halves", scaling=scaling), dim)
        if torch.allclose(stored, guess, rtol=1e-4):
            return scaling
    raise CheckpointError(f"{path}: '{FREQUENCIES}' is not the stretching of Llama 3.1 or 3.2")


def _tensors(
    path: Path, tensors: dict[str, Any], config: ModelConfig
) -> Iterator[tuple[str, Tensor]]:
    """Our names with float32 tensors."""
    from gguf.quants import dequantize

    for name, tensor in tensors.items():
        if name == FREQUENCIES:
            continue
        try:
            ours = _our_name(name)
            value = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        except (KeyError, ValueError, NotImplementedError) as error:
            raise CheckpointError(f"{path}: cannot use tensor '{name}': {error}") from None
        yield ours, _unwoven(value, ours, config)


def _our_name(name: str) -> str:
    module, kind = name.rsplit(".", 1)
    if not module.startswith("blk."):
        return f"{TOP[module]}.{kind}"
    _, layer, inside = module.split(".")
    return f"layers.{layer}.{LAYER[inside]}.{kind}"


def _unwoven(value: Tensor, ours: str, config: ModelConfig) -> Tensor:
    """GGUF rotates llama's heads by interleaved pairs and reorders their rows to match; undo it."""
    gqa = config.gqa
    assert gqa is not None
    heads = {"attention.q": gqa.heads, "attention.k": gqa.kv_heads}
    module = ours.rsplit(".", 1)[0].split(".", 2)[-1]
    if config.family != "llama" or module not in heads:
        return value
    return value.unflatten(0, (heads[module], gqa.dim // 2, 2)).transpose(1, 2).flatten(0, 2)
