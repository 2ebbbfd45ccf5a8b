"""Weights on disk and on the wire, in the released layout.

checksum.py        checksums of tensors, in the header of their file
config_common.py   what all families' config.json files share
config_gqa.py      config.json of llama, qwen2 and qwen3
config_json.py     config.json as a configuration, and back
config_mla.py      config.json of glm_moe_dsa, glm4_moe_lite and deepseek_v3
safetensors_folder.py  a folder of safetensors, opened without reading it
gguf.py            GGUF files of the llama and qwen families
load.py            a released folder as a network
tensor_names.py    our tensor names and the released ones
save.py            a network as a released folder, whole or not at all
training_state.py  the state of a training run
weight_sync.py     weights from a trainer into a network that serves
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
    "write_tensors",
]
