"""The tokenizer of a GGUF file, converted to the `tokenizers` library.

GGUF stores the tokens, their types, and merges or scores. It stores only the name of the
pre-tokenizer, so the pre-tokenizers themselves are defined here.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as Steps

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # token types
SPACE = "\u2581"  # sentencepiece's space

GgufFields = Mapping[str, Any]  # by key without "tokenizer.ggml."


class GgufError(ValueError):
    """A tokenizer that cannot be converted; the message names what is unknown or missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTokenizer:
    """A converted tokenizer with its special tokens and chat template."""

    tokenizer: Tokenizer  # adds BOS and EOS where the model expects them
    bos: str | None
    eos: str | None
    unk: str | None
    pad: str | None
    chat_template: str | None

    def files(self) -> dict[str, bytes]:
        """The tokenizer files of a Hugging Face checkpoint, by name."""
        special = {"bos_token": self.bos, "eos_token": self.eos}
        special |= {"unk_token": self.unk, "pad_token": self.pad}
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **{name: token for name, token in special.items() if token is not None},
        }
        files = {"tokenizer.json": self.tokenizer.to_str(pretty=True)}
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
            files["chat_template.jinja"] = self.chat_template
        files["tokenizer_config.json"] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        return {name: text.encode() for name, text in files.items()}


def tokenizer_from_gguf(path: str | Path) -> GgufTokenizer:
    """The tokenizer of the GGUF file at `path`. Raises GgufError if its kind is not supported."""
    fields = _read(Path(path))
    try:
        return _build(fields)
    except GgufError as error:
        raise GgufError(f"{path}: {error}") from None


def _read(path: Path) -> GgufFields:
    try:
        from gguf import GGUFReader  # optional dependency
    except ImportError:
        raise GgufError(
            "reading GGUF requires the 'gguf' library: pip install 'paddock[data]'"
        ) from None
    if not path.is_file():
        raise GgufError(f"{path}: file not found")
    try:
        fields = GGUFReader(path).fields
    except (ValueError, IndexError, KeyError, OSError, TypeError) as error:
        raise GgufError(f"{path}: truncated or not a GGUF file: {error}") from None
    return {
        key.removeprefix("tokenizer.").removeprefix("ggml."): field.contents()
        for key, field in fields.items()
        if key.startswith("tokenizer.")
    }


def _build(fields: GgufFields) -> GgufTokenizer:
    kind = _required(fields, "model")
    if kind not in TOKENIZER_BUILDERS:
        raise GgufError(
            f"tokenizer model must be one of {_names(TOKENIZER_BUILDERS)}, got {kind!r}"
        )
    tokenizer, bos_by_default = TOKENIZER_BUILDERS[kind](fields)
    pieces = list(zip(_required(fields, "tokens"), _token_types(fields), strict=True))
    special = [piece for piece, kind in pieces if kind in (UNKNOWN, CONTROL)]
    user_defined = [piece for piece, kind in pieces if kind == USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in special])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in user_defined])
    result = GgufTokenizer(
        tokenizer=tokenizer,
        bos=_token(fields, "bos_token_id"),
        eos=_token(fields, "eos_token_id"),
        unk=_token(fields, "unknown_token_id"),
        pad=_token(fields, "padding_token_id"),
        chat_template=fields.get("chat_template"),
    )
    _set_bos_eos(
        tokenizer,
        bos=result.bos if fields.get("add_bos_token", bos_by_default) else None,
        eos=result.eos if fields.get("add_eos_token", False) else None,
    )
    return result


def _set_bos_eos(tokenizer: Tokenizer, *, bos: str | None, eos: str | None) -> None:
    """Add BOS and EOS to every encoded text."""
    if bos is None and eos is None:
        return

    def wrap(text: str) -> list[str]:
        return [piece for piece in (bos, text, eos) if piece is not None]

    tokenizer.post_processor = processors.TemplateProcessing(
        single=wrap("$A"),
        pair=[*wrap("$A"), *wrap("$B")],
        special_tokens=[
            (token, tokenizer.token_to_id(token)) for token in (bos, eos) if token is not None
        ],
    )


# --- byte-level BPE -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PreTokenizerSpec:
    """Pre-tokenizer and normalizer of a byte-level BPE vocabulary."""

    pre_tokenizer: PreTokenizer
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False  # a word in the vocabulary is one token, whatever the merges
    bos: bool = False  # default of add_bos_token


def _split(digits: str) -> PreTokenizer:
    """Words with the preceding character, numbers, punctuation, whitespace, as in GPT-4."""
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
    others = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = Split(Regex(f"{words}|{digits}|{others}"), behavior="isolated")
    return Steps([split, ByteLevel(add_prefix_space=False, use_regex=False)])


