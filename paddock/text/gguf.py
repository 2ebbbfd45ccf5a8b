"""The tokenizer inside a GGUF file, as one of the `tokenizers` library.

GGUF keeps the pieces of a vocabulary, what kind each is, and merges or scores. Of the rule that
cuts text before any merging it keeps only a name, so the rules themselves stand here.
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

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # kinds of pieces
SPACE = "\u2581"  # how sentencepiece spells one

GgufFields = Mapping[str, Any]  # what the file says, by key without "tokenizer.ggml."


class GgufError(ValueError):
    """A tokenizer that cannot be taken over; the message names what is unknown or missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTokenizer:
    """A tokenizer and what else its file says about text."""

    tokenizer: Tokenizer  # puts BOS and EOS where the model expects them
    bos: str | None
    eos: str | None
    unk: str | None
    pad: str | None
    chat_template: str | None

    def files(self) -> dict[str, bytes]:
        """What stands beside the weights of a released model, by file name."""
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
    """The tokenizer of the GGUF file at `path`; GgufError if it is of a kind not known here."""
    said = _read(Path(path))
    try:
        return _built(said)
    except GgufError as error:
        raise GgufError(f"{path}: {error}") from None


def _read(path: Path) -> GgufFields:
    try:
        from gguf import GGUFReader  # an extra: only those who convert need it
    except ImportError:
        raise GgufError(
            "reading GGUF needs the 'gguf' library: pip install 'paddock[data]'"
        ) from None
    if not path.is_file():
        raise GgufError(f"{path}: no such file")
    try:
        fields = GGUFReader(path).fields
    except (ValueError, IndexError, KeyError, OSError, TypeError) as error:
        raise GgufError(f"{path}: truncated or not a GGUF file: {error}") from None
    return {
        key.removeprefix("tokenizer.").removeprefix("ggml."): field.contents()
        for key, field in fields.items()
        if key.startswith("tokenizer.")
    }


def _built(said: GgufFields) -> GgufTokenizer:
    kind = _required(said, "model")
    if kind not in TOKENIZER_BUILDERS:
        raise GgufError(
            f"no kind of tokenizer called '{kind}' is known; there are {_all(TOKENIZER_BUILDERS)}"
        )
    tokenizer, bos_unless_told = TOKENIZER_BUILDERS[kind](said)
    pieces = list(zip(_required(said, "tokens"), _kinds(said), strict=True))
    special = [piece for piece, kind in pieces if kind in (UNKNOWN, CONTROL)]
    whole = [piece for piece, kind in pieces if kind == USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in special])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in whole])
    found = GgufTokenizer(
        tokenizer=tokenizer,
        bos=_piece(said, "bos_token_id"),
        eos=_piece(said, "eos_token_id"),
        unk=_piece(said, "unknown_token_id"),
        pad=_piece(said, "padding_token_id"),
        chat_template=said.get("chat_template"),
    )
    _frame(
        tokenizer,
        before=found.bos if said.get("add_bos_token", bos_unless_told) else None,
        after=found.eos if said.get("add_eos_token", False) else None,
    )
    return found


def _frame(tokenizer: Tokenizer, *, before: str | None, after: str | None) -> None:
    """Have every text begin and end with these tokens."""
    if before is None and after is None:
        return

    def framed(text: str) -> list[str]:
        return [piece for piece in (before, text, after) if piece is not None]

    tokenizer.post_processor = processors.TemplateProcessing(
        single=framed("$A"),
        pair=[*framed("$A"), *framed("$B")],
        special_tokens=[
            (token, tokenizer.token_to_id(token)) for token in (before, after) if token is not None
        ],
    )


# --- byte-level BPE -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PreTokenizerSpec:
    """What a vocabulary expects to happen to text before any merging."""

    cut: PreTokenizer
    normalizer: normalizers.Normalizer | None = None
    whole_words: bool = False  # a word that is a piece stays one, whatever the merges say
    bos: bool = False  # texts begin with BOS where the file is silent


def _split(digits: str) -> PreTokenizer:
    """Words with what precedes them, numbers, punctuation, space: the rule since GPT-4."""
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
    others = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = Split(Regex(f"{words}|{digits}|{others}"), behavior="isolated")
    return Steps([split, ByteLevel(add_prefix_space=False, use_regex=False)])


