"""config.json: released files are read as they are, invalid ones are rejected by name."""

import json

import pytest

from paddock.checkpoint import CheckpointError, read_config
from paddock.checkpoint.config_json import config_from_json, config_to_json
from paddock.model import preset
from paddock.model.config import RopeScaling, RopeSettings
from tests.model.networks import grouped_config, latent_config

# As released: zai-org/GLM-5.1.
GLM5 = """{"architectures": ["GlmMoeDsaForCausalLM"], "attention_bias": false,
"attention_dropout": 0.0, "dtype": "bfloat16", "eos_token_id": [154820, 154827, 154829],
"ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "head_dim": 64,
"hidden_size": 6144, "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048,
"indexer_rope_interleave": true, "initializer_range": 0.02, "intermediate_size": 12288,
"kv_lora_rank": 512, "max_position_embeddings": 202752, "moe_intermediate_size": 2048,
"moe_layer_freq": 1, "model_type": "glm_moe_dsa", "n_group": 1, "n_routed_experts": 256,
"n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 64,
"num_experts_per_tok": 8, "num_hidden_layers": 78, "num_key_value_heads": 64,
"num_nextn_predict_layers": 1, "pad_token_id": 154820, "pretraining_tp": 1, "q_lora_rank": 2048,
"qk_head_dim": 256, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
"rope_interleave": true, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
"routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": false,
"topk_group": 1, "topk_method": "noaux_tc", "transformers_version": "5.4.0", "use_cache": true,
"v_head_dim": 256, "vocab_size": 154880}"""
# As released: deepseek-ai/DeepSeek-R1.
DEEPSEEK = """{"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false,
"attention_dropout": 0.0, "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
"bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3,
"hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432,
"kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
"moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
"n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 128,
"num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
"num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
"qk_rope_head_dim": 64, "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3",
"quant_method": "fp8", "weight_block_size": [128, 128]}, "rms_norm_eps": 1e-06,
"rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
"mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"},
"rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
"tie_word_embeddings": false, "topk_group": 4, "topk_method": "noaux_tc",
"torch_dtype": "bfloat16", "transformers_version": "4.46.3", "use_cache": true,
"v_head_dim": 128, "vocab_size": 129280}"""
# As released: meta-llama/Llama-3.2-1B, Qwen/Qwen2.5-0.5B and Qwen/Qwen3-0.6B.
LLAMA = """{"architectures": ["LlamaForCausalLM"], "attention_bias": false,
"attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64,
"hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
"max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
"num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
"pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0,
"high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
"rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings": true,
"torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0", "use_cache": true,
"vocab_size": 128256}"""
QWEN2 = """{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0,
"bos_token_id": 151643, "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896,
"initializer_range": 0.02, "intermediate_size": 4864, "max_position_embeddings": 32768,
"max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
"num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
"rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": true,
"torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": true,
"use_mrope": false, "use_sliding_window": false, "vocab_size": 151936}"""
QWEN3 = """{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false,
"attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128,
"hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
"max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
"num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
"rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
"tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
"use_cache": true, "use_sliding_window": false, "vocab_size": 151936}"""


def test_the_released_glm5_is_our_preset():
    assert config_from_json(json.loads(GLM5)) == preset("glm5")


def test_the_released_glm52_is_our_preset():
    changes = {
        "max_position_embeddings": 1_048_576,
        "rope_parameters": {"rope_theta": 8_000_000, "rope_type": "default"},
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "index_share_for_mtp_iteration": True,
        "moe_router_dtype": "float32",
        "head_dim": 192,
    }
    found = config_from_json(json.loads(GLM5) | changes)
    assert found == preset("glm5.2")
    assert found.mtp.share_index
    assert config_from_json(config_to_json(found)) == found


def test_the_released_deepseek_config_is_read():
    config = config_from_json(json.loads(DEEPSEEK))
    assert (config.layers, config.mlp.count("moe"), config.mla.qk_head_dim) == (61, 58, 192)
    assert (config.moe.groups, config.moe.groups_kept, config.mtp.depths) == (8, 4, 1)
    scaling = RopeScaling(
        kind="yarn", factor=40, original_context=4096, mscale=1.0, mscale_all_dim=1.0
    )
    assert config.rope == RopeSettings(theta=10_000.0, scaling=scaling)


def test_the_released_small_model_configs_are_read():
    llama, qwen2, qwen3 = (config_from_json(json.loads(text)) for text in (LLAMA, QWEN2, QWEN3))
    assert llama.rope.scaling == RopeScaling(kind="llama3", factor=32.0, original_context=8192)
    assert (llama.tied, llama.gqa.bias, llama.eos) == (True, "none", (128001,))
    assert (qwen2.gqa.dim, qwen2.gqa.bias, set(qwen2.attention)) == (64, "qkv", {"gqa"})
    assert (qwen3.gqa.dim, qwen3.gqa.qk_norm, qwen3.gqa.window) == (128, True, None)