GPT2 = PreTokenizerSpec(ByteLevel(add_prefix_space=False))
LLAMA3 = PreTokenizerSpec(_split(r"\p{N}{1,3}"), ignore_merges=True, bos=True)
PRE_TOKENIZERS = {
    "default": GPT2,
    "gpt-2": GPT2,
    "smollm": PreTokenizerSpec(
        Steps([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    ),
    "qwen2": PreTokenizerSpec(_split(r"\p{N}"), normalizer=normalizers.NFC()),
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
}


def _byte_level(fields: GgufFields) -> tuple[Tokenizer, bool]:
    pre = fields.get("pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise GgufError(f"pre-tokenizer must be one of {_names(PRE_TOKENIZERS)}, got {pre!r}")
    spec = PRE_TOKENIZERS[pre]
    merges = _merges(_required(fields, "merges"))
    tokenizer = Tokenizer(_bpe(fields, merges, ignore_merges=spec.ignore_merges))
    if spec.normalizer is not None:
        tokenizer.normalizer = spec.normalizer
    tokenizer.pre_tokenizer = spec.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, spec.bos


# --- sentencepiece --------------------------------------------------------------------------------


def _sentencepiece(fields: GgufFields) -> tuple[Tokenizer, bool]:
    pieces, token_types = _required(fields, "tokens"), _token_types(fields)
    unknown = [piece for piece, kind in zip(pieces, token_types, strict=True) if kind == UNKNOWN]
    merges = _merges(fields["merges"]) if "merges" in fields else list(_merges_by_score(fields))
    model = _bpe(
        fields, merges, unk_token=unknown[0] if unknown else None, fuse_unk=True, byte_fallback=True
    )
    prefix = fields.get("add_space_prefix", True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = Metaspace(SPACE, "first" if prefix else "never", split=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, True


def _merges_by_score(fields: GgufFields) -> Iterator[tuple[str, str]]:
    """Every pair of tokens that joins to a token, the highest score first.

    Sentencepiece merges the pair whose result has the highest score; ranked merges do the same.
    Only normal tokens are merged: control tokens and bytes are not text.
    """
    rows = zip(
        _required(fields, "tokens"), _token_types(fields), _column(fields, "scores"), strict=True
    )
    scores = {piece: score for piece, kind, score in rows if kind == NORMAL}
    result = [
        (score, piece[:i], piece[i:])
        for piece, score in scores.items()
        for i in range(1, len(piece))
        if piece[:i] in scores and piece[i:] in scores
    ]
    result.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return ((left, right) for _, left, right in result)


# Each returns a tokenizer and the default of add_bos_token.
TOKENIZER_BUILDERS: dict[str, Callable[[GgufFields], tuple[Tokenizer, bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}


# --- fields of the file ---------------------------------------------------------------------------


def _required(fields: GgufFields, key: str) -> Any:
    if key not in fields:
        raise GgufError(f"'tokenizer.ggml.{key}' is missing")
    return fields[key]


def _token_types(fields: GgufFields) -> list[int]:
    if "token_type" not in fields:
        return [NORMAL] * len(_required(fields, "tokens"))
    return _column(fields, "token_type")


def _column(fields: GgufFields, key: str) -> list[Any]:
    """A field with one entry per token."""
    pieces, column = _required(fields, "tokens"), _required(fields, key)
    if len(column) != len(pieces):
        raise GgufError(f"'tokenizer.ggml.{key}' has {len(column)} entries, not {len(pieces)}")
    return list(column)


def _token(fields: GgufFields, key: str) -> str | None:
    if key not in fields:
        return None
    pieces = _required(fields, "tokens")
    if not 0 <= fields[key] < len(pieces):
        raise GgufError(f"'tokenizer.ggml.{key}' is {fields[key]} in a vocabulary of {len(pieces)}")
    return str(pieces[fields[key]])


def _merges(lines: Sequence[str]) -> list[tuple[str, str]]:
    pairs = [line.partition(" ") for line in lines]
    return [(left, right) for left, _, right in pairs]


def _bpe(fields: GgufFields, merges: list[tuple[str, str]], **settings: Any) -> BPE:
    vocabulary = {piece: i for i, piece in enumerate(_required(fields, "tokens"))}
    try:
        return BPE(vocabulary, merges, **settings)
    except Exception as error:  # the library has no narrower one
        raise GgufError(f"vocabulary and merges are inconsistent: {error}") from None


def _names(names: Mapping[str, Any]) -> str:
    return ", ".join(names)
