"""What all families' config.json files share: strict reading, vocabulary, norms, rotation."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError

from paddock.checkpoint.folder import BLOCK, CheckpointError
from paddock.model.config import (
    ModelConfig,
    RopeLayout,
    RopeScaling,
    RopeSettings,
    WeightInitSettings,
)

INTEGERS = "compressed-tensors"  # the quant_method of checkpoints that hold integers
Json = dict[str, Any]
Word = TypeVar("Word")

# Written by tools, read by tools; no tensor depends on them.
SILENT = frozenset(
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
class Kind:
    """What a setting may be: in words, and as a test."""

    words: str
    fits: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


def _is_id(value: Any) -> bool:
    return type(value) is int


COUNT = Kind("a positive whole number", lambda value: type(value) is int and value > 0)
WHOLE = Kind("a whole number from zero up", lambda value: type(value) is int and value >= 0)
NUMBER = Kind("a positive number", _is_number)
UNSIGNED = Kind("a number from zero up", lambda value: value == 0 or _is_number(value))
FLAG = Kind("true or false", lambda value: type(value) is bool)
ID = Kind("a token id", _is_id)
IDS = Kind(
    "a token id or a list of them",
    lambda value: _is_id(value) or (isinstance(value, list) and all(map(_is_id, value))),
)
TEXT = Kind("text", lambda value: isinstance(value, str))
WORDS = Kind(
    "a list of words or a string of letters",
    lambda value: isinstance(value, list | str) and all(isinstance(word, str) for word in value),
)
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
ANYTHING = Kind("anything", lambda _: True)


class Reader:
    """A config.json whose keys are taken out one by one; what is left over is refused."""

    def __init__(self, data: Json, where: str) -> None:
        self.where = where
        self._left = {
            key: value
            for key, value in data.items()
            if value is not None and key not in SILENT and not key.startswith("_")
        }
        self._asked: set[str] = set()

    def refuse(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.where}: {what}")

    def has(self, key: str) -> bool:
        return key in self._left

    def take(self, key: str, kind: Kind, default: Any = ...) -> Any:
        """The value of a key, which must be of its kind; its absence is an error unless there is a
        default. null is absence."""
        self._asked.add(key)
        if key not in self._left:
            if default is ...:
                self.refuse(f"'{key}' is missing{_hint(key, self._left, 'is {} meant')}")
            return default
        value = self._left.pop(key)
        if not kind.fits(value):
            self.refuse(f"'{key}' is {value!r}; it must be {kind.words}")
        return value

    def expect(self, key: str, *allowed: Any) -> None:
        """A key that may be absent but must not say anything else."""
        value = self.take(key, ANYTHING, allowed[0])
        if value not in allowed:
            self.refuse(f"'{key}' is {value!r}; only {' or '.join(map(repr, allowed))} is known")

    def per_layer(
        self, key: str, known: Mapping[str, Word], layers: int
    ) -> tuple[Word, ...] | None:
        """A list of one word a layer, translated; None where there is none."""
        words = self.take(key, WORDS, None)
        if words is None:
            return None
        if unknown := [word for word in words if word not in known]:
            self.refuse(f"'{key}' names {unknown[0]!r}; there are {', '.join(known)}")
        if len(words) != layers:
            self.refuse(f"'{key}' names {len(words)} layers of {layers}")
        return tuple(known[word] for word in words)

    def refuse_leftovers(self) -> None:
        for key in self._left:
            self.refuse(f"unknown setting '{key}'{_hint(key, self._asked, 'did you mean {}')}")


def _hint(key: str, others: Any, question: str) -> str:
    near = get_close_matches(key, others, n=1)
    return f"; {question.format(repr(near[0]))}?" if near else ""


def explained(error: ValidationError) -> str:
    """The first thing pydantic has to say, in a line."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"'{place}' is missing"
    message = first["msg"].removeprefix("Value error, ")
    return f"'{place}' = {first['input']!r}: {message}" if place else message


def refuse_unknown_quantization(r: Reader) -> None:
    """float8 in square blocks is multiplied out when read, and integers are read by a loader of
    their own (see load.LOADERS); nothing else would be understood."""
    said = r.take("quantization_config", OBJECT, {})
    if said.get("quant_method") == INTEGERS:
        return
    known = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"}
    for key, value in known.items() if said else ():
        found = said.get(key, "e4m3" if key == "fmt" else None)
        if found != value:
            r.refuse(f"'quantization_config.{key}' is {found!r}; only {value!r} is known")


# What each kind of stretching may be told besides its factor, and of what kind that is.
SCALING: dict[str, dict[str, Kind]] = {
    "linear": {},
    "llama3": {"low_freq_factor": NUMBER, "high_freq_factor": NUMBER},
    "yarn": {
        "beta_fast": NUMBER,
        "beta_slow": NUMBER,
        "mscale": UNSIGNED,
        "mscale_all_dim": UNSIGNED,
        "attention_factor": NUMBER,
        "truncate": FLAG,
    },
}


def read_rope(r: Reader, layout: RopeLayout) -> RopeSettings:
    parameters = r.take("rope_parameters", OBJECT, {}) | r.take("rope_scaling", OBJECT, {})
    inner = Reader(parameters, f"{r.where}: rope parameters")
    theta = inner.take("rope_theta", NUMBER, r.take("rope_theta", NUMBER, 10_000.0))
    for reader in (r, inner):
        reader.expect("partial_rotary_factor", 1.0)
    kind = inner.take("rope_type", TEXT, inner.take("type", TEXT, "default"))
    scaling = None if kind == "default" else _read_scaling(inner, kind)
    inner.refuse_leftovers()
    return RopeSettings(theta=float(theta), layout=layout, scaling=scaling)


def _read_scaling(r: Reader, kind: Any) -> RopeScaling:
    if kind not in SCALING:
        r.refuse(f"no rope_type called {kind!r} is known; there are default, {', '.join(SCALING)}")
    return RopeScaling(
        kind=kind,
        factor=r.take("factor", NUMBER),
        original_context=r.take("original_max_position_embeddings", COUNT, None),
        **{key: r.take(key, what) for key, what in SCALING[kind].items() if r.has(key)},
    )


def write_rope(rope: RopeSettings) -> Json:
    parameters: Json = {"rope_theta": rope.theta, "rope_type": "default"}
    if rope.scaling is not None:
        # Readers have defaults for yarn, the same as ours, but none for llama3.
        said = rope.scaling.model_dump(exclude_defaults=rope.scaling.kind == "yarn")
        names = {"kind": "rope_type", "original_context": "original_max_position_embeddings"}
        names |= {key: key for key in ("factor", *SCALING[rope.scaling.kind])}
        parameters |= {names[k]: v for k, v in said.items() if k in names and v is not None}
    return {"rope_parameters": parameters}


def read_common(r: Reader) -> Json:
    r.expect("hidden_act", "silu")
    r.expect("mlp_bias", False)
    eos = r.take("eos_token_id", IDS, [])
    return {
        "vocab": r.take("vocab_size", COUNT),
        "hidden": r.take("hidden_size", COUNT),
        "context": r.take("max_position_embeddings", COUNT),
        "dense_inner": r.take("intermediate_size", COUNT),
        "norm_eps": r.take("rms_norm_eps", NUMBER),
        "tied": r.take("tie_word_embeddings", FLAG, False),
        "init": WeightInitSettings(std=r.take("initializer_range", NUMBER, 0.02)),
        "eos": tuple(eos) if isinstance(eos, list) else (eos,),
        "bos": r.take("bos_token_id", ID, None),
        "pad": r.take("pad_token_id", ID, None),
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
