"""config.json of the MLA families: glm_moe_dsa, glm4_moe_lite, deepseek_v3."""

from paddock.checkpoint.config_common import (
    ANY,
    BOOL,
    NON_NEGATIVE_INT,
    POSITIVE_FLOAT,
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
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
# Number of leading dense layers where config.json does not give it.
LEADING_DENSE = {"glm_moe_dsa": 3, "glm4_moe_lite": 1, "deepseek_v3": 3}
# Depths that the MTP layer was trained at; released files do not give them.
MTP_DEPTHS = {"glm_moe_dsa": 3, "glm4_moe_lite": 1, "deepseek_v3": 1}
SHARE_INDEX = "index_share_for_mtp_iteration"
MLP_KINDS: dict[str, model_config.MlpKind] = {"dense": "dense", "sparse": "moe"}
INDEXER_KINDS: dict[str, model_config.IndexerKind] = {
    "full": "full",
    "shared": "shared",
    "F": "full",  # in patterns
    "S": "shared",
}


def read_mla_config(r: ConfigJsonReader, family: model_config.Family) -> ModelConfig:
    attention: model_config.AttentionKind = "dsa" if family == "glm_moe_dsa" else "mla"
    common = read_common(r)
    layers = r.pop("num_hidden_layers", POSITIVE_INT)
    heads = r.pop("num_attention_heads", POSITIVE_INT)
    r.expect("num_key_value_heads", heads)
    r.expect("attention_bias", False)
    r.expect("scoring_func", "sigmoid")
    r.expect("topk_method", "noaux_tc")
    r.expect("moe_layer_freq", 1)
    mla = model_config.MLASettings(
        heads=heads,
        q_rank=r.pop("q_lora_rank", POSITIVE_INT, None),
        kv_rank=r.pop("kv_lora_rank", POSITIVE_INT),
        nope=r.pop("qk_nope_head_dim", POSITIVE_INT),
        rope=r.pop("qk_rope_head_dim", POSITIVE_INT),
        value=r.pop("v_head_dim", POSITIVE_INT),
        norm_eps=r.pop("latent_norm_eps", POSITIVE_FLOAT, common["norm_eps"]),
    )
    r.expect("qk_head_dim", mla.qk_head_dim)
    r.pop("head_dim", ANY, None)  # exporters disagree on it; the dims above decide
    mlp = _read_mlp_kinds(r, layers, LEADING_DENSE[family])
    return ModelConfig(
        family=family,
        attention=(attention,) * layers,
        mlp=mlp,
        rope=read_rope(r, _read_layout(r, family)),
        mla=mla,
        indexer=_read_indexer(r, layers) if attention == "dsa" else None,
        moe=_read_experts(r) if "moe" in mlp or r.has("n_routed_experts") else None,
        mtp=_read_mtp(r, family),
        **common,
    )


def _read_layout(r: ConfigJsonReader, family: model_config.Family) -> model_config.RopeLayout:
    if family == "glm_moe_dsa":
        r.expect("rope_interleave", True)  # transformers does not read it
        return "interleaved"
    return "interleaved" if r.pop("rope_interleave", BOOL, True) else "halves"


def _read_mlp_kinds(
    r: ConfigJsonReader, layers: int, leading: int
) -> tuple[model_config.MlpKind, ...]:
    dense = min(r.pop("first_k_dense_replace", NON_NEGATIVE_INT, leading), layers)
    listed = r.per_layer("mlp_layer_types", MLP_KINDS, layers)
    return listed or ("dense",) * dense + ("moe",) * (layers - dense)


def _read_experts(r: ConfigJsonReader) -> model_config.MoESettings:
    return model_config.MoESettings(
        experts=r.pop("n_routed_experts", POSITIVE_INT),
        active=r.pop("num_experts_per_tok", POSITIVE_INT),
        inner=r.pop("moe_intermediate_size", POSITIVE_INT),
        shared=r.pop("n_shared_experts", NON_NEGATIVE_INT),
        groups=r.pop("n_group", POSITIVE_INT),
        groups_kept=r.pop("topk_group", POSITIVE_INT),
        normalize=r.pop("norm_topk_prob", BOOL),
        scale=r.pop("routed_scaling_factor", POSITIVE_FLOAT),
    )


def _read_indexer(r: ConfigJsonReader, layers: int) -> model_config.IndexerSettings:
    r.expect("indexer_rope_interleave", True)
    r.per_layer("layer_types", {"indexed_attention": "dsa"}, layers)
    return model_config.IndexerSettings(
        heads=r.pop("index_n_heads", POSITIVE_INT),
        dim=r.pop("index_head_dim", POSITIVE_INT),
        topk=r.pop("index_topk", POSITIVE_INT),
        layers=_read_indexer_kinds(r, layers),
    )


def _read_indexer_kinds(r: ConfigJsonReader, layers: int) -> tuple[model_config.IndexerKind, ...]:
    """From the list, else the pattern, else the released rule."""
    freq = r.pop("index_topk_freq", POSITIVE_INT, 1)
    offset = r.pop("index_skip_topk_offset", NON_NEGATIVE_INT, 2)
    listed = r.per_layer("indexer_types", INDEXER_KINDS, layers)
    pattern = r.per_layer("index_topk_pattern", INDEXER_KINDS, layers)
    return listed or pattern or model_config.indexer_layers(layers, freq=freq, offset=offset)


def _read_mtp(r: ConfigJsonReader, family: model_config.Family) -> model_config.MTPSettings | None:
    key, alias = "num_nextn_predict_layers", "num_mtp_layers"
    count = max(r.pop(key, NON_NEGATIVE_INT, 0), r.pop(alias, NON_NEGATIVE_INT, 0))
    depths = r.pop("mtp_depths", POSITIVE_INT, MTP_DEPTHS[family])
    shared = r.pop(SHARE_INDEX, BOOL, False)
    if shared and family != "glm_moe_dsa":
        r.fail(f"'{SHARE_INDEX}' is True, but the family has no indexer")
    if count > 1:
        r.fail(f"'{key}' must be 0 or 1 (one layer serves every depth), got {count}")
    return model_config.MTPSettings(depths=depths, share_index=shared) if count else None


def write_mla_config(config: ModelConfig) -> Json:
    mla, moe = config.mla, config.moe
    if mla is None:
        raise CheckpointError(f"the family '{config.family}' needs 'mla' settings")
    data = write_common(config, ARCHITECTURES[config.family]) | {
        "num_attention_heads": mla.heads,
        "num_key_value_heads": mla.heads,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "q_lora_rank": mla.q_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_nope_head_dim": mla.nope,
        "qk_rope_head_dim": mla.rope,
        "qk_head_dim": mla.qk_head_dim,
        "head_dim": mla.rope,
        "v_head_dim": mla.value,
        "latent_norm_eps": mla.norm_eps,
        "rope_interleave": config.rope.layout == "interleaved",
        "first_k_dense_replace": _leading_dense(config),
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0 if config.mtp is None else 1,
    }
    if config.family != "deepseek_v3":
        data["mlp_layer_types"] = ["sparse" if k == "moe" else "dense" for k in config.mlp]
    if config.mtp is not None:
        data["mtp_depths"] = config.mtp.depths
        if config.mtp.share_index:
            data[SHARE_INDEX] = True
    if moe is not None:
        data |= {
            "n_routed_experts": moe.experts,
            "num_experts_per_tok": moe.active,
            "moe_intermediate_size": moe.inner,
            "n_shared_experts": moe.shared,
            "n_group": moe.groups,
            "topk_group": moe.groups_kept,
            "norm_topk_prob": moe.normalize,
            "routed_scaling_factor": moe.scale,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        }
    if config.indexer is not None:
        data |= {
            "index_n_heads": config.indexer.heads,
            "index_head_dim": config.indexer.dim,
            "index_topk": config.indexer.topk,
            "indexer_rope_interleave": True,
            "indexer_types": list(config.indexer.layers),
        }
    return data


def _leading_dense(config: ModelConfig) -> int:
    return config.mlp.index("moe") if "moe" in config.mlp else config.layers