GPT2 = PreTokenizerSpec(ByteLevel(add_prefix_space=False))
LLAMA3 = PreTokenizerSpec(_split(r"\p{N}{1,3}"), whole_words=True, bos=True)
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


def _byte_level(said: GgufFields) -> tuple[Tokenizer, bool]:
    pre = said.get("pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise GgufError(
            f"no pre-tokenizer called '{pre}' is known; there are {_all(PRE_TOKENIZERS)}"
        )
    rule = PRE_TOKENIZERS[pre]
    merges = _merges(_required(said, "merges"))
    tokenizer = Tokenizer(_bpe(said, merges, ignore_merges=rule.whole_words))
    if rule.normalizer is not None:
        tokenizer.normalizer = rule.normalizer
    tokenizer.pre_tokenizer = rule.cut
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule.bos


# --- sentencepiece --------------------------------------------------------------------------------


def _sentencepiece(said: GgufFields) -> tuple[Tokenizer, bool]:
    pieces, kinds = _required(said, "tokens"), _kinds(said)
    unknown = [piece for piece, kind in zip(pieces, kinds, strict=True) if kind == UNKNOWN]
    merges = _merges(said["merges"]) if "merges" in said else list(_merges_by_score(said))
    model = _bpe(
        said, merges, unk_token=unknown[0] if unknown else None, fuse_unk=True, byte_fallback=True
    )
    prefix = said.get("add_space_prefix", True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = Metaspace(SPACE, "first" if prefix else "never", split=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, True


def _merges_by_score(said: GgufFields) -> Iterator[tuple[str, str]]:
    """Every way to make a piece of two others, the best piece first.

    Sentencepiece merges whichever pair makes the piece of the highest score; ranked merges do the
    same. Only normal pieces are ever made: markers and bytes are not text.
    """
    rows = zip(_required(said, "tokens"), _kinds(said), _column(said, "scores"), strict=True)
    scores = {piece: score for piece, kind, score in rows if kind == NORMAL}
    found = [
        (score, piece[:i], piece[i:])
        for piece, score in scores.items()
        for i in range(1, len(piece))
        if piece[:i] in scores and piece[i:] in scores
    ]
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return ((left, right) for _, left, right in found)


# Each makes a tokenizer, and says whether texts begin with BOS where the file is silent.
TOKENIZER_BUILDERS: dict[str, Callable[[GgufFields], tuple[Tokenizer, bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}


# --- what the file says ---------------------------------------------------------------------------


def _required(said: GgufFields, key: str) -> Any:
    if key not in said:
        raise GgufError(f"'tokenizer.ggml.{key}' is missing")
    return said[key]


def _kinds(said: GgufFields) -> list[int]:
    if "token_type" not in said:
        return [NORMAL] * len(_required(said, "tokens"))
    return _column(said, "token_type")


def _column(said: GgufFields, key: str) -> list[Any]:
    """One entry a piece."""
    pieces, column = _required(said, "tokens"), _required(said, key)
    if len(column) != len(pieces):
        raise GgufError(f"'tokenizer.ggml.{key}' has {len(column)} entries, not {len(pieces)}")
    return list(column)


def _piece(said: GgufFields, key: str) -> str | None:
    if key not in said:
        return None
    pieces = _required(said, "tokens")
    if not 0 <= said[key] < len(pieces):
        raise GgufError(f"'tokenizer.ggml.{key}' is {said[key]} in a vocabulary of {len(pieces)}")
    return str(pieces[said[key]])


def _merges(lines: Sequence[str]) -> list[tuple[str, str]]:
    pairs = [line.partition(" ") for line in lines]
    return [(left, right) for left, _, right in pairs]


def _bpe(said: GgufFields, merges: list[tuple[str, str]], **settings: Any) -> BPE:
    vocabulary = {piece: i for i, piece in enumerate(_required(said, "tokens"))}
    try:
        return BPE(vocabulary, merges, **settings)
    except Exception as error:  # the library has no narrower one
        raise GgufError(f"vocabulary and merges do not fit each other: {error}") from None


def _all(names: Mapping[str, Any]) -> str:
    return ", ".join(names)
