"""config.json to ModelConfig and back.

An unknown key is an error: it may change what the weights mean. Keys that do not affect the network
are listed in config_common and ignored.
"""

import json
from collections.abc import Callable

from pydantic import ValidationError

from paddock.checkpoint.config_common import (
    OBJECT,
    STRING,
    ConfigJsonReader,
    Json,
    check_quantization_config,
    format_validation_error,
)
from paddock.checkpoint.config_gqa import read_gqa_config, write_gqa_config
from paddock.checkpoint.config_mla import read_mla_config, write_mla_config
from paddock.checkpoint.safetensors_folder import CheckpointError
from paddock.model import ModelConfig
from paddock.model import config as model_config


def config_from_json(data: Json, where: str = "config.json") -> ModelConfig:
    """The configuration that a config.json describes; raises CheckpointError if it is invalid."""
    reader = ConfigJsonReader(data, where)
    family = reader.pop("model_type", STRING)
    if family not in READ:
        reader.fail(f"'model_type' must be one of {', '.join(READ)}, got {family!r}")
    try:
        check_quantization_config(reader)
        config = READ[family](reader, family)
    except ValidationError as error:
        raise CheckpointError(f"{where}: {format_validation_error(error)}") from None
    reader.check_empty()
    return config


def config_to_json(config: ModelConfig) -> Json:
    """The config.json of a configuration; raises CheckpointError where the family cannot express
    it."""
    data = WRITE[config.family](config)
    reread = config_from_json(data, f"config.json of '{config.family}'")
    for field in ModelConfig.model_fields:
        ours, found = getattr(config, field), getattr(reread, field)
        if ours != found and field != "init":  # initialisation does not affect existing weights
            raise CheckpointError(
                f"config.json of '{config.family}' cannot express {field} = {ours!r}; "
                "use the family 'paddock'"
            )
    return data


def _read_own(r: ConfigJsonReader, family: model_config.Family) -> ModelConfig:  # noqa: ARG001
    return ModelConfig.model_validate_json(json.dumps(r.pop("paddock", OBJECT)))


def _write_own(config: ModelConfig) -> Json:
    return {
        "architectures": ["PaddockNetwork"],
        "model_type": "paddock",
        "paddock": config.model_dump(mode="json"),
    }


READ: dict[model_config.Family, Callable[[ConfigJsonReader, model_config.Family], ModelConfig]] = {
    "glm_moe_dsa": read_mla_config,
    "glm4_moe_lite": read_mla_config,
    "deepseek_v3": read_mla_config,
    "llama": read_gqa_config,
    "qwen2": read_gqa_config,
    "qwen3": read_gqa_config,
    "paddock": _read_own,
}
WRITE: dict[model_config.Family, Callable[[ModelConfig], Json]] = {
    "glm_moe_dsa": write_mla_config,
    "glm4_moe_lite": write_mla_config,
    "deepseek_v3": write_mla_config,
    "llama": write_gqa_config,
    "qwen2": write_gqa_config,
    "qwen3": write_gqa_config,
    "paddock": _write_own,
}
