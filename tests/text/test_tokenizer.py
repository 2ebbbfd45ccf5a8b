import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from random import Random

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from paddock.data.reasoning import make_chain, make_facts, make_knowledge, make_records
from paddock.envs.nano.language import COLOURS, KEYS, NOUNS
from paddock.text import (
    IncrementalDetokenizer,
    SpecialToken,
    Tokenizer,
    TokenizerError,
    train_tokenizer,
)
from tests.data.tiny import PROSE, byte_tokenizer

ROOT = Path(__file__).parents[2]
TOOLS = '\n# Tools\n\nYou may call one or more functions.\n<tools>\n{"name": "look"}\n</tools>\n\n'


@cache
def word_tokenizer():
    rng = Random(0)
    families = (make_facts, make_chain, make_knowledge, make_records)
    texts = [family(rng) for _ in range(1000) for family in families]
    return train_tokenizer([*texts, *[TOOLS] * 50], vocab=1024, splitting="words")


def pieces(tokenizer, text, *, specials=False):
    return [tokenizer.id_to_token(i) for i in tokenizer.encode(text, specials=specials)]


# --- encoding and decoding ------------------------------------------------------------------------


@given(st.text())
def test_byte_level_round_trips_any_text(text):
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text, specials=False)) == text


@given(st.text())
def test_words_round_trip_any_text_except_its_first_space(text):
    tokenizer = word_tokenizer()
    spaced = text.replace("\u2581", " ")
    assert tokenizer.decode(tokenizer.encode(text, specials=False)) == spaced.removeprefix(" ")


@given(st.lists(st.sampled_from([*(t.value for t in SpecialToken), "x", "</", "<|", " ", "hi"])))
def test_text_from_outside_never_yields_an_added_token(parts):
    for tokenizer in (byte_tokenizer(), word_tokenizer()):
        ids = tokenizer.encode("".join(parts), specials=False)
        assert not any(map(tokenizer.is_added, ids))
        assert tokenizer.encode_batch(["".join(parts)]) == [ids]


def test_text_never_yields_added_tokens_that_are_model_pieces():
    inner = tokenizers.Tokenizer(models.Unigram())
    inner.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    trainer = trainers.UnigramTrainer(
        vocab_size=80,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        initial_alphabet=sorted(set("</s>")),
        show_progress=False,
    )
    inner.train_from_iterator(PROSE, trainer)
    tokenizer = Tokenizer({"tokenizer.json": inner.to_str().encode()})
    end = tokenizer.token_to_id("</s>")
    assert end in tokenizer.encode("fox </s>", specials=True)
    assert pieces(tokenizer, "</s>") == ["\u2581", "<", "/", "s", ">"]
    plain = [text for text in PROSE if "<" not in text][:20]
    assert [tokenizer.encode(t, specials=False) for t in plain] == tokenizer.encode_batch(plain)
    assert [tokenizer.encode(t, specials=True) for t in plain] == tokenizer.encode_batch(plain)


def test_an_added_token_is_encoded_on_request():
    tokenizer = byte_tokenizer()
    user = tokenizer.special_token_ids[SpecialToken.USER]
    assert tokenizer.encode("<|user|>", specials=True) == [user]
    assert tokenizer.decode([user]) == "<|user|>"


@given(st.lists(st.text(max_size=8), min_size=1, max_size=4))
def test_text_between_added_tokens_is_encoded_as_if_alone(texts):
    for tokenizer in (byte_tokenizer(), word_tokenizer()):
        middle = tokenizer.special_token_ids[SpecialToken.THINK_CLOSE]
        texts = [text for text in texts if not any(token in text for token in SpecialToken)]
        separate = [tokenizer.encode(text, specials=False) for text in texts]
        joined = [i for ids in separate for i in (middle, *ids)]
        whole = "".join(f"</think>{text}" for text in texts)
        assert tokenizer.encode(whole, specials=True) == joined


def test_special_tokens_are_skipped_on_request_and_thinking_is_not():
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("<|user|>hi<think>so</think>", specials=True)
    assert tokenizer.decode(ids) == "<|user|>hi<think>so</think>"
    assert tokenizer.decode(ids, skip_special=True) == "hi<think>so</think>"


