"""Training data: sources, corpus preparation, mixtures, packing and resumable dataloading.

sources.py        document sources: folders, JSONL, Parquet, Hugging Face datasets, Python files
dialogue.py       dialogue files in the OpenAI and ShareGPT formats
dialogue_sources.py  dialogue sources: files, and demonstrations by environments
tokenize_dialogue.py  dialogues as token rows with loss masks
reasoning.py      synthetic reasoning text, with an eighth of all problems held out
long_context.py   synthetic long-context tasks: needles, MRCR, interleaved texts, repositories
prepare/          cleaning, deduplication, quality filter, FIM; sources into shards
shards.py         tokenized shards on disk and their manifest
rng.py            counter-based random numbers and permutations
mixture.py        weighted mixture of sources
packing.py        sequence packing
dataloader.py     packed batches for one data-parallel rank
stream_state.py   dataloader state for checkpoints
tokenizer.py      loading or training the tokenizer of a corpus
"""

from paddock.data.dataloader import DataLoaderSettings, PackedBatch, PackedDataLoader, iterate_once
from paddock.data.dialogue import dialogue_to_json
from paddock.data.long_context import LongContextExample, LongContextSource
from paddock.data.prepare.build import corpus_key, prepare_corpus
from paddock.data.prepare.settings import CorpusSettings
from paddock.data.reasoning import ReasoningSource
from paddock.data.shards import Corpus, IndexedDataset
from paddock.data.sources import FileSource, FolderSource, JsonlSource, ParquetSource, SourceContext
from paddock.data.tokenize_dialogue import THINKING_MODES
from paddock.data.tokenizer import TokenizerSettings, open_tokenizer
from paddock.text import Tokenizer

__all__ = [
    "THINKING_MODES",
    "Corpus",
    "CorpusSettings",
    "DataLoaderSettings",
    "FileSource",
    "FolderSource",
    "IndexedDataset",
    "JsonlSource",
    "LongContextExample",
    "LongContextSource",
    "PackedBatch",
    "PackedDataLoader",
    "ParquetSource",
    "ReasoningSource",
    "SourceContext",
    "Tokenizer",
    "TokenizerSettings",
    "corpus_key",
    "dialogue_to_json",
    "iterate_once",
    "open_tokenizer",
    "prepare_corpus",
]
