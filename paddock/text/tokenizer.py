"""Tokenizer over the `tokenizers` library, incremental detokenizer, and BPE training."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from itertools import groupby
from os import replace
from pathlib import Path
from typing import Any, Literal, Self

import tokenizers
from tokenizers import AddedToken, Regex, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE, Model, Unigram

from paddock.text.special_tokens import SpecialToken, SpecialTokenIds

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
OPTIONAL_TOKENIZER_FILES = (TOKENIZER_CONFIG_FILE, "chat_template.jinja", "special_tokens_map.json")

PreTokenization = Literal["bytes", "words"]
_UNUSED_CHARS = "\ufdd0\ufdd1"  # Unicode noncharacters
DETOKENIZE_CONTEXT_TOKENS = 8  # tokens before a text that affect its decoding
MAX_CHARS_PER_TOKEN = 8  # texts below this many characters per allowed token are not counted first
COUNT_WINDOW_CHARS = 1 << 16  # characters encoded at once when counting

# Words with the preceding space or symbol, digits in groups of at most three, symbols, whitespace:
# the pattern of GPT-4 and GLM-5.
BYTES_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Whole lines that end in a newline (so the tools block of a prompt is a few tokens), names in
# braces, single digits, words, symbols. Lines are split first: searching the end of the line from
# every word takes quadratic time on long lines.
LINES_SPLIT = r"\n+"
SPACE = "\u2581"
WORDS_SPLIT = (
    rf"\A[^\n]*\n+|{SPACE}?\{{[a-z0-9-]+\}}|{SPACE}?\d"
    rf"|{SPACE}?[A-Za-z]+|{SPACE}?[^{SPACE}\dA-Za-z]+"
)
WORDS_ALPHABET = [SPACE, "\n", *map(chr, range(33, 127))]
# The bytes that UTF-8 uses for every other character.
OTHER_BYTES = [
    f"<0x{byte:02X}>" for byte in range(0xF5) if byte not in {10, *range(32, 127), 0xC0, 0xC1}
]


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded or trained."""


class TextTooLongError(ValueError):
    """A text certainly has more tokens than allowed."""


