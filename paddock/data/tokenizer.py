"""Tokenizer of a corpus: loaded from files, or trained on the corpus."""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Literal

from pydantic import PositiveInt

from paddock.config import BaseSettings
from paddock.data.prepare import CorpusSettings, Source
from paddock.data.prepare.clean import clean_text
from paddock.data.sources import SourceContext
from paddock.text import ChatTemplate, GlmVersion, Tokenizer, train_tokenizer, with_chat_template


class TokenizerSettings(BaseSettings):
    """Loaded from `path`, or trained on the first documents of the corpus if there is none."""

    path: str | None = None
    vocab_size: PositiveInt = 32_768
    pre_tokenizer: Literal["bytes", "words"] = "bytes"
    documents_per_source: PositiveInt = 20_000  # to train on
    # Read for tokenizer training only: words that later stages introduce.
    extra_sources: tuple[Source, ...] = ()


def open_tokenizer(
    settings: TokenizerSettings,
    corpus: CorpusSettings,
    own: Path,
    *,
    inherited: Path | None = None,
    log: Callable[[str], None] = lambda _: None,
) -> Tokenizer:
    """The tokenizer in `own`, created there if missing. Once created it is never replaced, since
    that would change the meaning of every token.

    A new one comes from the settings' path, else from the checkpoint the run starts from
    (`inherited`), else from training.
    """
    if (own / "tokenizer.json").is_file():
        return Tokenizer.load(own)
    if settings.path is not None:
        tokenizer = Tokenizer.load(settings.path)
    elif inherited is not None and (inherited / "tokenizer.json").is_file():
        tokenizer = Tokenizer.load(inherited)
    else:
        log(f"training a tokenizer with up to {settings.vocab_size:,} tokens")
        tokenizer = train_tokenizer(
            _texts(corpus, settings), vocab=settings.vocab_size, splitting=settings.pre_tokenizer
        )
    if corpus.has_dialogues:
        tokenizer = ensure_chat_template(tokenizer, corpus.chat_template)
    tokenizer.save(own)
    return tokenizer


def ensure_chat_template(tokenizer: Tokenizer, version: GlmVersion | None) -> Tokenizer:
    """The tokenizer with the chat template of its dialogues among its files, so that a server of
    the model renders them the same way."""
    if version is None and ChatTemplate.from_tokenizer(tokenizer) is not None:
        return tokenizer
    return with_chat_template(tokenizer, version or "5")


def _texts(corpus: CorpusSettings, settings: TokenizerSettings) -> Iterator[str]:
    """Cleaned first documents of every source. Long-context documents consist of the others, so
    they are skipped."""
    context = SourceContext(count_tokens=len)
    for source in (*corpus.sources, *settings.extra_sources):
        if source.kind == "longcontext":
            continue
        for document in islice(source.documents(context), settings.documents_per_source):
            if source.is_generated:
                yield document.text
            elif (text := clean_text(document.text, corpus.clean, context.drop_counts)) is not None:
                yield text
