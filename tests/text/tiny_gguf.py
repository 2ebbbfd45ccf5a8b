"""Small GGUF files: a vocabulary trained on a page of text, and the tensors of a network."""

import json
from functools import cache

from gguf import GGUFWriter
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from paddock.checkpoint.gguf import LAYER, TOP

PAGE = (
    "The pony's in the paddock, and they'd rather it stayed there; don't you think it's THEIR?",
    "def gallop(n: int) -> list[int]:\n    return [i**2 for i in range(n) if i % 3 != 0]\n\n\n",
    "In 2024 12345 horses ran 1,234.56 km in 7 days and 33 minutes: 3.14159 or 2.71828.",
    "Caf\u00e9s na\u00efves, \u65e5\u672c\u8a9e\u306e\u30c6\u30b9\u30c8, "
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440, \U0001f40e\U0001f40e!",
)
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WHOLE = ["<think>", "</think>"]  # never split, but ordinary text
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


@cache
def byte_level():
    """Pieces, their kinds, and merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pieces_learned, merges = _train_pieces(tokenizer, vocab_size=500, initial_alphabet=alphabet)
    return [*CONTROL, *WHOLE, *pieces_learned], [3, 3, 3, 4, 4] + [1] * len(pieces_learned), merges


@cache
def sentencepiece():
    """Pieces, their kinds, and scores: pieces merged earlier score higher."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    pieces_learned, _ = _train_pieces(tokenizer, vocab_size=400)
    pieces_learned.sort(key=lambda piece: len(piece) == 1)
    scores = [-float(i) if len(piece) > 1 else -1e9 for i, piece in enumerate(pieces_learned)]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<unk>", "<s>", "</s>", *bytes_, *pieces_learned]
    return pieces, [2, 3, 3] + [6] * 256 + [1] * len(pieces_learned), [0.0] * 259 + scores


def _train_pieces(tokenizer, **settings):
    tokenizer.train_from_iterator(PAGE * 3, trainers.BpeTrainer(show_progress=False, **settings))
    pieces = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    return pieces, [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def write_gguf(path, kind="gpt2", *, network=None, **metadata):
    """A file with a tokenizer of this kind; `metadata` adds keys, None leaves one out."""
    writer = GGUFWriter(path, "llama" if network is None else network.config.family)
    if kind == "llama":
        pieces, kinds, scores = sentencepiece()
        keys = {"tokens": pieces, "token_type": kinds, "scores": scores, "unknown_token_id": 0}
    else:
        pieces, kinds, merges = byte_level()
        keys = {"tokens": pieces, "token_type": kinds, "merges": merges, "padding_token_id": 0}
    keys |= {"model": kind, "bos_token_id": 1, "eos_token_id": 2, **metadata}
    for key, value in keys.items():
        if value is not None:
            _add(writer, f"tokenizer.ggml.{key}", value)
    writer.add_chat_template(TEMPLATE)
    if network is not None:
        _add_network(writer, network)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer, key, value):
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def _add_network(writer, network):
    config = network.config
    writer.add_embedding_length(config.hidden)
    writer.add_block_count(config.layers)
    writer.add_context_length(config.context)
    writer.add_feed_forward_length(config.dense_inner)
    writer.add_head_count(config.gqa.heads)
    writer.add_head_count_kv(config.gqa.kv_heads)
    writer.add_key_length(config.gqa.dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    theirs = {ours: name for name, ours in (TOP | LAYER).items()}
    for name, tensor in network.state_dict().items():
        module, kind = name.rsplit(".", 1)
        layer = ""
        if module.startswith("layers."):
            _, number, module = module.split(".", 2)
            layer = f"blk.{number}."
        if config.family == "llama" and module in ("attention.q", "attention.k"):
            heads = config.gqa.heads if module == "attention.q" else config.gqa.kv_heads
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(f"{layer}{theirs[module]}.{kind}", tensor.float().contiguous().numpy())