class Tokenizer:
    """A tokenizer with its files, byte for byte as on disk.

    Untrusted text is encoded with `specials=False`, so it cannot produce an added token (a role,
    <think>, <tool_call> ...). BOS and EOS are never added.
    """

    CONFIG_FILE = TOKENIZER_CONFIG_FILE

    def __init__(self, files: Mapping[str, bytes], *, name: str = "unnamed") -> None:
        """`files` holds tokenizer.json and optionally OPTIONAL_TOKENIZER_FILES, by name."""
        self.name = name
        try:
            self._inner = tokenizers.Tokenizer.from_buffer(files[TOKENIZER_FILE])
            self._json: dict[str, Any] = json.loads(files[TOKENIZER_FILE])
        except Exception as error:  # the library has no narrower one
            raise TokenizerError(f"{name} is not a valid tokenizer.json: {error}") from None
        self._inner.no_truncation()
        self._inner.no_padding()
        self._added = {token["id"] for token in self._json["added_tokens"]}
        self._special = {token["id"] for token in self._json["added_tokens"] if token["special"]}
        self.files = {
            TOKENIZER_FILE: files[TOKENIZER_FILE],
            TOKENIZER_CONFIG_FILE: self._default_config(),
            **files,
        }

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load a directory or a tokenizer.json; files are kept byte for byte."""
        file = Path(path) / TOKENIZER_FILE if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise TokenizerError(f"tokenizer not found: {file}")
        candidates = [file.with_name(name) for name in OPTIONAL_TOKENIZER_FILES]
        files = {other.name: other.read_bytes() for other in candidates if other.is_file()}
        return cls({TOKENIZER_FILE: file.read_bytes(), **files}, name=str(path))

    def save(self, folder: str | Path) -> None:
        """Write the files; transformers' AutoTokenizer gives the same ids."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            partial = Path(folder) / f".{name}.partial"
            partial.write_bytes(content)
            replace(partial, Path(folder) / name)

    def with_special_tokens(self) -> "Tokenizer":
        """A copy with the missing GLM-5 added tokens appended, and <|endoftext|> as EOS."""
        inner = tokenizers.Tokenizer.from_buffer(self.files[TOKENIZER_FILE])
        missing = [token for token in SpecialToken if self.token_to_id(token) is None]
        inner.add_tokens([_added(token) for token in missing])
        config = json.loads(self.files[TOKENIZER_CONFIG_FILE])
        config |= {"eos_token": SpecialToken.ENDOFTEXT, "pad_token": SpecialToken.ENDOFTEXT}
        changed = {
            TOKENIZER_FILE: inner.to_str(pretty=True).encode(),
            TOKENIZER_CONFIG_FILE: json.dumps(config, indent=2, ensure_ascii=False).encode()
            + b"\n",
        }
        return Tokenizer({**self.files, **changed}, name=self.name)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of tokenizer.json that ignores its formatting."""
        return sha256(json.dumps(self._json, sort_keys=True).encode()).hexdigest()[:16]

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def special_token_ids(self) -> SpecialTokenIds:
        return SpecialTokenIds.from_tokenizer(self.token_to_id, tokenizer=self.name)

    @cached_property
    def eos_token_id(self) -> int | None:
        """The EOS token of the config, else <|endoftext|>."""
        named = json.loads(self.files[TOKENIZER_CONFIG_FILE]).get("eos_token")
        token = named["content"] if isinstance(named, dict) else named
        return self.token_to_id(token or SpecialToken.ENDOFTEXT)

    def token_to_id(self, token: str) -> int | None:
        return self._inner.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        return self._inner.id_to_token(token_id)

    def is_added(self, token_id: int) -> bool:
        """Whether only `specials=True` can produce it."""
        return token_id in self._added

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special` drops it: a role or <|endoftext|>, but not <think>."""
        return token_id in self._special

    @cached_property
    def added_tokens(self) -> tuple[str, ...]:
        """The texts of the added tokens."""
        return tuple(token["content"] for token in self._json["added_tokens"])

    def encode(self, text: str, *, specials: bool) -> list[int]:
        """Token ids of `text`; with `specials`, added tokens in the text become those tokens."""
        inner = self._inner if specials else self._plain
        return inner.encode(text, add_special_tokens=False).ids

    def check_max_tokens(self, texts: Sequence[str], max_tokens: int, *, specials: bool) -> None:
        """Raise TextTooLongError if the texts certainly have more than `max_tokens` tokens.

        The cost is bounded by `max_tokens`, not by the texts: encoding 30 MB takes minutes and
        gigabytes. Texts that may or may not be too long pass.
        """
        if len(texts) + sum(map(len, texts)) <= MAX_CHARS_PER_TOKEN * max_tokens:
            return
        min_count = 0
        for text in texts:
            for start in range(0, len(text), COUNT_WINDOW_CHARS):
                window = text[start : start + COUNT_WINDOW_CHARS]
                ids = self.encode(window, specials=specials or isinstance(text, SpecialToken))
                # A window boundary may split one token into as many as it has characters.
                cuts = (start > 0) + (start + COUNT_WINDOW_CHARS < len(text))
                min_count += max(0, len(ids) - cuts * self._max_token_chars)
                if min_count > max_tokens:
                    raise TextTooLongError(f"at least {min_count} tokens")

    @cached_property
    def _max_token_chars(self) -> int:
        """Length of the longest token in characters."""
        return max(map(len, self._inner.get_vocab(with_added_tokens=True)), default=1)

    def encode_continuation(self, text: str) -> list[int]:
        """Encode plain text as it is encoded after an added token."""
        return self._plain_continuation.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text with `specials=False`, on all cores."""
        return [e.ids for e in self._plain.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of `ids`; `skip_special` drops roles and <|endoftext|>, but not <think>.
        Invalid UTF-8 becomes U+FFFD; ids outside the vocabulary are ignored."""
        kept = [i for i in ids if not (skip_special and i in self._special)]
        if not self._space_before_each_run:
            return self._inner.decode(kept, skip_special_tokens=False)
        runs = (list(run) for _, run in groupby(kept, key=self._run_key))
        return "".join(self._inner.decode(run, skip_special_tokens=False) for run in runs)

    def _run_key(self, token_id: int) -> int | None:
        return token_id if token_id in self._added else None

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The tokenizer without added tokens."""
        plain = tokenizers.Tokenizer(self._model_without_added)
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(self._inner, part) is not None:
                setattr(plain, part, getattr(self._inner, part))
        return plain

    @property
    def _model_without_added(self) -> Model:
        """The model without added tokens. BPE merges never produce one; in a Unigram model it is a
        piece like any other, so it is replaced by unused text."""
        model = self._json["model"]
        if model["type"] != "Unigram":
            return self._inner.model
        pieces = [
            (f"{_UNUSED_CHARS}{i}" if i in self._added else piece, score)
            for i, (piece, score) in enumerate(model["vocab"])
        ]
        return Unigram(pieces, model["unk_id"], model.get("byte_fallback", False))

    @cached_property
    def _plain_continuation(self) -> tokenizers.Tokenizer:
        """The plain tokenizer for text that is not first: "first" prepends a space only there."""
        cut = json.dumps(self._json["pre_tokenizer"])
        without_prefix = cut.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
        if without_prefix == cut:
            return self._plain
        rules = {**json.loads(self._plain.to_str()), "pre_tokenizer": json.loads(without_prefix)}
        return tokenizers.Tokenizer.from_str(json.dumps(rules))

    @cached_property
    def _space_before_each_run(self) -> bool:
        """Whether text after an added token gets its own space, which decoding removes."""
        cut = self._json["pre_tokenizer"] or {}
        steps = cut.get("pretokenizers", [cut])
        return any(step.get("prepend_scheme") == "always" for step in steps)

    def _default_config(self) -> bytes:
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        if self.token_to_id(SpecialToken.ENDOFTEXT) is not None:
            config |= {"eos_token": SpecialToken.ENDOFTEXT, "pad_token": SpecialToken.ENDOFTEXT}
            config["padding_side"] = "left"
        return json.dumps(config, indent=2).encode() + b"\n"


class IncrementalDetokenizer:
    """Decodes tokens incrementally, never returning part of a character.

    The results of `push` and `flush`, joined, equal `decode` of all tokens, or the text that the
    tokens add to those `behind` them, including the space before a word. Invalid bytes are held
    back until text follows. (With sentencepiece byte tokens the number of U+FFFD may differ.)
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool = False, behind: Sequence[int] = ()
    ) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        # Context already emitted: a decoder may look at the previous token. A context that starts
        # inside a character (at most four tokens) may be all U+FFFD; one that ends inside a
        # character is dropped.
        starts = (list(behind[-DETOKENIZE_CONTEXT_TOKENS - more :]) for more in range(4))
        whole = (tokens for tokens in starts if not self._decode(tokens).endswith("\ufffd"))
        self._context = next(whole, [])
        self._pending: list[int] = []
        self._emitted = 0  # characters emitted of the pending tokens

    def push(self, token_id: int) -> str:
        return self.push_all((token_id,))

    def push_all(self, token_ids: Iterable[int]) -> str:
        """Push several tokens at the cost of one decode."""
        self._pending += token_ids
        text = self._pending_text()
        whole = text.rstrip("\ufffd")  # more bytes may complete a character
        new, self._emitted = whole[self._emitted :], max(self._emitted, len(whole))
        if text and whole == text:
            self._context, self._pending, self._emitted = self._pending, [], 0
        return new

    def flush(self) -> str:
        """The held-back bytes as U+FFFD; afterwards a new text starts."""
        new = self._pending_text()[self._emitted :]
        self._context, self._pending, self._emitted = [], [], 0
        return new

    def _pending_text(self) -> str:
        if not self._pending:
            return ""
        if not self._context:
            return self._decode(self._pending)
        before = self._decode(self._context)
        return self._decode([*self._context, *self._pending])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip)


