"""Released config.json files and our configurations, both ways.

A key we do not know is refused: it may change what the weights mean. Keys that say nothing about
the network are listed in config_common and ignored.
"""

import json
from collections.abc import Callable

from pydantic import ValidationError

from paddock.checkpoint.config_common import (
    OBJECT,
    TEXT,
    Json,
    Reader,
    explained,
    refuse_unknown_quantization,
)
from paddock.checkpoint.config_grouped import read_grouped, write_grouped
from paddock.checkpoint.config_latent import read_latent, write_latent
from paddock.checkpoint.folder import CheckpointError
from paddock.model.config import Family, ModelConfig


def config_from_json(data: Json, where: str = "config.json") -> ModelConfig:
    """The network a config.json describes; CheckpointError names what is wrong with it."""
    reader = Reader(data, where)
    family = reader.take("model_type", TEXT)
    if family not in READ:
        reader.refuse(f"no model_type called {family!r} is known; there are {', '.join(READ)}")
    try:
        refuse_unknown_quantization(reader)
        config = READ[family](reader, family)
    except ValidationError as error:
        raise CheckpointError(f"{where}: {explained(error)}") from None
    reader.refuse_leftovers()
    return config


def config_to_json(config: ModelConfig) -> Json:
    """What the released layout says about this network; CheckpointError where it cannot say it."""
    data = WRITE[config.family](config)
    understood = config_from_json(data, f"the released layout of '{config.family}'")
    for field in ModelConfig.model_fields:
        ours, theirs = getattr(config, field), getattr(understood, field)
        if ours != theirs and field != "init":  # how it was born changes nothing now
            raise CheckpointError(
                f"the released layout of '{config.family}' cannot say {field} = {ours!r}; "
                "the family 'paddock' can"
            )
    return data


def _read_own(r: Reader, family: Family) -> ModelConfig:  # noqa: ARG001
    return ModelConfig.model_validate_json(json.dumps(r.take("paddock", OBJECT)))


def _write_own(config: ModelConfig) -> Json:
    return {
        "architectures": ["PaddockNetwork"],
        "model_type": "paddock",
        "paddock": config.model_dump(mode="json"),
    }


READ: dict[Family, Callable[[Reader, Family], ModelConfig]] = {
    "glm_moe_dsa": read_latent,
    "glm4_moe_lite": read_latent,
    "deepseek_v3": read_latent,
    "llama": read_grouped,
    "qwen2": read_grouped,
    "qwen3": read_grouped,
    "paddock": _read_own,
}
WRITE: dict[Family, Callable[[ModelConfig], Json]] = {
    "glm_moe_dsa": write_latent,
    "glm4_moe_lite": write_latent,
    "deepseek_v3": write_latent,
    "llama": write_grouped,
    "qwen2": write_grouped,
    "qwen3": write_grouped,
    "paddock": _write_own,
}
