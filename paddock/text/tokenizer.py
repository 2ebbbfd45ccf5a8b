"""Text into token ids and back, over the `tokenizers` library."""

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
_UNSAID = "\ufdd0\ufdd1"  # characters that mean nothing to anyone
DETOKENIZE_CONTEXT_TOKENS = 8  # tokens before a text that decide how it begins
MAX_CHARS_PER_TOKEN = (
    8  # characters for each token that there may be: so short a text is not counted first
)
COUNT_WINDOW_CHARS = 1 << 16  # characters counted at once

# Words with the blank or sign before them, digits in groups of three at most (so that a number has
# one spelling, and few of them), signs, space: the rule of GPT-4 and of GLM-5.
BYTES_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Whole lines that end in a newline (the tools block of a prompt is then a few tokens), names in
# braces, digits one by one, words, signs. Lines are cut apart first: looking for the end of a line
# from every word of a long one takes time that grows with its square.
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
    """A tokenizer that cannot be read or trained; the message says which and why."""


class TextTooLongError(ValueError):
    """A text of certainly more tokens than there may be."""


class Tokenizer:
    """A tokenizer, released or trained here: its files as they stand on disk, and what they mean.

    Text from outside cannot spell an added token (a role, <think>, <tool_call> ...): it is encoded
    with `specials=False`, as ordinary characters. No token is put before or after a text unasked.
    """

    def __init__(self, files: Mapping[str, bytes], *, name: str = "unnamed") -> None:
        """`files` holds tokenizer.json and, if there are any, the files beside it."""
        self.name = name
        try:
            self._inner = tokenizers.Tokenizer.from_buffer(files[TOKENIZER_FILE])
            self._json: dict[str, Any] = json.loads(files[TOKENIZER_FILE])
        except Exception as error:  # the library has no narrower one
            raise TokenizerError(f"{name} is not a tokenizer.json: {error}") from None
        self._inner.no_truncation()
        self._inner.no_padding()
        self._added = {token["id"] for token in self._json["added_tokens"]}
        self._silent = {token["id"] for token in self._json["added_tokens"] if token["special"]}
        self.files = {
            TOKENIZER_FILE: files[TOKENIZER_FILE],
            TOKENIZER_CONFIG_FILE: self._default_config(),
            **files,
        }

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The tokenizer in a folder or in a tokenizer.json, kept byte for byte."""
        file = Path(path) / TOKENIZER_FILE if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise TokenizerError(f"there is no tokenizer at {file}")
        beside = [file.with_name(name) for name in OPTIONAL_TOKENIZER_FILES]
        files = {other.name: other.read_bytes() for other in beside if other.is_file()}
        return cls({TOKENIZER_FILE: file.read_bytes(), **files}, name=str(path))

    def save(self, folder: str | Path) -> None:
        """Write the files so that transformers' AutoTokenizer reads the same ids from them."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            partial = Path(folder) / f".{name}.partial"
            partial.write_bytes(content)
            replace(partial, Path(folder) / name)

    def with_special_tokens(self) -> "Tokenizer":
        """The same with those of GLM-5's added tokens that it lacks behind its last id; documents
        end in <|endoftext|>."""
        inner = tokenizers.Tokenizer.from_buffer(self.files[TOKENIZER_FILE])
        lacking = [token for token in SpecialToken if self.token_to_id(token) is None]
        inner.add_tokens([_added(token) for token in lacking])
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
        """The same for files that say the same, whatever their layout."""
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
        """The token that ends a document: what the config calls EOS, else <|endoftext|>."""
        named = json.loads(self.files[TOKENIZER_CONFIG_FILE]).get("eos_token")
        token = named["content"] if isinstance(named, dict) else named
        return self.token_to_id(token or SpecialToken.ENDOFTEXT)

    def token_to_id(self, token: str) -> int | None:
        return self._inner.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        return self._inner.id_to_token(token_id)

    def is_added(self, token_id: int) -> bool:
        """Whether only `specials=True` can yield it."""
        return token_id in self._added

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special` leaves it out: a role, <|endoftext|>, but not <think> and such."""
        return token_id in self._silent

    @cached_property
    def added_tokens(self) -> tuple[str, ...]:
        """How the added tokens are spelled."""
        return tuple(token["content"] for token in self._json["added_tokens"])

    def encode(self, text: str, *, specials: bool) -> list[int]:
        """With `specials`, added tokens that the text spells out become those tokens."""
        inner = self._inner if specials else self._plain
        return inner.encode(text, add_special_tokens=False).ids

    def check_max_tokens(self, texts: Sequence[str], most: int, *, specials: bool) -> None:
        """Raise TooLong if these texts together certainly have more than `most` tokens.

        The work is bounded by `most`, not by the texts: encoding 30 MB takes minutes and gigabytes.
        Texts that may or may not be too long pass.
        """
        if len(texts) + sum(map(len, texts)) <= MAX_CHARS_PER_TOKEN * most:
            return
        least = 0
        for text in texts:
            for start in range(0, len(text), COUNT_WINDOW_CHARS):
                window = text[start : start + COUNT_WINDOW_CHARS]
                ids = self.encode(window, specials=specials or isinstance(text, SpecialToken))
                # A cut falls into one token, which may become as many as it has characters.
                cuts = (start > 0) + (start + COUNT_WINDOW_CHARS < len(text))
                least += max(0, len(ids) - cuts * self._longest)
                if least > most:
                    raise TextTooLongError(f"at least {least} tokens")

    @cached_property
    def _longest(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self._inner.get_vocab(with_added_tokens=True)), default=1)

    def encode_continuation(self, text: str) -> list[int]:
        """Without specials, the text as it is encoded behind an added token."""
        return self._plain_behind.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Each text as `encode` without specials would have it, on all cores."""
        return [e.ids for e in self._plain.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """`skip_special` leaves out the silent tokens (roles, <|endoftext|>), not <think> and such.
        Bytes that are no UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        kept = [i for i in ids if not (skip_special and i in self._silent)]
        if not self._blank_before_each_run:
            return self._inner.decode(kept, skip_special_tokens=False)
        runs = (list(run) for _, run in groupby(kept, key=self._run_key))
        return "".join(self._inner.decode(run, skip_special_tokens=False) for run in runs)

    def _run_key(self, token_id: int) -> int | None:
        return token_id if token_id in self._added else None

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The same without added tokens."""
        plain = tokenizers.Tokenizer(self._spelling)
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(self._inner, part) is not None:
                setattr(plain, part, getattr(self._inner, part))
        return plain

    @property
    def _spelling(self) -> Model:
        """The model, which cannot find an added token. Merges do not lead to one; but to a Unigram
        model it is a piece like any other, and gets a spelling that nobody uses."""
        model = self._json["model"]
        if model["type"] != "Unigram":
            return self._inner.model
        pieces = [
            (f"{_UNSAID}{i}" if i in self._added else piece, score)
            for i, (piece, score) in enumerate(model["vocab"])
        ]
        return Unigram(pieces, model["unk_id"], model.get("byte_fallback", False))

    @cached_property
    def _plain_behind(self) -> tokenizers.Tokenizer:
        """The same where no text comes first: with "first", only that one gets a blank."""
        cut = json.dumps(self._json["pre_tokenizer"])
        never = cut.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
        if never == cut:
            return self._plain
        rules = {**json.loads(self._plain.to_str()), "pre_tokenizer": json.loads(never)}
        return tokenizers.Tokenizer.from_str(json.dumps(rules))

    @cached_property
    def _blank_before_each_run(self) -> bool:
        """Whether text after an added token gets a blank of its own, for decoding to take away."""
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
    """Text as it grows, token by token, never with half a character at its end.

    What `push` and then `flush` return, joined, is what `decode` makes of all tokens at once, or
    of tokens that stand `behind` others what they add to those: the blank before a word counts.
    Bytes that are no text are held back until text follows. (Where single bytes are tokens of a
    sentencepiece kind, the number of U+FFFD for such bytes may differ.)
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool = False, behind: Sequence[int] = ()
    ) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        # Said; a decoder may look at the token before. One that begins within a character, of at
        # most four tokens, may be all U+FFFD. If it ends within one, nothing is behind it.
        starts = (list(behind[-DETOKENIZE_CONTEXT_TOKENS - more :]) for more in range(4))
        whole = (tokens for tokens in starts if not self._decode(tokens).endswith("\ufffd"))
        self._context = next(whole, [])
        self._pending: list[int] = []
        self._said = 0  # characters of the pending tokens

    def push(self, token_id: int) -> str:
        return self.push_all((token_id,))

    def push_all(self, token_ids: Iterable[int]) -> str:
        """The same for several tokens, at the price of one."""
        self._pending += token_ids
        text = self._pending_text()
        whole = text.rstrip("\ufffd")  # what more bytes may still turn into a character
        new, self._said = whole[self._said :], max(self._said, len(whole))
        if text and whole == text:
            self._context, self._pending, self._said = self._pending, [], 0
        return new

    def flush(self) -> str:
        """What was held back, as U+FFFD. The end: afterwards a new text begins."""
        new = self._pending_text()[self._said :]
        self._context, self._pending, self._said = [], [], 0
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
    """A BPE of at most `vocab` tokens, GLM-5's added tokens included, which come last as released.

    "bytes" is byte-level: any text comes back unchanged. "words" is for a small closed language
    written with blanks around punctuation: a word has one spelling wherever it stands, so a blank
    at the start of a text does not come back. Other characters fall back to their bytes.

    The same texts give the same file, byte for byte.
    """
    fixed = len(SpecialToken) + (len(OTHER_BYTES) if splitting == "words" else 0)
    alphabet = WORDS_ALPHABET if splitting == "words" else pre_tokenizers.ByteLevel.alphabet()
    least = fixed + len(alphabet)
    if vocab < least:
        raise TokenizerError(
            f"vocab: {vocab} is less than the {least} tokens that are always there"
        )
    inner = tokenizers.Tokenizer(BPE())
    inner.pre_tokenizer = _cut(splitting)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - fixed, initial_alphabet=sorted(alphabet), show_progress=False
    )
    # The one added token that is a word to the splitting; merges must not come to spell it too.
    inner.train_from_iterator((text.replace(SpecialToken.NOTHINK, "") for text in texts), trainer)
    if splitting == "words":
        inner.model = _with_bytes(inner)
        as_text = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        inner.decoder = decoders.Sequence([*as_text, decoders.Strip(" ", 1, 0)])
    else:
        inner.decoder = decoders.ByteLevel()
    inner.add_tokens([_added(token) for token in SpecialToken])
    return Tokenizer({TOKENIZER_FILE: inner.to_str(pretty=True).encode()}, name="trained")


def _added(token: SpecialToken) -> AddedToken:
    return AddedToken(token.value, special=token.is_special, normalized=False)


def _cut(splitting: PreTokenization) -> pre_tokenizers.PreTokenizer:
    if splitting == "words":
        blank = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always", split=False)
        lines = pre_tokenizers.Split(Regex(LINES_SPLIT), "merged_with_previous")
        words = pre_tokenizers.Split(Regex(WORDS_SPLIT), "isolated")
        return pre_tokenizers.Sequence([blank, lines, words])
    split = pre_tokenizers.Split(Regex(BYTES_SPLIT), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, as_bytes])


def _with_bytes(inner: tokenizers.Tokenizer) -> BPE:
    model = json.loads(inner.to_str())["model"]
    pieces = [*sorted(model["vocab"], key=model["vocab"].get), *OTHER_BYTES]
    merges = [(left, right) for left, right in model["merges"]]
    return BPE({piece: i for i, piece in enumerate(pieces)}, merges, byte_fallback=True)
