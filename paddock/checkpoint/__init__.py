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

from paddock.checkpoint.gguf import load_gguf
from paddock.checkpoint.load import load_pretrained, read_config
from paddock.checkpoint.safetensors_folder import CheckpointError
from paddock.checkpoint.save import save_pretrained

__all__ = [
    "CheckpointError",
    "load_gguf",
    "load_pretrained",
    "read_config",
    "save_pretrained",
]
