"""config.json fields that all model families share, and a strict reader."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError

from paddock.checkpoint.safetensors_folder import BLOCK, CheckpointError
from paddock.model import ModelConfig
from paddock.model import config as model_config

COMPRESSED_TENSORS = "compressed-tensors"  # quant_method of checkpoints with integer weights
Json = dict[str, Any]
Value = TypeVar("Value")

# Keys that do not affect any tensor.
IGNORED_KEYS = frozenset(
    [
        "architectures",
        "auto_map",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "is_encoder_decoder",
        "chunk_size_feed_forward",
        "id2label",
        "label2id",
        "problem_type",
        "name_or_path",
        "attention_dropout",
        "pretraining_tp",
        "ep_size",
        "aux_loss_alpha",
        "seq_aux",
        "output_router_logits",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "is_llama_config",
        "rope_interleaved",
        "transformers.js_config",
        "moe_router_dtype",
        "keys_to_ignore_at_inference",
        "tokenizer_class",
    ]
)


@dataclass(frozen=True, slots=True)
class ConfigValueType:
    """The allowed values of a setting: a description for messages and a predicate."""

    words: str
    fits: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


def _is_id(value: Any) -> bool:
    return type(value) is int


POSITIVE_INT = ConfigValueType("a positive integer", lambda value: type(value) is int and value > 0)
NON_NEGATIVE_INT = ConfigValueType(
    "a non-negative integer", lambda value: type(value) is int and value >= 0
)
POSITIVE_FLOAT = ConfigValueType("a positive number", _is_number)
NON_NEGATIVE_FLOAT = ConfigValueType(
    "a non-negative number", lambda value: value == 0 or _is_number(value)
)
BOOL = ConfigValueType("true or false", lambda value: type(value) is bool)
TOKEN_ID = ConfigValueType("a token id", _is_id)
TOKEN_IDS = ConfigValueType(
    "a token id or a list of them",
    lambda value: _is_id(value) or (isinstance(value, list) and all(map(_is_id, value))),
)
STRING = ConfigValueType("a string", lambda value: isinstance(value, str))
STRING_LIST = ConfigValueType(
    "a list of strings or a string of letters",
    lambda value: isinstance(value, list | str) and all(isinstance(word, str) for word in value),
)
OBJECT = ConfigValueType("an object", lambda value: isinstance(value, dict))
ANY = ConfigValueType("anything", lambda _: True)


class ConfigJsonReader:
    """A config.json whose keys are consumed one by one; unknown keys are an error."""

    def __init__(self, data: Json, where: str) -> None:
        self.where = where
        self._left = {
            key: value
            for key, value in data.items()
            if value is not None and key not in IGNORED_KEYS and not key.startswith("_")
        }
        self._read_keys: set[str] = set()

    def fail(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.where}: {what}")

    def has(self, key: str) -> bool:
        return key in self._left

    def pop(self, key: str, kind: ConfigValueType, default: Any = ...) -> Any:
        """Remove and return the value of a key, which must be of its kind. A missing key is an
        error unless there is a default; null counts as missing."""
        self._read_keys.add(key)
        if key not in self._left:
            if default is ...:
                self.fail(f"'{key}' is missing{_hint(key, self._left, 'did you mean {}')}")
            return default
        value = self._left.pop(key)
        if not kind.fits(value):
            self.fail(f"'{key}' must be {kind.words}, got {value!r}")
        return value

    def expect(self, key: str, *allowed: Any) -> None:
        """Require one of the allowed values of a key that may be missing."""
        value = self.pop(key, ANY, allowed[0])
        if value not in allowed:
            self.fail(f"'{key}' must be {' or '.join(map(repr, allowed))}, got {value!r}")

    def per_layer(
        self, key: str, known: Mapping[str, Value], layers: int
    ) -> tuple[Value, ...] | None:
        """A list with one name per layer, translated; None where the key is missing."""
        words = self.pop(key, STRING_LIST, None)
        if words is None:
            return None
        if unknown := [word for word in words if word not in known]:
            self.fail(f"'{key}' must consist of {', '.join(known)}, got {unknown[0]!r}")
        if len(words) != layers:
            self.fail(f"'{key}' has {len(words)} entries for {layers} layers")
        return tuple(known[word] for word in words)

    def check_empty(self) -> None:
        for key in self._left:
            self.fail(f"unknown setting '{key}'{_hint(key, self._read_keys, 'did you mean {}')}")


def _hint(key: str, others: Any, question: str) -> str:
    near = get_close_matches(key, others, n=1)
    return f"; {question.format(repr(near[0]))}?" if near else ""


def format_validation_error(error: ValidationError) -> str:
    """The first error of pydantic in one line."""
    first = error.errors()[0]
    location = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"'{location}' is missing"
    message = first["msg"].removeprefix("Value error, ")
    return f"'{location}' = {first['input']!r}: {message}" if location else message


def check_quantization_config(r: ConfigJsonReader) -> None:
    """Accept block-scaled float8, which is dequantized when read, and compressed-tensors, which
    has its own loader (`load.QUANTIZED_LOADERS`); fail on any other scheme."""
    values = r.pop("quantization_config", OBJECT, {})
    if values.get("quant_method") == COMPRESSED_TENSORS:
        return
    known = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"}
    for key, value in known.items() if values else ():
        found = values.get(key, "e4m3" if key == "fmt" else None)
        if found != value:
            r.fail(f"'quantization_config.{key}' must be {value!r}, got {found!r}")


# Further settings of each kind of RoPE scaling, besides its factor.
SCALING: dict[str, dict[str, ConfigValueType]] = {
    "linear": {},
    "llama3": {"low_freq_factor": POSITIVE_FLOAT, "high_freq_factor": POSITIVE_FLOAT},
    "yarn": {
        "beta_fast": POSITIVE_FLOAT,
        "beta_slow": POSITIVE_FLOAT,
        "mscale": NON_NEGATIVE_FLOAT,
        "mscale_all_dim": NON_NEGATIVE_FLOAT,
        "attention_factor": POSITIVE_FLOAT,
        "truncate": BOOL,
    },
}


def read_rope(r: ConfigJsonReader, layout: model_config.RopeLayout) -> model_config.RopeSettings:
    parameters = r.pop("rope_parameters", OBJECT, {}) | r.pop("rope_scaling", OBJECT, {})
    inner = ConfigJsonReader(parameters, f"{r.where}: rope parameters")
    theta = inner.pop("rope_theta", POSITIVE_FLOAT, r.pop("rope_theta", POSITIVE_FLOAT, 10_000.0))
    for reader in (r, inner):
        reader.expect("partial_rotary_factor", 1.0)
    kind = inner.pop("rope_type", STRING, inner.pop("type", STRING, "default"))
    scaling = None if kind == "default" else _read_scaling(inner, kind)
    inner.check_empty()
    return model_config.RopeSettings(theta=float(theta), layout=layout, scaling=scaling)


def _read_scaling(r: ConfigJsonReader, kind: Any) -> model_config.RopeScaling:
    if kind not in SCALING:
        r.fail(f"'rope_type' must be one of default, {', '.join(SCALING)}, got {kind!r}")
    return model_config.RopeScaling(
        kind=kind,
        factor=r.pop("factor", POSITIVE_FLOAT),
        original_context=r.pop("original_max_position_embeddings", POSITIVE_INT, None),
        **{key: r.pop(key, what) for key, what in SCALING[kind].items() if r.has(key)},
    )


def write_rope(rope: model_config.RopeSettings) -> Json:
    parameters: Json = {"rope_theta": rope.theta, "rope_type": "default"}
    if rope.scaling is not None:
        # Readers share our defaults for yarn but have none for llama3.
        values = rope.scaling.model_dump(exclude_defaults=rope.scaling.kind == "yarn")
        names = {"kind": "rope_type", "original_context": "original_max_position_embeddings"}
        names |= {key: key for key in ("factor", *SCALING[rope.scaling.kind])}
        parameters |= {names[k]: v for k, v in values.items() if k in names and v is not None}
    return {"rope_parameters": parameters}


def read_common(r: ConfigJsonReader) -> Json:
    r.expect("hidden_act", "silu")
    r.expect("mlp_bias", False)
    eos = r.pop("eos_token_id", TOKEN_IDS, [])
    return {
        "vocab": r.pop("vocab_size", POSITIVE_INT),
        "hidden": r.pop("hidden_size", POSITIVE_INT),
        "context": r.pop("max_position_embeddings", POSITIVE_INT),
        "dense_inner": r.pop("intermediate_size", POSITIVE_INT),
        "norm_eps": r.pop("rms_norm_eps", POSITIVE_FLOAT),
        "tied": r.pop("tie_word_embeddings", BOOL, False),
        "init": model_config.WeightInitSettings(
            std=r.pop("initializer_range", POSITIVE_FLOAT, 0.02)
        ),
        "eos": tuple(eos) if isinstance(eos, list) else (eos,),
        "bos": r.pop("bos_token_id", TOKEN_ID, None),
        "pad": r.pop("pad_token_id", TOKEN_ID, None),
    }


def write_common(config: ModelConfig, architecture: str) -> Json:
    eos = list(config.eos)
    return {
        "architectures": [architecture],
        "model_type": config.family,
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "max_position_embeddings": config.context,
        "intermediate_size": config.dense_inner,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "initializer_range": config.init.std,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "bos_token_id": config.bos,
        "pad_token_id": config.pad,
        **write_rope(config.rope),
    }
