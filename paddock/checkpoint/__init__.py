"""Checkpoints in the Hugging Face layout, training state, GGUF and weight sync.

checksum.py        tensor checksums in the header of a safetensors file
config_common.py   config.json fields that all families share
config_gqa.py      config.json of llama, qwen2 and qwen3
config_json.py     config.json to ModelConfig and back
config_mla.py      config.json of glm_moe_dsa, glm4_moe_lite and deepseek_v3
safetensors_folder.py  lazily opened folder of safetensors files
gguf.py            loads GGUF files of the llama and qwen families
load.py            loads a network from a checkpoint folder
tensor_names.py    maps our tensor names to the released ones
save.py            saves a network as a checkpoint folder, atomically
training_state.py  training checkpoints: weights, optimizer state and other state
weight_sync.py     weight sync: updates from a trainer into a serving network
"""

from paddock.checkpoint import safetensors_folder, tensor_names, training_state
from paddock.checkpoint.config_common import COMPRESSED_TENSORS
from paddock.checkpoint.config_json import config_to_json
from paddock.checkpoint.gguf import load_gguf
from paddock.checkpoint.load import (
    QUANTIZED_LOADERS,
    drop_missing_mtp,
    load_pretrained,
    match_tensors,
    materialize,
    meta_model,
    open_checkpoint,
    parse_dtype,
    quant_method,
    read_config,
    read_tensors,
)
from paddock.checkpoint.safetensors_folder import CheckpointError
from paddock.checkpoint.save import save_pretrained, write_tensors
from paddock.checkpoint.training_state import latest_model
from paddock.checkpoint.weight_sync import (
    WeightPublisher,
    WeightUpdate,
    deserialize_update,
    iter_released_tensors,
    load_weights,
    serialize_update,
    tensor_digest,
    weight_destinations,
)

__all__ = [
    "COMPRESSED_TENSORS",
    "QUANTIZED_LOADERS",
    "CheckpointError",
    "WeightPublisher",
    "WeightUpdate",
    "config_to_json",
    "deserialize_update",
    "drop_missing_mtp",
    "iter_released_tensors",
    "latest_model",
    "load_gguf",
    "load_pretrained",
    "load_weights",
    "match_tensors",
    "materialize",
    "meta_model",
    "open_checkpoint",
    "parse_dtype",
    "quant_method",
    "read_config",
    "read_tensors",
    "safetensors_folder",
    "save_pretrained",
    "serialize_update",
    "tensor_digest",
    "tensor_names",
    "training_state",
    "weight_destinations",
    "write_tensors",
]