def test_words_after_an_added_token_decode_without_a_space():
    tokenizer = word_tokenizer()
    ids = tokenizer.encode("<think>look oak</think>red", specials=True)
    assert tokenizer.decode(ids) == "<think>look oak</think>red"


# --- incremental decoding -------------------------------------------------------------------------


def decode_incrementally(tokenizer, ids, *, skip_special=False):
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special=skip_special)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@given(st.lists(st.integers(0, byte_tokenizer().vocab_size - 1)), st.booleans())
def test_incremental_decoding_equals_decoding(ids, skip):
    tokenizer = byte_tokenizer()
    text = "".join(decode_incrementally(tokenizer, ids, skip_special=skip))
    assert text == tokenizer.decode(ids, skip_special=skip)


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), word_tokenizer()])
@given(st.text(), st.integers(1, 40))
def test_incremental_decoding_by_several_tokens_is_the_same(tokenizer, text, size):
    ids = tokenizer.encode(text * 8, specials=False)
    detokenizer = IncrementalDetokenizer(tokenizer)
    bits = [detokenizer.push_all(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert "".join([*bits, detokenizer.flush()]) == tokenizer.decode(ids)


@given(st.lists(st.lists(st.integers(0, byte_tokenizer().vocab_size - 1), max_size=40)))
def test_incremental_decoding_of_invalid_utf8(groups):
    tokenizer = byte_tokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer)
    text = "".join([*map(detokenizer.push_all, groups), detokenizer.flush()])
    assert text == tokenizer.decode([token for group in groups for token in group])


def test_lines_are_single_pieces_and_other_text_is_split_into_words():
    tokenizer = word_tokenizer()
    cut = tokenizer._inner.pre_tokenizer.pre_tokenize_str("red oak\n\n{x-1} 12 oak")
    assert [piece for piece, _ in cut] == [
        *("\u2581red\u2581oak\n\n", "{x-1}", "\u25811", "2", "\u2581oak")
    ]


def test_text_after_other_text_keeps_its_space():
    words = train_tokenizer(["one two three four"] * 9, vocab=700, splitting="words")
    *before, last = words.encode("one two three four", specials=False)
    growing = IncrementalDetokenizer(words, behind=before)
    assert growing.push(last) + growing.flush() == " four" != words.decode([last])


@pytest.mark.parametrize("character", ["\u00e9", "\u6f22", "\U0001f98c"])
def test_text_after_multi_token_characters_keeps_its_space(character):
    words = train_tokenizer(["one two three four"] * 9, vocab=700, splitting="words")
    *before, last = words.encode(character * 9 + " four", specials=False)
    growing = IncrementalDetokenizer(words, behind=before)
    assert growing.push(last) + growing.flush() == " four"


def test_text_after_half_a_character_starts_anew():
    tokenizer = byte_tokenizer()
    half, *_ = tokenizer.encode("\U0001f98c", specials=False)
    growing = IncrementalDetokenizer(tokenizer, behind=[half])
    assert growing.push_all(tokenizer.encode("deer", specials=False)) + growing.flush() == "deer"


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), word_tokenizer()])
@given(st.text())
def test_incremental_decoding_never_shows_half_a_character(tokenizer, text):
    ids = tokenizer.encode(text.replace("\ufffd", ""), specials=False)
    bits = decode_incrementally(tokenizer, ids)
    assert not any("\ufffd" in bit for bit in bits)
    assert "".join(bits) == tokenizer.decode(ids)


def test_a_character_is_emitted_with_its_last_byte_and_a_partial_one_at_the_end():
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("\u6f22", specials=False)
    assert decode_incrementally(tokenizer, ids) == ["", "", "\u6f22", ""]
    assert decode_incrementally(tokenizer, ids[:2]) == ["", "", "\ufffd"]


# --- files ----------------------------------------------------------------------------------------