@pytest.mark.parametrize("text", [GLM5, DEEPSEEK, LLAMA, QWEN2, QWEN3])
def test_written_configs_are_read_back(text):
    config = config_from_json(json.loads(text))
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


@pytest.mark.parametrize("eos", [(), (0,), (5,), (0, 7)])
def test_every_stop_token_is_kept_even_zero(eos):
    assert config_from_json(config_to_json(latent_config(eos=eos))).eos == eos


# Changes to GLM-5's config.json (None: removed), and the expected error message.
REFUSED = {
    "missing": ({"hidden_size": None}, r"'hidden_size' is missing$"),
    "missing, misspelt": (
        {"hidden_size": None, "hiden_size": 6144},
        r"'hidden_size' is missing; did you mean 'hiden_size'\?",
    ),
    "missing, no guessing": ({"routed_scaling_factor": None}, "'routed_scaling_factor' is missing"),
    "unknown, misspelt": (
        {"indx_topk_freq": 4},
        r"unknown setting 'indx_topk_freq'; did you mean 'index_topk_freq'\?",
    ),
    "unknown": ({"zzz": 1}, r"unknown setting 'zzz'$"),
    "no model_type": ({"model_type": None}, "'model_type' is missing"),
    "unknown model_type": (
        {"model_type": "mamba"},
        "'model_type' must be one of glm_moe_dsa.*got 'mamba'",
    ),
    "model_type of no type": ({"model_type": ["llama"]}, r"'model_type' must be .*got \['llama'\]"),
    "no layers": ({"num_hidden_layers": 0}, "'num_hidden_layers' must be .*got 0"),
    "negative": ({"hidden_size": -6144}, "'hidden_size' must be .*got -6144"),
    "text for a number": ({"vocab_size": "154880"}, "'vocab_size' must be .*got '154880'"),
    "a fraction of a head": (
        {"num_attention_heads": 6.5},
        "'num_attention_heads' must be .*got 6.5",
    ),
    "true for a number": ({"v_head_dim": True}, "'v_head_dim' must be .*got True"),
    "a number for true": ({"norm_topk_prob": 1}, "'norm_topk_prob' must be .*got 1"),
    "text for true": ({"tie_word_embeddings": "no"}, "'tie_word_embeddings' must be .*got 'no'"),
    "a list for a number": ({"rms_norm_eps": [1e-5]}, "'rms_norm_eps' must be"),
    "an epsilon of zero": ({"rms_norm_eps": 0}, "'rms_norm_eps' must be .*got 0"),
    "an infinite scale": ({"routed_scaling_factor": float("inf")}, "'routed_scaling_factor'"),
    "text for a token": ({"eos_token_id": "</s>"}, "'eos_token_id' must be .*got '</s>'"),
    "text among tokens": ({"eos_token_id": [1, "2"]}, "'eos_token_id'"),
    "other activation": ({"hidden_act": "gelu"}, "'hidden_act' must be .*got 'gelu'"),
    "grouped latent heads": ({"num_key_value_heads": 8}, "'num_key_value_heads' must be .*got 8"),
    "biases": ({"attention_bias": True}, "'attention_bias' must be .*got True"),
    "softmax router": ({"scoring_func": "softmax"}, "'scoring_func' must be .*got 'softmax'"),
    "dims that do not add up": ({"qk_head_dim": 192}, "'qk_head_dim' must be .*got 192"),
    "rotation by halves": ({"rope_interleave": False}, "'rope_interleave' must be .*got False"),
    "index rotation by halves": ({"indexer_rope_interleave": False}, "'indexer_rope_interleave'"),
    "experts that do not divide": ({"n_group": 7}, "'moe.experts' 256 is not a multiple of"),
    "more groups kept than there are": ({"topk_group": 2}, "'moe.groups_kept' 2 exceeds"),
    "more active than there are": ({"num_experts_per_tok": 300}, "'moe.active' 300 exceeds"),
    "odd rotation": ({"qk_rope_head_dim": 63, "qk_head_dim": 255}, "'mla.rope' 63 must be even"),
    "no query latent to index": ({"q_lora_rank": None}, "set 'mla.q_rank'"),
    "index dims too few": ({"index_head_dim": 32}, "'indexer.dim' 32 is less than 'mla.rope' 64"),
    "indexer frequency of zero": ({"index_topk_freq": 0}, "'index_topk_freq' must be .*got 0"),
    "indexers of too few layers": (
        {"indexer_types": ["full"] * 3},
        "'indexer_types' has 3 entries for 78 layers",
    ),
    "unknown indexers": (
        {"indexer_types": ["lazy"] * 78},
        "'indexer_types' must consist of .*got 'lazy'",
    ),
    "an indexer pattern of other letters": (
        {"index_topk_pattern": "FX" * 39},
        "'index_topk_pattern' must consist of .*got 'X'",
    ),
    "no full indexer to share": (
        {"indexer_types": ["shared"] * 78},
        "must be 'full' for the first",
    ),
    "unknown layers": (
        {"layer_types": ["full_attention"] * 78},
        "'layer_types' must consist of .*got 'full_at",
    ),
    "unknown feed-forward": (
        {"mlp_layer_types": ["moe"] * 78},
        "'mlp_layer_types' must consist of .*got 'moe'",
    ),
    "layers that are no list": ({"mlp_layer_types": 3}, "'mlp_layer_types' must be .*got 3"),
    "three MTP layers": (
        {"num_nextn_predict_layers": 3},
        "'num_nextn_predict_layers' must be .*got 3",
    ),
    "unknown rotation": (
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e6}},
        "'rope_type' must be one of default, linear, llama3, yarn, got 'longrope'",
    ),
    "rotation that is no object": (
        {"rope_parameters": "default"},
        "'rope_parameters' must be .*got 'def",
    ),
    "partial rotation": (
        {"partial_rotary_factor": 0.5},
        "'partial_rotary_factor' must be .*got 0.5",
    ),
    "partial rotation, inside": (
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "rope parameters: 'partial_rotary_factor' must be .*got 0.5",
    ),
    "stretching without a factor": (
        {"rope_parameters": {"rope_type": "linear"}},
        "rope parameters: 'factor' is missing",
    ),
    "stretching from nowhere": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 4}},
        "'yarn' scaling needs 'original_context'",
    ),
    "stretching with a stranger": (
        {"rope_parameters": {"rope_type": "linear", "factor": 2, "mrope_section": [1]}},
        "rope parameters: unknown setting 'mrope_section'",
    ),
    "a negative base": ({"rope_parameters": {"rope_theta": -1}}, "'rope_theta' must be .*got -1"),
    "int4 weights": (
        {"quantization_config": {"quant_method": "gptq"}},
        "'quantization_config.quant_method' must be .*got 'gptq'",
    ),
    "float8 of whole tensors": (
        {"quantization_config": {"quant_method": "fp8"}},
        r"'quantization_config.weight_block_size' must be .*got None",
    ),
    "float8 in narrow blocks": (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 128]}},
        r"'quantization_config.weight_block_size' must be .*got \[1, 128\]",
    ),
    "other float8": (
        {
            "quantization_config": {
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
                "fmt": "e5m2",
            }
        },
        "'quantization_config.fmt' must be .*got 'e5m2'",
    ),
    "quantization in other words": (
        {"quantization_config": {"quant_algo": "NVFP4"}},
        "'quantization_config.quant_method' must be .*got None",
    ),
    "quantization that is no object": ({"quantization_config": "fp8"}, "'quantization_config'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_keys_are_named(name):
    changes, complaint = REFUSED[name]
    data = {k: v for k, v in (json.loads(GLM5) | changes).items() if v is not None}
    with pytest.raises(CheckpointError, match=rf"^here: .*{complaint}"):
        config_from_json(data, "here")


@pytest.mark.parametrize(
    ("text", "changes", "complaint"),
    [
        (LLAMA, {"num_attention_heads": 0}, "'num_attention_heads' must be .*got 0"),
        (LLAMA, {"num_key_value_heads": 5}, "'gqa.heads' 32 is not a multiple"),
        (LLAMA, {"head_dim": 63}, "'gqa.dim' 63 must be even"),
        (LLAMA, {"mlp_bias": True}, "'mlp_bias' must be .*got True"),
        (LLAMA, {"layer_types": ["sliding_attention"] * 16}, "unknown setting 'layer_types'"),
        (QWEN2, {"use_sliding_window": 1}, "'use_sliding_window' must be .*got 1"),
        (QWEN2, {"layer_types": ["sliding_attention"] * 24}, "'swa' layers need 'gqa.window'"),
        (QWEN2, {"layer_types": ["linear_attention"] * 24}, "got 'linear_attention'"),
        (QWEN3, {"max_window_layers": -1}, "'max_window_layers' must be .*got -1"),
    ],
)
def test_invalid_keys_of_gqa_families_are_named(text, changes, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        config_from_json(json.loads(text) | changes)


def test_our_own_layout_is_validated_too():
    own = config_to_json(grouped_config("gdn"))
    for changes, complaint in (
        ({"layer": 3}, "'layer' = 3: Extra inputs are not permitted"),
        ({"hidden": "32"}, "'hidden' = '32': Input should be a valid integer"),
        ({"attention": ["rnn"]}, "'attention.0' = 'rnn'"),
        ({"attention": []}, "'attention' = "),
    ):
        with pytest.raises(CheckpointError, match=complaint):
            config_from_json(own | {"paddock": own["paddock"] | changes})
    del own["paddock"]["vocab"]
    with pytest.raises(CheckpointError, match=r"'vocab' is missing$"):
        config_from_json(own)
    with pytest.raises(CheckpointError, match=r"'paddock' is missing$"):
        config_from_json({"model_type": "paddock"})


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "\xff\xfe", "[" * 100_000, "9" * 5000])
def test_a_config_json_that_is_not_an_object_is_named(text, tmp_path):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json: (not valid JSON|expected a JSON)"):
        read_config(tmp_path)


def test_a_missing_config_json_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: file not found"):
        read_config(tmp_path)
