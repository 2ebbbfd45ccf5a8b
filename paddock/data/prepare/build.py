"""Corpus builder: clean, deduplicate, filter and tokenize sources into shards, atomically."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from random import Random

from paddock.data.dialogue_sources import DialogueSourceSettings
from paddock.data.prepare import parallel
from paddock.data.prepare.clean import clean_text
from paddock.data.prepare.dedup import MinHashDeduplicator
from paddock.data.prepare.fim import FimParts, fill_in_middle
from paddock.data.prepare.settings import CorpusSettings
from paddock.data.rng import derive_seed
from paddock.data.shards import (
    FORMAT,
    MANIFEST_NAME,
    Corpus,
    CorpusManifest,
    ShardWriter,
    SourceManifest,
    Split,
)
from paddock.data.sources import DataError, Document, SourceContext, SourceSettings
from paddock.data.tokenize_dialogue import tokenize_dialogue
from paddock.records import Dialogue
from paddock.text import (
    ChatTemplate,
    ChatTemplateError,
    NotPrefixPreservingError,
    SpecialToken,
    Tokenizer,
    get_renderer,
)

Progress = Callable[[str, int, int], None]  # source name, documents and bytes so far

_BATCH = 256  # documents per tokenizer call
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def prepare_corpus(
    settings: CorpusSettings,
    tokenizer: Tokenizer,
    root: str | Path,
    *,
    progress: Progress = lambda *_: None,
    processes: int = 1,
) -> Corpus:
    """Build the corpus for these settings in a folder below `root`, or open it if it exists.

    The folder name is the `corpus_key`. Files that changed since are read again only after that
    folder is deleted. Concurrent callers wait on a lock. An interrupted build, or one that runs out
    of disk space, leaves nothing behind.

    With `processes` > 1, large generated sources are built in parallel processes; the calling
    script must then be importable (`if __name__ == "__main__"`).
    """
    folder = Path(root) / corpus_key(settings, tokenizer)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock")):
        if not folder.exists():
            with _atomic_folder(folder) as partial:
                manifest = _build(partial, settings, tokenizer, progress, processes)
                text = manifest.model_dump_json(indent=1, by_alias=True)
                (partial / MANIFEST_NAME).write_text(text + "\n")
    return Corpus(folder, tokenizer=tokenizer)


def corpus_key(settings: CorpusSettings, tokenizer: Tokenizer) -> str:
    """Hash of everything that decides what the shards contain, except the source files."""
    parts = [str(FORMAT), tokenizer.fingerprint, settings.model_dump_json()]
    if settings.has_dialogues and settings.chat_template is None:
        template = ChatTemplate.from_tokenizer(tokenizer)
        parts.append("" if template is None else template.source)
    return sha256("\0".join(parts).encode()).hexdigest()[:16]


def _manifest(settings: CorpusSettings, tokenizer: Tokenizer) -> CorpusManifest:
    """A manifest without sources."""
    return CorpusManifest(
        key=corpus_key(settings, tokenizer),
        tokenizer=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        sources={},
    )


def _build(
    folder: Path,
    settings: CorpusSettings,
    tokenizer: Tokenizer,
    progress: Progress,
    processes: int,
) -> CorpusManifest:
    manifest, builder = _manifest(settings, tokenizer), CorpusBuilder(settings, tokenizer)
    entries: dict[str, SourceManifest] = {}
    sources = parallel.sources_to_parallelize(settings.sources, processes)
    make = partial(_build_in_process, settings, tokenizer.files, folder)
    with parallel.generate_in_processes(sources, processes, make) as futures:
        for source in settings.sources:
            if source.name not in futures:
                writers = _writers(folder, source, settings, manifest)
                entries[source.name] = builder.prepare(source, writers, progress)
        for future in as_completed(futures.values()):
            future.result()  # raises the first error as soon as it occurs
        for name, future in futures.items():
            entries[name] = future.result()
            progress(name, entries[name].documents, entries[name].bytes)
    ordered = {source.name: entries[source.name] for source in settings.sources}
    return manifest.model_copy(update={"sources": ordered})


def _build_in_process(
    settings: CorpusSettings, tokenizer: dict[str, bytes], folder: Path, name: str
) -> SourceManifest:
    """Build one generated source in a worker process; its shards are written below `folder`."""
    (source,) = (source for source in settings.sources if source.name == name)
    known = Tokenizer(tokenizer)
    writers = _writers(folder, source, settings, _manifest(settings, known))
    return CorpusBuilder(settings, known).prepare(source, writers, lambda *_: None)


def _writers(
    folder: Path, source: SourceSettings, settings: CorpusSettings, manifest: CorpusManifest
) -> dict[Split, ShardWriter]:
    source_folder = folder / source.name
    source_folder.mkdir()
    return {
        split: ShardWriter(
            source_folder, split, dtype=manifest.dtype, tokens_per_shard=settings.tokens_per_shard
        )
        for split in ("train", "held_out")
    }


class CorpusBuilder:
    """The steps from a source to its shards. Deduplication covers all sources of one builder."""

    def __init__(self, settings: CorpusSettings, tokenizer: Tokenizer) -> None:
        self._settings, self._tokenizer = settings, tokenizer
        self._dedup = MinHashDeduplicator(settings.dedup)
        self._score = settings.quality.load() if settings.quality else None
        self._bos = [self._id(token) for token in settings.bos_tokens]
        self._eos = [self._id(token) for token in settings.eos_tokens]

    def prepare(
        self, source: SourceSettings, writers: dict[Split, ShardWriter], progress: Progress
    ) -> SourceManifest:
        context = SourceContext(count_tokens=self._count)
        if isinstance(source, DialogueSourceSettings):
            documents, size = self._write_dialogues(source, writers, context, progress)
        else:
            documents, size = self._write_texts(source, writers, context, progress)
        splits = {split: writer.close() for split, writer in writers.items()}
        if not splits["train"]:
            held = f"all {documents} documents are held out" if documents else ""
            raise DataError(
                f"source '{source.name}': {held or _describe_drops(context.drop_counts)}"
            )
        drops = dict(sorted(context.drop_counts.items()))
        return SourceManifest(documents=documents, bytes=size, drop_counts=drops, splits=splits)

    def _write_texts(
        self,
        source: SourceSettings,
        writers: dict[Split, ShardWriter],
        context: SourceContext,
        progress: Progress,
    ) -> tuple[int, int]:
        """Number of documents written, and their size in bytes."""
        documents = size = 0
        kept = (
            self._generated(source, context)
            if source.is_generated
            else self._filtered(source, context)
        )
        while batch := list(islice(kept, _BATCH)):
            rows = self._ids([document for _, document in batch])
            for (split, document), ids in zip(batch, rows, strict=True):
                writers[split].add(ids)
                size += len(document.text.encode())
            documents += len(batch)
            progress(source.name, documents, size)
        return documents, size

    def _write_dialogues(
        self,
        source: DialogueSourceSettings,
        writers: dict[Split, ShardWriter],
        context: SourceContext,
        progress: Progress,
    ) -> tuple[int, int]:
        """As `_write_texts`; dialogues without trained tokens are dropped."""
        renderer = get_renderer(self._tokenizer, version=self._settings.chat_template)
        documents = size = 0
        for split, dialogue in self._split_dialogues(source):
            try:
                rows = tokenize_dialogue(dialogue, renderer, train_on=source.train_on)
            except (ChatTemplateError, NotPrefixPreservingError) as error:
                raise DataError(f"source '{source.name}', {dialogue.id}: {error}") from None
            rows = [row for row in rows if any(row.loss_mask[1:])] if dialogue.weight else []
            context.drop_counts.update([] if rows else ["no trained tokens"])
            for row in rows:
                writers[split].add(row.token_ids, row.loss_mask, dialogue.weight)
            documents += bool(rows)
            size += sum(len(m.content) + len(m.reasoning or "") for m in dialogue.messages)
            if documents % _BATCH == 0:
                progress(source.name, documents, size)
        progress(source.name, documents, size)
        return documents, size

    def _split_dialogues(self, source: DialogueSourceSettings) -> Iterator[tuple[Split, Dialogue]]:
        share = self._settings.held_out_fraction
        if not source.is_generated:
            for found in source.dialogues():
                # By content, not by position: a dialogue never moves to the other split.
                content = repr((found.messages, found.tools))
                yield ("held_out" if derive_seed(content) < share * 2**64 else "train"), found
            return
        yield from (("train", found) for found in source.dialogues())
        other = source.held_out_source(share) if share else None
        if isinstance(other, DialogueSourceSettings):
            yield from (("held_out", found) for found in other.dialogues())

    def _filtered(
        self, source: SourceSettings, context: SourceContext
    ) -> Iterator[tuple[Split, Document]]:
        rules = self._settings
        for found in source.documents(context):
            text = clean_text(found.text, rules.clean, context.drop_counts)
            if text is None:
                continue
            document = Document(
                text=text, id=found.id, source=found.source, content_type=found.content_type
            )
            reason = self._dedup.duplicate_reason(text) or self._quality_reason(document)
            if reason:
                context.drop_counts[reason] += 1
                continue
            # By content, so that a document never moves to the other split.
            yield (
                ("held_out" if derive_seed(text) < rules.held_out_fraction * 2**64 else "train"),
                document,
            )

    def _generated(
        self, source: SourceSettings, context: SourceContext
    ) -> Iterator[tuple[Split, Document]]:
        yield from (("train", document) for document in source.documents(context))
        other = (
            source.held_out_source(self._settings.held_out_fraction)
            if self._settings.held_out_fraction
            else None
        )
        if other is not None:
            yield from (("held_out", document) for document in other.documents(context))

    def _quality_reason(self, document: Document) -> str | None:
        quality = self._settings.quality
        if quality is None or self._score is None or self._score(document) >= quality.min_score:
            return None
        return "quality"

    def _ids(self, documents: Sequence[Document]) -> Iterator[list[int]]:
        """Token ids of each document, with BOS and EOS tokens."""
        rows = [self._parts(document) for document in documents]
        texts = [part for row in rows for part in row if not isinstance(part, SpecialToken)]
        encoded = iter(self._tokenizer.encode_batch(texts))
        for row in rows:
            yield [*self._bos, *self._joined(row, encoded), *self._eos]

    def _joined(self, row: FimParts, encoded: Iterator[list[int]]) -> Iterable[int]:
        for part in row:
            if isinstance(part, SpecialToken):
                yield self._tokenizer.special_token_ids[part]
            else:
                yield from next(encoded)

    def _parts(self, document: Document) -> FimParts:
        if document.content_type != "code":
            return (document.text,)
        rng = Random(derive_seed(self._settings.seed, "fim", document.source, document.id))
        return fill_in_middle(document.text, self._settings.fim, rng)

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, specials=False))

    def _id(self, token: str) -> int:
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise DataError(f"tokenizer '{self._tokenizer.name}' has no token {token}")
        return found


def _describe_drops(drops: dict[str, int]) -> str:
    if not drops:
        return "it has no documents"
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(drops.items()))
    return f"no documents are left; dropped: {reasons}"


@contextmanager
def _atomic_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `folder` on success and removed otherwise."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed run
    partial.mkdir()
    try:
        yield partial
        for path in (*partial.rglob("*"), partial):
            _sync(path)
        partial.rename(folder)
        _sync(folder.parent)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise DataError(
            f"no space for a corpus in {folder.parent} ({error.strerror}); nothing was written"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