def test_a_released_file_is_kept_byte_for_byte(tmp_path):
    content = json.dumps(json.loads(byte_tokenizer().files["tokenizer.json"]), indent=7).encode()
    (tmp_path / "tokenizer.json").write_bytes(content)
    (tmp_path / "tokenizer_config.json").write_bytes(b'{"eos_token": {"content": "<|user|>"}}')
    (tmp_path / "chat_template.jinja").write_bytes(b"{{ messages }}")
    loaded = Tokenizer.load(tmp_path)
    loaded.save(tmp_path / "copy")
    assert loaded.eos_token_id == loaded.special_token_ids[SpecialToken.USER]
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "copy" / file).read_bytes() == (tmp_path / file).read_bytes()
    assert loaded.fingerprint == byte_tokenizer().fingerprint != word_tokenizer().fingerprint


def test_transformers_encodes_the_same_ids(tmp_path):
    from transformers import AutoTokenizer

    text = "<|user|>The harbour, caf\u00e9 \u6f22 12345\n\t<think>x</think>"
    for name, tokenizer in (("bytes", byte_tokenizer()), ("words", word_tokenizer())):
        tokenizer.save(tmp_path / name)
        theirs = AutoTokenizer.from_pretrained(tmp_path / name)
        assert theirs.encode(text) == tokenizer.encode(text, specials=True)
        assert len(theirs) == tokenizer.vocab_size
        assert (
            theirs.eos_token_id
            == tokenizer.eos_token_id
            == tokenizer.special_token_ids[SpecialToken.ENDOFTEXT]
        )


def test_an_invalid_tokenizer_is_rejected_with_its_path(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer not found: .*nowhere"):
        Tokenizer.load(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"is not a valid tokenizer\.json"):
        Tokenizer.load(tmp_path)


# --- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), word_tokenizer()])
def test_added_tokens_come_last_in_the_released_order(tokenizer):
    first = tokenizer.vocab_size - len(SpecialToken)
    assert [tokenizer.special_token_ids[t] for t in SpecialToken] == list(
        range(first, tokenizer.vocab_size)
    )


@pytest.mark.parametrize("splitting", ["bytes", "words"])
def test_the_same_texts_give_the_same_file_in_another_process(splitting):
    code = """if True:
        import sys
        from paddock.text import train_tokenizer
        from tests.data.tiny import PROSE
        print(train_tokenizer(PROSE, vocab=420, splitting=sys.argv[1]).fingerprint)
    """
    command = [sys.executable, "-c", code, splitting]
    other = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert (
        train_tokenizer(PROSE, vocab=420, splitting=splitting).fingerprint == other.stdout.strip()
    )


def test_a_corpus_with_an_added_token_does_not_change_its_id():
    tokenizer = train_tokenizer(["say\n/nothink\n<think>"] * 50, vocab=500)
    assert tokenizer.special_token_ids[SpecialToken.NOTHINK] >= tokenizer.vocab_size - len(
        SpecialToken
    )
    assert not any(map(tokenizer.is_added, tokenizer.encode("/nothink", specials=False)))


def test_digits_are_grouped_by_three_at_most():
    tokenizer = train_tokenizer(["year 123456789"] * 50, vocab=500)
    assert pieces(tokenizer, "123456789") == ["123", "456", "789"]


def test_a_vocabulary_smaller_than_the_base_tokens_is_rejected():
    with pytest.raises(TokenizerError, match="vocab must be at least 292"):
        train_tokenizer(PROSE, vocab=256)


# --- the nano language ----------------------------------------------------------------------------


@pytest.mark.parametrize("words", [KEYS, COLOURS, NOUNS, ("add", "minus", "is", "first", "look")])
def test_every_word_of_the_nano_language_is_one_token(words):
    tokenizer = word_tokenizer()
    assert [word for word in words if len(tokenizer.encode(word, specials=False)) != 1] == []


def test_a_word_has_the_same_token_at_every_position():
    tokenizer = word_tokenizer()
    [oak] = tokenizer.encode("oak", specials=False)
    for text in ("look oak .", "<think>oak</think>", "oak . oak", "<arg_value>oak</arg_value>"):
        assert oak in tokenizer.encode(text, specials=True)


def test_digits_are_separate_tokens():
    assert pieces(word_tokenizer(), "407") == ["\u25814", "0", "7"]


def test_a_line_of_the_tools_block_is_one_token():
    assert len(word_tokenizer().encode(TOOLS, specials=False)) == TOOLS.replace("\n\n", "\n").count(
        "\n"
    )
