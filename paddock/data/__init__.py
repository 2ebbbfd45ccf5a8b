"""Documents from anywhere into packed batches of tokens: given a seed, the same ones every time.

sources.py        sources of documents: folders, JSONL, Parquet, datasets, Python's own files
dialogue.py       dialogues as JSON lines, in OpenAI's shape and ShareGPT's
dialogue_sources.py  sources of dialogues: files, and worlds that show how it is done
tokenize_dialogue.py  dialogues as rows of tokens that know whether they are learnt
reasoning.py      generated reasoning text, with an eighth of all problems held out
long_context.py   generated long documents with questions about them
prepare/          cleaning, copies, quality, fill-in-the-middle; sources into shards
shards.py         tokenized documents on disk
rng.py            random numbers and orders that are computed, not drawn
mixture.py        which document comes next
packing.py        documents into rows
dataloader.py     batches for one rank of many
stream_state.py   where a stream stands
tokenizer.py      the tokenizer a corpus is cut up with
"""

from paddock.data.dataloader import DataLoaderSettings, PackedBatch, PackedDataLoader, iterate_once
from paddock.data.dialogue import dialogue_to_json, message_to_json
from paddock.data.long_context import LongContextExample, LongContextSource
from paddock.data.prepare.build import corpus_key, prepare_corpus
from paddock.data.prepare.settings import CorpusSettings
from paddock.data.reasoning import ReasoningSource
from paddock.data.shards import Corpus, IndexedDataset
from paddock.data.sources import FileSource, FolderSource, JsonlSource, ParquetSource, SourceContext
from paddock.data.tokenize_dialogue import THINKING_MODES, tokenize_dialogue
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
    "message_to_json",
    "open_tokenizer",
    "prepare_corpus",
    "tokenize_dialogue",
]