def train_tokenizer(
    texts: Iterable[str], *, vocab: int, splitting: PreTokenization = "bytes"
) -> Tokenizer:
    """Train a BPE tokenizer of at most `vocab` tokens, with GLM-5's added tokens last.

    "bytes" is byte-level and lossless. "words" is for a small closed language with spaces around
    punctuation: a word has the same token everywhere, so a leading space is lost. Other characters
    fall back to bytes. The same texts give an identical file.
    """
    fixed = len(SpecialToken) + (len(OTHER_BYTES) if splitting == "words" else 0)
    alphabet = WORDS_ALPHABET if splitting == "words" else pre_tokenizers.ByteLevel.alphabet()
    min_count = fixed + len(alphabet)
    if vocab < min_count:
        raise TokenizerError(
            f"vocab must be at least {min_count} (bytes and special tokens), got {vocab}"
        )
    inner = tokenizers.Tokenizer(BPE())
    inner.pre_tokenizer = _pre_tokenizer(splitting)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - fixed, initial_alphabet=sorted(alphabet), show_progress=False
    )
    # /nothink is the only added token that is one word to the pre-tokenizer; merges must not
    # produce it.
    inner.train_from_iterator((text.replace(SpecialToken.NOTHINK, "") for text in texts), trainer)
    if splitting == "words":
        inner.model = _with_byte_fallback(inner)
        as_text = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        inner.decoder = decoders.Sequence([*as_text, decoders.Strip(" ", 1, 0)])
    else:
        inner.decoder = decoders.ByteLevel()
    inner.add_tokens([_added(token) for token in SpecialToken])
    return Tokenizer({TOKENIZER_FILE: inner.to_str(pretty=True).encode()}, name="trained")


def _added(token: SpecialToken) -> AddedToken:
    return AddedToken(token.value, special=token.is_special, normalized=False)


def _pre_tokenizer(splitting: PreTokenization) -> pre_tokenizers.PreTokenizer:
    if splitting == "words":
        blank = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always", split=False)
        lines = pre_tokenizers.Split(Regex(LINES_SPLIT), "merged_with_previous")
        words = pre_tokenizers.Split(Regex(WORDS_SPLIT), "isolated")
        return pre_tokenizers.Sequence([blank, lines, words])
    split = pre_tokenizers.Split(Regex(BYTES_SPLIT), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, as_bytes])


def _with_byte_fallback(inner: tokenizers.Tokenizer) -> BPE:
    model = json.loads(inner.to_str())["model"]
    pieces = [*sorted(model["vocab"], key=model["vocab"].get), *OTHER_BYTES]
    merges = [(left, right) for left, right in model["merges"]]
    return BPE({piece: i for i, piece in enumerate(pieces)}, merges, byte_fallback=True)
