"""The tokenizer a corpus is cut up with: read, or trained on the corpus itself."""

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
    """Read from `folder`, or trained on the head of the corpus when there is none."""

    path: str | None = None
    vocab_size: PositiveInt = 32_768
    pre_tokenizer: Literal["bytes", "words"] = "bytes"
    documents_per_source: PositiveInt = 20_000  # of each source, to train on
    extra_sources: tuple[
        Source, ...
    ] = ()  # read for the tokenizer alone: words that later stages bring


def open_tokenizer(
    settings: TokenizerSettings,
    corpus: CorpusSettings,
    own: Path,
    *,
    inherited: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Tokenizer:
    """The tokenizer in `own`, where it stays for good once it is there: changing it later would
    give every token another meaning. Until then: the one the settings name, else the one of the
    network that is built upon (`inherited`), else a new one.
    """
    if (own / "tokenizer.json").is_file():
        return Tokenizer.load(own)
    if settings.path is not None:
        tokenizer = Tokenizer.load(settings.path)
    elif inherited is not None and (inherited / "tokenizer.json").is_file():
        tokenizer = Tokenizer.load(inherited)
    else:
        say(f"training a tokenizer of up to {settings.vocab_size:,} tokens")
        tokenizer = train_tokenizer(
            _texts(corpus, settings), vocab=settings.vocab_size, splitting=settings.pre_tokenizer
        )
    if corpus.has_dialogues:
        tokenizer = ensure_chat_template(tokenizer, corpus.chat_template)
    tokenizer.save(own)
    return tokenizer


def ensure_chat_template(tokenizer: Tokenizer, version: GlmVersion | None) -> Tokenizer:
    """The tokenizer with the chat template that its dialogues are read with among its files, so
    that whoever serves the network reads them the same way."""
    if version is None and ChatTemplate.from_tokenizer(tokenizer) is not None:
        return tokenizer
    return with_chat_template(tokenizer, version or "5")


def _texts(corpus: CorpusSettings, settings: TokenizerSettings) -> Iterator[str]:
    """The head of every source, cleaned. Long documents are made of the others: they add nothing
    but time."""
    reading = SourceContext(count_tokens=len)
    for source in (*corpus.sources, *settings.extra_sources):
        if source.kind == "longcontext":
            continue
        for document in islice(source.documents(reading), settings.documents_per_source):
            if source.is_generated:
                yield document.text
            elif (text := clean_text(document.text, corpus.clean, reading.drop_counts)) is not None:
                yield text
