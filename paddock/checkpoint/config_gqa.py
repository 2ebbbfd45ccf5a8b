"""config.json of the grouped-query families: llama, qwen2, qwen3."""

from paddock.checkpoint.config_common import (
    BOOL,
    NON_NEGATIVE_INT,
    POSITIVE_INT,
    ConfigJsonReader,
    Json,
    read_common,
    read_rope,
    write_common,
)
from paddock.checkpoint.safetensors_folder import CheckpointError
from paddock.model import ModelConfig
from paddock.model import config as model_config

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
LAYER_TYPES: dict[str, model_config.AttentionKind] = {
    "full_attention": "gqa",
    "sliding_attention": "swa",
}
KIND_NAMES = {kind: name for name, kind in LAYER_TYPES.items()}


def read_gqa_config(r: ConfigJsonReader, family: model_config.Family) -> ModelConfig:
    common = read_common(r)
    layers, heads = (
        r.pop("num_hidden_layers", POSITIVE_INT),
        r.pop("num_attention_heads", POSITIVE_INT),
    )
    attention, window = _read_kinds(r, family, layers)
    bias = r.pop("attention_bias", BOOL, False)
    r.expect("use_mrope", False)
    gqa = model_config.GQASettings(
        heads=heads,
        kv_heads=r.pop("num_key_value_heads", POSITIVE_INT, heads),
        dim=r.pop(
            "head_dim", POSITIVE_INT, 128 if family == "qwen3" else common["hidden"] // heads
        ),
        bias="qkv" if family == "qwen2" else "all" if bias else "none",
        qk_norm=family == "qwen3",
        window=window,
    )
    return ModelConfig(
        family=family,
        attention=attention,
        mlp=("dense",) * layers,
        rope=read_rope(r, "halves"),
        gqa=gqa,
        **common,
    )


def _read_kinds(
    r: ConfigJsonReader, family: model_config.Family, layers: int
) -> tuple[tuple[model_config.AttentionKind, ...], int | None]:
    """The attention kind of each layer, and the window size."""
    full = layers  # number of leading layers with full attention
    window = listed = None
    if family != "llama":
        window = r.pop("sliding_window", POSITIVE_INT, None)
        if not r.pop("use_sliding_window", BOOL, False):
            window = None
        limit = r.pop("max_window_layers", NON_NEGATIVE_INT, 28)
        full = layers if window is None else limit
        listed = r.per_layer("layer_types", LAYER_TYPES, layers)
    names = ("full_attention" if i < full else "sliding_attention" for i in range(layers))
    attention = listed or tuple(LAYER_TYPES[name] for name in names)
    return attention, window if "swa" in attention else None


def write_gqa_config(config: ModelConfig) -> Json:
    gqa = config.gqa
    if gqa is None:
        raise CheckpointError(f"the family '{config.family}' needs 'gqa' settings")
    data = write_common(config, ARCHITECTURES[config.family]) | {
        "num_attention_heads": gqa.heads,
        "num_key_value_heads": gqa.kv_heads,
        "head_dim": gqa.dim,
        "attention_dropout": 0.0,
    }
    if config.family == "llama":
        return data | {"attention_bias": gqa.bias == "all", "mlp_bias": False}
    if config.family == "qwen3":
        data["attention_bias"] = gqa.bias == "all"
    return data | {
        "use_sliding_window": "swa" in config.attention,
        "sliding_window": gqa.window,
        "layer_types": [KIND_NAMES.get(kind, kind) for kind in config.attention],
    }
